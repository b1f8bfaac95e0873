"""Torch's flash attention over packed sequences on NVIDIA devices, with sinks and shared prefixes (cascade)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lockstep.kernels.attention.explicit import sink_gradient, with_sinks
from lockstep.kernels.attention.layout import Cascade, Layout
from lockstep.kernels.attention.partial_attention import Gradients, PartialKernel, Sections, Tensors, merge

# Cascade attention over sequences that share a prefix, without copying the prefix. One part is the attention of a token
# to the unshared tokens of its sequence, and the other part is its attention to the shared prefix, if there is one. The
# two parts are merged by their log-sum-exp (lse). Given the merged output and lse, the backward of each part returns
# its exact contribution to the gradients. Tensor names end with their dimensions, which are T tokens of the packed row,
# R tokens that follow a shared prefix, H query heads, G key/value heads, D head size.


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
        prefix_kv = key.index_select(0, keys_S), value.index_select(0, keys_S)
        prefix_part = kernel.forward(query.index_select(0, rows_R), *prefix_kv, cascade.shared, scale)
        _rows(out).merge_(out, lse_HT, rows_R, *prefix_part)
        ctx.save_for_backward(query, key, value, out, lse_HT)
        ctx.cascade, ctx.scale, ctx.kernel = cascade, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0].contiguous()
        query, key, value, out, lse_HT = ctx.saved_tensors
        cascade, scale, kernel = ctx.cascade, ctx.scale, ctx.kernel
        rows_R, keys_S = cascade.rows_R, cascade.keys_S
        unshared = kernel.backward(upstream, query, key, value, out, lse_HT, cascade.own, scale)
        prefix = kernel.backward(
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
        for grad, prefix_grad, rows in zip(unshared, prefix, (rows_R, keys_S, keys_S), strict=True):
            add_rows_(grad, rows, prefix_grad)
        return *unshared, None, None, None


class Rows(NamedTuple):
    """In-place operations on selected rows of a tensor. No row may be selected twice."""

    merge_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    add_rows_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _rows(tensor: torch.Tensor) -> Rows:
    if not tensor.is_cuda:
        return Rows(merge_, add_rows_)
    from lockstep.kernels.attention import cascade_triton as triton_cascade

    return Rows(triton_cascade.merge_, triton_cascade.add_rows_)


def merge_(
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    rows_R: torch.Tensor,
    more_RHD: torch.Tensor,
    more_lse_HR: torch.Tensor,
) -> None:
    """Merges the attention of the rows `rows_R` over further keys (`more_RHD`, `more_lse_HR`) into `out_THD` and
    `lse_HT`, in place."""
    merged, lse = merge(out_THD.index_select(0, rows_R), lse_HT.index_select(1, rows_R), more_RHD, more_lse_HR)
    out_THD.index_copy_(0, rows_R, merged.to(out_THD.dtype))
    lse_HT.index_copy_(1, rows_R, lse)


def add_rows_(total_THD: torch.Tensor, rows_R: torch.Tensor, more_RHD: torch.Tensor) -> None:
    total_THD.index_add_(0, rows_R, more_RHD)


# Torch's varlen flash attention. Tensor names end with their dimensions, which are T tokens, H query heads, G key/value
# heads, D head size. The plain-torch reference is in `varlen.py`.

# The largest head size that torch's flash attention kernel supports.
LARGEST_HEAD = 256


def flash_fits(query_THD: torch.Tensor, layout: Layout, dropout: float) -> bool:
    half = query_THD.dtype in (torch.float16, torch.bfloat16)
    return half and not dropout and query_THD.shape[-1] % 8 == 0 and query_THD.shape[-1] <= LARGEST_HEAD


def flash_varlen(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    return torch.ops.aten._flash_attention_forward(
        query_THD, key_TGD, value_TGD, *_sequences(layout), False, scale=scale, **_window(window)
    )[0]


def flash_shared(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, cascade: Cascade, scale: float
) -> torch.Tensor:
    """Computes attention over a packed row with shared prefixes."""
    return cascade_attention(query_THD, key_TGD, value_TGD, cascade, scale, FLASH_PARTS)


def flash_with_sinks(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor,
) -> torch.Tensor:
    return _FlashWithSinks.apply(query_THD, key_TGD, value_TGD, sinks_H, layout, scale, window)


class _FlashWithSinks(torch.autograd.Function):
    """Computes attention without sinks, and rescales the output because the sinks take a part of the probability mass.

    The kernel's backward needs only the output and the lse. If output and lse include the sinks, the kernel's gradients
    are exact. The gradient of the sinks is computed by `sink_gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        bare, bare_lse_HT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_sequences(layout), False, scale=scale, **_window(window)
        )
        wide, lse_HT = with_sinks(bare, bare_lse_HT, sinks_H)
        out = wide.to(bare.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, out, lse_HT, rng_state, unused)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = grads[0].contiguous()
        query, key, value, sinks_H, out, lse_HT, rng_state, unused = ctx.saved_tensors
        back = torch.ops.aten._flash_attention_backward(
            upstream,
            query,
            key,
            value,
            out,
            lse_HT,
            *_sequences(ctx.layout),
            rng_state,
            unused,
            scale=ctx.scale,
            **_window(ctx.window),
        )
        return *back, sink_gradient(upstream, out, lse_HT, sinks_H), None, None, None


def flash_line_backward(
    upstream_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the backward pass of flash attention for a forward pass that another kernel computed."""
    state = torch.zeros(2, dtype=torch.int64, device=query_THD.device).view(torch.uint64)
    return torch.ops.aten._flash_attention_backward(
        upstream_THD,
        query_THD,
        key_TGD,
        value_TGD,
        out_THD,
        lse_HT,
        *_sequences(layout),
        state,
        state[:0],
        scale=scale,
        **_window(window),
    )


def flash_part_fits(query_THD: torch.Tensor, value_SGE: torch.Tensor) -> bool:
    half = query_THD.dtype in (torch.float16, torch.bfloat16)
    size = query_THD.shape[-1]
    return half and size == value_SGE.shape[-1] and size % 8 == 0 and size <= LARGEST_HEAD


def flash_part(
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGD: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Tensors:
    """Computes partial attention (see `partial_attention.py`). Like the reference, the kernel aligns the queries and
    keys of a causal sequence at their end."""
    out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        query_THD, key_SGD, value_SGD, *_cu_seqlens(where), False, scale=scale, **_window(window)
    )
    return out, lse_HT


def flash_part_backward(
    upstream_THD: torch.Tensor,
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGD: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Gradients:
    # Without dropout, the kernel does not use the RNG state of the forward pass, so zeros are passed.
    state = torch.zeros(2, dtype=torch.int64, device=query_THD.device).view(torch.uint64)
    return torch.ops.aten._flash_attention_backward(
        upstream_THD.to(query_THD.dtype).contiguous(),
        query_THD,
        key_SGD,
        value_SGD,
        out_THD.to(query_THD.dtype).contiguous(),
        lse_HT.float().contiguous(),
        *_cu_seqlens(where),
        state,
        state[:0],
        scale=scale,
        **_window(window),
    )


FLASH_PARTS = PartialKernel(flash_part, flash_part_backward)


def _cu_seqlens(where: Sections) -> tuple[Any, ...]:
    # With a maximum query length of 1, the kernel would return the lse in a different order, so at least 2 is passed.
    longest = max(2, where.longest_query), where.longest_key
    return where.query_bounds, where.key_bounds, *longest, 0.0, where.causal


def _sequences(layout: Layout) -> tuple[Any, ...]:
    """Returns kernel arguments: cumulative and maximum lengths of queries and keys, dropout 0, causal True."""
    return layout.bounds, layout.bounds, layout.longest, layout.longest, 0.0, True


def _window(window: int | None) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if window else -1}
