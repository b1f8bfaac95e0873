"""RMSNorm of a recurrent layer's output with a gate, in Triton with a backward pass.

The gated delta rule multiplies the norm of its output by silu(gate), Mamba-2 its output before the norm (`gate_first`).
Like the modules of transformers, the kernel rounds x / rms(x) and its product with the weight, and multiplies by
silu(gate) in fp32. The plain-torch reference is `plain_gated_norm`. Suffix: W width.
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
    x, gate, weight, y, scales, rows, epsilon, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    places = row[:, None] * WIDTH + columns[None, :]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    factor = z / (1.0 + tl.exp(-z))
    if GATE_FIRST:
        values *= factor
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + epsilon)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = weighted(values * scale[:, None], weights[None, :], False, y.dtype.element_ty).to(tl.float32)
    if not GATE_FIRST:
        normed *= factor
    tl.store(y + places, normed.to(y.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Each of the PARTS programs computes the gradients of every PARTS-th tile of rows."""
    kind: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, PARTS):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        places = row[:, None] * WIDTH + columns[None, :]
        inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
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
    tl.store(partial_sums + tl.program_id(0) * WIDTH + columns, acc, mask=columns < WIDTH)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_W: torch.Tensor, epsilon: float, gate_first: bool = False
) -> torch.Tensor:
    y: torch.Tensor = _GatedNorm.apply(x, gate, weight_W, epsilon, gate_first)
    return y


def gated_norm_fits(x: torch.Tensor, gate: torch.Tensor, weight_W: torch.Tensor) -> bool:
    width = weight_W.shape[0]
    same = x.dtype == gate.dtype == weight_W.dtype and x.shape == gate.shape and x.shape[-1] == width
    return runs_on(x) and same and 0 < width <= WIDEST and x.numel() > 0


def plain_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_W: torch.Tensor, epsilon: float, gate_first: bool = False
) -> torch.Tensor:
    """Reference implementation of `gated_norm`."""
    if gate_first:
        gated = x.float() * torch.nn.functional.silu(gate.float())
        return weight_W * (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return (plain_rms_norm(x, weight_W, epsilon) * torch.nn.functional.silu(gate.float())).to(x.dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, gate_first: bool
    ) -> torch.Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        rows, sizes = x.numel() // weight.shape[0], _sizes(weight.shape[0])
        y = torch.empty_like(x)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(rows, sizes["ROWS"]),)
        _forward[grid](x, gate, weight, y, scales, rows, epsilon, **sizes, GATE_FIRST=gate_first)
        ctx.save_for_backward(x, gate, weight, scales)
        ctx.gate_first = gate_first
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scales = ctx.saved_tensors
        grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
        sizes = _sizes(weight.shape[0])
        tiles = triton.cdiv(len(scales), sizes["ROWS"])
        parts = min(PARTS, tiles)
        sums = torch.empty(parts, weight.shape[0], dtype=torch.float32, device=x.device)
        given = (x, gate, weight, scales, grads[0].contiguous(), grad_x, grad_gate, sums, len(scales), tiles)
        _backward[(parts,)](*given, **sizes, GATE_FIRST=ctx.gate_first, PARTS=parts)
        return grad_x, grad_gate, sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None, None, None


def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "ROWS": max(1, TILE // 2 // block), "BLOCK": block, "num_warps": 8}
