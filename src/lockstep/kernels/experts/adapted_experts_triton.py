"""The grouped products of experts with a LoRA adapter: x W + scale (x A) B without a separate sum.

A rank of 16 makes a product cheap, but its output is as large as that of the experts. The kernel adds the product to
the output of the experts in place, so this output is read and written once. Each product is rounded to the dtype of the
inputs before the sum, as in plain torch. The gradient of the inputs is computed in the same way. The plain-torch
reference is `plain_adapted`. Suffixes are those of `grouped_experts.py`; R is the rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from lockstep.kernels.experts.grouped_experts import LowRank, aligned_matrices, grouped_linear, has_grouped_mm, low_rank
from lockstep.kernels.triton_math import INTERPRETED


class Tile(NamedTuple):
    """The outputs of a program."""

    rows: int
    columns: int
    warps: int


TILE = Tile(64, 128, 4)
LARGEST_RANK = 128  # larger matrices do not fit in the registers of a program beside its outputs


@triton.jit
def _add_products(  # type: ignore[no-untyped-def]
    out,
    narrow,
    matrix,
    ends,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds narrow matrix[e] to the rows of each expert e. The product is rounded to the dtype of the outputs before the
    sum. A program has some rows of one expert: the programs are numbered by expert, and the last ones have no rows."""
    program = tl.program_id(0)
    expert_E = tl.arange(0, PADDED)
    end_E = tl.load(ends + expert_E, mask=expert_E < EXPERTS, other=0)
    start_E = tl.load(ends + expert_E - 1, mask=(expert_E > 0) & (expert_E < EXPERTS), other=0)
    tiles_E = tl.where(expert_E < EXPERTS, (end_E - start_E + ROWS - 1) // ROWS, 0)
    expert = tl.sum((tl.cumsum(tiles_E, 0) <= program).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(expert_E < expert, tiles_E, 0), 0)
        first = tl.sum(tl.where(expert_E == expert, start_E, 0), 0) + (program - before) * ROWS
        limit = tl.sum(tl.where(expert_E == expert, end_E, 0), 0)
        row_P = (first + tl.arange(0, ROWS)).to(tl.int64)
        column_O = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        rank_R = tl.arange(0, PADDED_RANK)
        inside_P, inside_O, inside_R = row_P < limit, column_O < WIDTH, rank_R < RANK
        narrow_PR = tl.load(
            narrow + row_P[:, None] * RANK + rank_R[None, :], mask=inside_P[:, None] & inside_R[None, :], other=0.0
        )
        places_RO = expert.to(tl.int64) * RANK * WIDTH + rank_R[:, None] * WIDTH + column_O[None, :]
        matrix_RO = tl.load(matrix + places_RO, mask=inside_R[:, None] & inside_O[None, :], other=0.0)
        if INTERPRETED:  # the interpreter has no product of bf16
            narrow_PR, matrix_RO = narrow_PR.to(tl.float32), matrix_RO.to(tl.float32)
        product_PO = tl.dot(narrow_PR, matrix_RO, input_precision="ieee")
        place_PO = row_P[:, None] * WIDTH + column_O[None, :]
        inside_PO = inside_P[:, None] & inside_O[None, :]
        kind = out.dtype.element_ty
        added_PO = product_PO.to(kind).to(tl.float32)
        sum_PO = tl.load(out + place_PO, mask=inside_PO, other=0.0).to(tl.float32) + added_PO
        tl.store(out + place_PO, sum_PO.to(kind), mask=inside_PO)


def add_products(
    out_PO: torch.Tensor,
    narrow_PR: torch.Tensor,
    matrix_ERO: torch.Tensor,
    ends_E: torch.Tensor,
    tile: Tile = TILE,
) -> None:
    """Adds narrow matrix of each row's expert to `out_PO`. The rows behind the last expert stay unchanged."""
    (count, rank, width), rows = matrix_ERO.shape, len(out_PO)
    if not rows:
        return
    assert all(one.is_contiguous() for one in (out_PO, narrow_PR, matrix_ERO))
    _add_products[(triton.cdiv(rows, tile.rows) + count, triton.cdiv(width, tile.columns))](
        out_PO,
        narrow_PR,
        matrix_ERO,
        ends_E,
        EXPERTS=count,
        PADDED=triton.next_power_of_2(count),
        WIDTH=width,
        RANK=rank,
        PADDED_RANK=max(16, triton.next_power_of_2(rank)),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_PI: torch.Tensor,
        weight_EIO: torch.Tensor,
        a_EIR: torch.Tensor,
        b_ERO: torch.Tensor,
        scale: float,
        ends_E: torch.Tensor,
    ) -> torch.Tensor:
        out = grouped_linear(x_PI, weight_EIO, ends_E).contiguous()
        narrow_PR = (grouped_linear(x_PI, a_EIR, ends_E) * scale).contiguous()
        add_products(out, narrow_PR, b_ERO, ends_E)
        ctx.save_for_backward(x_PI, weight_EIO, a_EIR, b_ERO, narrow_PR, ends_E)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PI, weight_EIO, a_EIR, b_ERO, narrow_PR, ends_E = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = grad_a = grad_b = None
        needs_x, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_narrow = (grouped_linear(grad, b_ERO.transpose(-2, -1), ends_E) * ctx.scale).contiguous()
        if needs_x:
            grad_x = grouped_linear(grad, weight_EIO.transpose(-2, -1), ends_E).contiguous()
            add_products(grad_x, grad_narrow, a_EIR.transpose(-2, -1).contiguous(), ends_E)
        if needs_a:
            grad_a = _grouped_gradient(x_PI, grad_narrow, ends_E)
        if needs_b:
            grad_b = _grouped_gradient(narrow_PR, grad, ends_E)
        return grad_x, None, grad_a, grad_b, None, None


def _grouped_gradient(x_PI: torch.Tensor, grad_PO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns x^T grad over the rows of each expert."""
    if has_grouped_mm(x_PI, grad_PO.dtype):
        return functional.grouped_mm(x_PI.t(), grad_PO, offs=ends_E)
    ends = ends_E.tolist()
    return torch.stack([x_PI[a:b].T @ grad_PO[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)])


def adapted(x_PI: torch.Tensor, weight_EIO: torch.Tensor, adapter: LowRank, ends_E: torch.Tensor) -> torch.Tensor:
    """Computes x W + scale (x A) B of each pair with the matrices of its expert. The weights W are frozen."""
    a_EIR, b_ERO = aligned_matrices(x_PI, adapter)
    if weight_EIO.requires_grad or weight_EIO.dtype != x_PI.dtype or b_ERO.shape[1] > LARGEST_RANK:
        return plain_adapted(x_PI, weight_EIO, adapter, ends_E)
    out: torch.Tensor = _AdaptedExperts.apply(x_PI, weight_EIO, a_EIR, b_ERO, adapter.scale, ends_E)
    return out


def plain_adapted(x_PI: torch.Tensor, weight_EIO: torch.Tensor, adapter: LowRank, ends_E: torch.Tensor) -> torch.Tensor:
    """Reference implementation of `adapted`."""
    return grouped_linear(x_PI, weight_EIO, ends_E) + low_rank(x_PI, adapter, ends_E)
