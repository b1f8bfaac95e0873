"""Computes act(gate) * up in Triton, and the complete gated feed-forward (SwiGLU or GeGLU MLP).

For the backward pass, the MLP keeps its input and the outputs of its first two projections, which are called gate and
up. The backward pass recomputes act(gate) * up and writes it to memory that is already allocated. The plain-torch
reference is `plain_swiglu`. Like the transformers modules, the kernel rounds act(gate) to its dtype before the product.
act is silu, or gelu in its tanh approximation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.functional import linear

from lockstep.kernels.triton_math import torch_tanh

BLOCK = 2048


@triton.jit
def activated(g, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes silu(g), or the tanh approximation of gelu(g), in fp32."""
    if GELU:
        result = 0.5 * g * (1.0 + torch_tanh(0.7978845608028654 * (g + 0.044715 * (g * g * g))))
    else:
        result = g / (1.0 + tl.exp(-g))
    return result


@triton.jit
def with_slope(g, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes `activated` and its derivative."""
    if GELU:
        t = torch_tanh(0.7978845608028654 * (g + 0.044715 * (g * g * g)))
        result = 0.5 * g * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * (0.7978845608028654 * (1.0 + 3.0 * 0.044715 * g * g))
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
        result = g * sigmoid
        slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    return result, slope


@triton.jit
def _forward(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    act = activated(g, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, (act * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gate,
    up,
    upstream,
    grad_gate,
    grad_up,
    product,
    count,
    AGAIN: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradients of gate and up. Elements are read before they are written, so outputs may alias inputs.
    If AGAIN is set, act(gate) * up is recomputed too."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
    act, slope = with_slope(g, GELU)
    act = act.to(gate.dtype.element_ty).to(tl.float32)
    along_gate = above * u * slope
    tl.store(grad_gate + places, along_gate.to(gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + places, (above * act).to(gate.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(product + places, (act * u).to(gate.dtype.element_ty), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    out: torch.Tensor = _Swiglu.apply(gate, up, gelu)
    return out


def gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gelu: bool = False
) -> torch.Tensor:
    """Computes the MLP down(act(gate(x)) * up(x)) from the weights of its three linear layers, without biases."""
    out: torch.Tensor = _Gated.apply(x, gate, up, down, gelu)
    return out


def plain_swiglu(gate: torch.Tensor, up: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Reference implementation of `swiglu`."""
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up


def plain_gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gelu: bool = False
) -> torch.Tensor:
    """Reference implementation of `gated`."""
    return linear(plain_swiglu(linear(x, gate), linear(x, up), gelu), down)


def _product(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, gelu: bool) -> torch.Tensor:
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        _forward[grid](gate, up, out, gate.numel(), GELU=gelu, BLOCK=BLOCK, num_warps=8)
    return out


def _gradients(
    gate: torch.Tensor,
    up: torch.Tensor,
    upstream: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    product: torch.Tensor | None,
    gelu: bool,
) -> None:
    if gate.numel():
        _backward[(triton.cdiv(gate.numel(), BLOCK),)](
            gate,
            up,
            upstream,
            grad_gate,
            grad_up,
            gate if product is None else product,
            gate.numel(),
            AGAIN=product is not None,
            GELU=gelu,
            BLOCK=BLOCK,
            num_warps=8,
        )


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return _product(gate, up, torch.empty_like(gate), gelu)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _gradients(gate, up, grads[0].contiguous(), grad_gate, grad_up, None, ctx.gelu)
        return grad_gate, grad_up, None


class _Gated(torch.autograd.Function):
    """The gated MLP. No other function uses the outputs of the MLP's gate and up projections, so the backward pass
    overwrites these outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        gelu: bool,
    ) -> torch.Tensor:
        gate, up = linear(x, gate_weight), linear(x, up_weight)
        if not any(ctx.needs_input_grad):
            return linear(_product(gate, up, gate, gelu), down_weight)
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight, gate, up)
        ctx.used_up, ctx.gelu = False, gelu
        return linear(_product(gate, up, torch.empty_like(gate), gelu), down_weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_weight, up_weight, down_weight, gate, up = ctx.saved_tensors
        if ctx.used_up:
            # In a second backward pass through the same graph, gate and up were already overwritten, so they are
            # recomputed.
            gate, up = linear(x, gate_weight), linear(x, up_weight)
        ctx.used_up = True
        want_x, want_gate, want_up, want_down, _ = ctx.needs_input_grad
        rows, upstream, gate, up = (tensor.flatten(0, -2) for tensor in (x, grads[0], gate, up))
        product = upstream @ down_weight
        _gradients(gate, up, product, gate, up, product, ctx.gelu)
        grad_down = upstream.t() @ product if want_down else None
        del product
        # addmm_ adds the second matmul to the first in place, which saves a rounding and a pass over memory.
        grad_x = (gate @ gate_weight).addmm_(up, up_weight).view_as(x) if want_x else None
        grad_gate = gate.t() @ rows if want_gate else None
        grad_up = up.t() @ rows if want_up else None
        return grad_x, grad_gate, grad_up, grad_down, None
