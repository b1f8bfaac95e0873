"""Attention on a line whose sequences share beginnings, without a copy of a whole sequence: two parts put together.

Every token attends to what stands on the line for its sequence alone, and, where a beginning is shared, to that; the
two are merged by the logarithms of their sums of exponentials (L). Given the merged output and L, the backward of
each part gives its share of the gradients, exactly. Shapes: T tokens of the line, R of them behind a shared beginning,
H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.kernels.layout import Cascade
from lockstep.kernels.parts import PartialKernel, merge


def cascade_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    cascade: Cascade,
    scale: float,
    kernel: PartialKernel,
) -> torch.Tensor:
    return _CascadeAttention.apply(query_THD, key_TGD, value_TGD, cascade, scale, kernel)


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cascade: Cascade,
        scale: float,
        kernel: PartialKernel,
    ) -> torch.Tensor:
        rows_R, keys_S = cascade.rows_R, cascade.keys_S
        out, lse_HT = kernel.forward(query, key, value, cascade.own, scale)
        beginning = key.index_select(0, keys_S), value.index_select(0, keys_S)
        more = kernel.forward(query.index_select(0, rows_R), *beginning, cascade.shared, scale)
        _rows(out).merge_(out, lse_HT, rows_R, *more)
        ctx.save_for_backward(query, key, value, out, lse_HT)
        ctx.cascade, ctx.scale, ctx.kernel = cascade, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0].contiguous()
        query, key, value, out, lse_HT = ctx.saved_tensors
        cascade, scale, kernel = ctx.cascade, ctx.scale, ctx.kernel
        rows_R, keys_S = cascade.rows_R, cascade.keys_S
        own = kernel.backward(upstream, query, key, value, out, lse_HT, cascade.own, scale)
        shared = kernel.backward(
            upstream.index_select(0, rows_R),
            query.index_select(0, rows_R),
            key.index_select(0, keys_S),
            value.index_select(0, keys_S),
            out.index_select(0, rows_R),
            lse_HT.index_select(1, rows_R),
            cascade.shared,
            scale,
        )
        add_rows_ = _rows(out).add_rows_
        for total, more, places in zip(own, shared, (rows_R, keys_S, keys_S), strict=True):
            add_rows_(total, places, more)
        return *own, None, None, None


class Rows(NamedTuple):
    """What happens to some rows of a tensor, no row named twice."""

    merge_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    add_rows_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _rows(tensor: torch.Tensor) -> Rows:
    if not tensor.is_cuda:
        return Rows(merge_, add_rows_)
    from lockstep.kernels import triton_cascade

    return Rows(triton_cascade.merge_, triton_cascade.add_rows_)


def merge_(
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    rows_R: torch.Tensor,
    more_RHD: torch.Tensor,
    more_lse_HR: torch.Tensor,
) -> None:
    """Put a second part into some rows of a first: into its output and L."""
    merged, lse = merge(out_THD.index_select(0, rows_R), lse_HT.index_select(1, rows_R), more_RHD, more_lse_HR)
    out_THD.index_copy_(0, rows_R, merged.to(out_THD.dtype))
    lse_HT.index_copy_(1, rows_R, lse)


def add_rows_(total_THD: torch.Tensor, rows_R: torch.Tensor, more_RHD: torch.Tensor) -> None:
    total_THD.index_add_(0, rows_R, more_RHD)
