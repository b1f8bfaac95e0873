"""RMSNorm in Triton, with one kernel for the forward pass and one for the backward pass.

For the backward pass only the input and one scale per row are kept. The plain-torch reference is `plain_rms_norm`.
There are two kinds of norms. Llama's rounds x / rms(x) to the dtype of x before it multiplies by the weight. Gemma's
(`unit_offset`) multiplies by 1 + weight in fp32 and rounds once. The suffixes of tensor names mean R rows and W width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import runs_on

# TILE is the number of elements that one program reads of each tensor. WIDEST is the widest row that one program
# supports.
TILE = 4096
WIDEST = 16384
# Maximum number of programs of the backward pass. Each program computes a partial sum of the weight gradient. The
# number of programs does not depend on the device, so that the sums are the same on every device.
PARTS = 528


@triton.jit
def weighted(normed, weights, OFFSET: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiplies normalised fp32 values by the weights, rounded where the transformers modules round."""
    if OFFSET:
        result = normed * (1.0 + weights)
    else:
        result = normed.to(KIND).to(tl.float32) * weights
    return result.to(KIND)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    scales,
    rows,
    epsilon,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    places = row[:, None] * WIDTH + columns[None, :]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + epsilon)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + places, weighted(values * scale[:, None], weights[None, :], OFFSET, y.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    upstream,
    grad_x,
    partial_sums,
    rows,
    tiles,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Each of the PARTS programs computes the gradients of every PARTS-th tile of rows."""
    columns = tl.arange(0, BLOCK)
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, PARTS):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        places = row[:, None] * WIDTH + columns[None, :]
        inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) * scale
        dyw = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            acc += tl.sum(dyw * normed, axis=0)
            dyw *= 1.0 + weights[None, :]
        else:
            acc += tl.sum(dyw * normed.to(x.dtype.element_ty).to(tl.float32), axis=0)
            dyw *= weights[None, :]
        along = tl.sum(dyw * normed, axis=1) / WIDTH
        gradient = (dyw - normed * along[:, None]) * scale
        tl.store(grad_x + places, gradient.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partial_sums + tl.program_id(0) * WIDTH + columns, acc, mask=columns < WIDTH)


class RmsNorm(NamedTuple):
    """The parameters of a norm."""

    weight_W: torch.Tensor
    epsilon: float
    unit_offset: bool = False


def rms_norm(x: torch.Tensor, weight_W: torch.Tensor, epsilon: float, unit_offset: bool = False) -> torch.Tensor:
    y: torch.Tensor = _RmsNorm.apply(x, weight_W, epsilon, unit_offset)
    return y


def norm_fits(x: torch.Tensor, weight_W: torch.Tensor) -> bool:
    width = weight_W.shape[0]
    return runs_on(x) and x.dtype == weight_W.dtype and 0 < width <= WIDEST and x.shape[-1] == width and x.numel() > 0


def plain_rms_norm(x: torch.Tensor, weight_W: torch.Tensor, epsilon: float, unit_offset: bool = False) -> torch.Tensor:
    """Reference implementation of `rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if unit_offset:
        return (normed * (1.0 + weight_W.float())).to(x.dtype)
    return weight_W * normed.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, unit_offset: bool) -> torch.Tensor:
        x = x.contiguous()
        width = weight.shape[0]
        rows = x.numel() // width
        y = torch.empty_like(x)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        sizes = _sizes(width)
        grid = (triton.cdiv(rows, sizes["ROWS"]),)
        _forward[grid](x, weight, y, scales, rows, epsilon, **sizes, OFFSET=unit_offset)
        ctx.save_for_backward(x, weight, scales)
        ctx.unit_offset = unit_offset
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight, scales = ctx.saved_tensors
        upstream = grads[0].contiguous()
        grad_x = torch.empty_like(x)
        sizes = _sizes(weight.shape[0])
        tiles = triton.cdiv(len(scales), sizes["ROWS"])
        parts = min(PARTS, tiles)
        partial_sums = torch.empty(parts, weight.shape[0], dtype=torch.float32, device=x.device)
        sizes |= {"PARTS": parts, "OFFSET": ctx.unit_offset}
        _backward[(parts,)](x, weight, scales, upstream, grad_x, partial_sums, len(scales), tiles, **sizes)
        return grad_x, partial_sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {
        "WIDTH": width,
        "ROWS": max(1, TILE // block),
        "BLOCK": block,
        "num_warps": 8 if block <= TILE else 16,
    }
