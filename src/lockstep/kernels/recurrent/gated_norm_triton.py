"""RMSNorm of a recurrent layer's output with a gate, in Triton with a backward pass.

The gated delta rule multiplies the norm of its output by silu(gate), Mamba-2 its output before the norm (`gate_first`).
Like the modules of transformers, the kernel rounds x / rms(x) and its product with the weight, and multiplies by
silu(gate) in fp32. Nemotron-H normalises groups of columns apart. The plain-torch reference is `plain_gated_norm`.
Suffix: W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.norm_triton import PARTS, TILE, WIDEST, plain_rms_norm, weighted
from lockstep.kernels.triton_math import runs_on


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, gate, weight, y, scales, rows, epsilon, WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Computes one group of WIDTH columns of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    line = row * GROUPS + tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    places = line[:, None] * WIDTH + columns[None, :]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    factor = z / (1.0 + tl.exp(-z))
    if GATE_FIRST:
        values *= factor
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + epsilon)
    own = weight + tl.program_id(1) * WIDTH
    weights = tl.load(own + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = weighted(values * scale[:, None], weights[None, :], False, y.dtype.element_ty).to(tl.float32)
    if not GATE_FIRST:
        normed *= factor
    tl.store(y + places, normed.to(y.dtype.element_ty), mask=inside)
    tl.store(scales + line, scale, mask=row < rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x,
    gate,
    weight,
    scales,
    upstream,
    grad_x,
    grad_gate,
    partial_sums,
    rows,
    tiles,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Each of the PARTS programs of a group computes the gradients of every PARTS-th tile of rows."""
    kind: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    group = tl.program_id(1)
    weights = tl.load(weight + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, PARTS):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        line = row * GROUPS + group
        places = line[:, None] * WIDTH + columns[None, :]
        inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
        scale = tl.load(scales + line, mask=row < rows, other=0.0)[:, None]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-z))
        slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
        if GATE_FIRST:
            normed = values * z * sigmoid * scale
        else:
            normed = values * scale
            along = above * weighted(normed, weights, False, kind).to(tl.float32) * slope
            above = (above * z * sigmoid).to(kind).to(tl.float32)
        acc += tl.sum(above * normed.to(kind).to(tl.float32), axis=0)
        above *= weights
        gradient = (above - normed * (tl.sum(above * normed, axis=1) / WIDTH)[:, None]) * scale
        if GATE_FIRST:
            along = gradient * values * slope
            gradient *= z * sigmoid
        tl.store(grad_gate + places, along.to(kind), mask=inside)
        tl.store(grad_x + places, gradient.to(kind), mask=inside)
    sums = partial_sums + (tl.program_id(0) * GROUPS + group) * WIDTH
    tl.store(sums + columns, acc, mask=columns < WIDTH)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight_W: torch.Tensor,
    epsilon: float,
    gate_first: bool = False,
    groups: int = 1,
) -> torch.Tensor:
    y: torch.Tensor = _GatedNorm.apply(x, gate, weight_W, epsilon, gate_first, groups)
    return y


def gated_norm_fits(x: torch.Tensor, gate: torch.Tensor, weight_W: torch.Tensor, groups: int = 1) -> bool:
    width = weight_W.shape[0]
    same = x.dtype == gate.dtype == weight_W.dtype and x.shape == gate.shape and x.shape[-1] == width
    return runs_on(x) and same and width % groups == 0 and 0 < width // groups <= WIDEST and x.numel() > 0


def plain_gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight_W: torch.Tensor,
    epsilon: float,
    gate_first: bool = False,
    groups: int = 1,
) -> torch.Tensor:
    """Reference implementation of `gated_norm`."""
    shape = (*x.shape[:-1], groups, -1)
    x, gate, weight = x.view(shape), gate.view(shape), weight_W.view(groups, -1)
    if gate_first:
        gated = x.float() * torch.nn.functional.silu(gate.float())
        normed = weight * (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    else:
        normed = (plain_rms_norm(x, weight, epsilon) * torch.nn.functional.silu(gate.float())).to(x.dtype)
    return normed.flatten(-2)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        x, gate, weight, epsilon, gate_first, groups = given
        x, gate = x.contiguous(), gate.contiguous()
        rows, sizes = x.numel() // len(weight), _sizes(len(weight) // groups, groups)
        y = torch.empty_like(x)
        scales = torch.empty(rows * groups, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(rows, sizes["ROWS"]), groups)
        _forward[grid](x, gate, weight, y, scales, rows, epsilon, **sizes, GATE_FIRST=gate_first)
        ctx.save_for_backward(x, gate, weight, scales)
        ctx.gate_first, ctx.groups = gate_first, groups
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scales = ctx.saved_tensors
        grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
        rows, sizes = x.numel() // len(weight), _sizes(len(weight) // ctx.groups, ctx.groups)
        tiles = triton.cdiv(rows, sizes["ROWS"])
        parts = min(PARTS, tiles)
        sums = torch.empty(parts, len(weight), dtype=torch.float32, device=x.device)
        given = (x, gate, weight, scales, grads[0].contiguous(), grad_x, grad_gate, sums, rows, tiles)
        _backward[(parts, ctx.groups)](*given, **sizes, GATE_FIRST=ctx.gate_first, PARTS=parts)
        grad_weight = sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_gate, grad_weight, None, None, None


def _sizes(width: int, groups: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "GROUPS": groups, "ROWS": max(1, TILE // 2 // block), "BLOCK": block, "num_warps": 8}
