"""What `grouped_experts` does around its matrix products, in Triton: moving rows, summing experts, act(gate) * up.

The plain-torch references are `PLAIN` of `grouped_experts.py` and `plain_gate`. The sum of a token's experts reads each
row once, without copies in token order. Suffixes are those of `grouped_experts.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.experts.grouped_experts import TokensToPairs
from lockstep.kernels.swiglu_triton import activated, plain_swiglu, with_slope

BLOCK = 1024


@triton.jit
def _sum_pairs(  # type: ignore[no-untyped-def]
    rows,
    shares,
    place,
    out,
    held,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the rows of a token's pairs, which are at `place`. Pairs at `held` or beyond were left out."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = tl.load(place + token * CHOSEN + choice)
        limit = tl.where(row < held, WIDTH, 0)
        value = tl.load(rows + row * WIDTH + columns, mask=columns < limit, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(shares + token * CHOSEN + choice).to(tl.float32)
            # The product has the wider dtype of outputs and shares, as in plain torch.
            value = value.to(out.dtype.element_ty).to(tl.float32)
        acc += value
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread_gradient(  # type: ignore[no-untyped-def]
    grad,
    shares,
    rows,
    order,
    grad_rows,
    grad_shares,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradients of one pair's row and of its share from the gradient of its token."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row)
    share = tl.load(shares + pair).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        g = tl.load(grad + pair // CHOSEN * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(rows + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_rows + row * WIDTH + columns, (g * share).to(grad_rows.dtype.element_ty), mask=inside)
        total += g * y
    tl.store(grad_shares + pair, tl.sum(total, 0).to(grad_shares.dtype.element_ty))


def _summed(
    rows: torch.Tensor, shares: torch.Tensor | None, place: torch.Tensor, chosen: int, dtype: torch.dtype
) -> torch.Tensor:
    tokens, width = len(place) // chosen, rows.shape[1]
    out, block = rows.new_empty(tokens, width, dtype=dtype), min(BLOCK, triton.next_power_of_2(width))
    if tokens:
        _sum_pairs[(tokens, triton.cdiv(width, block))](
            rows,
            rows if shares is None else shares,
            place,
            out,
            len(rows),
            CHOSEN=chosen,
            WIDTH=width,
            WEIGHTED=shares is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


class _ToPairs(TokensToPairs):
    """Differs from the plain function only in its backward pass."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place_P,) = ctx.saved_tensors
        return _summed(grads[0].contiguous(), None, place_P, ctx.chosen, grads[0].dtype), None, None, None


class _SumOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_PW: torch.Tensor, shares_TK: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor
    ) -> torch.Tensor:
        rows_PW, shares_TK = rows_PW.contiguous(), shares_TK.contiguous()
        ctx.save_for_backward(rows_PW, shares_TK, order_P)
        dtype = torch.promote_types(rows_PW.dtype, shares_TK.dtype)
        return _summed(rows_PW, shares_TK, place_P, shares_TK.shape[1], dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows_PW, shares_TK, order_P = ctx.saved_tensors
        grad_rows, grad_shares = torch.empty_like(rows_PW), torch.zeros_like(shares_TK)
        width = rows_PW.shape[1]
        if len(rows_PW):
            _spread_gradient[(len(rows_PW),)](
                grads[0].contiguous(),
                shares_TK,
                rows_PW,
                order_P,
                grad_rows,
                grad_shares,
                CHOSEN=shares_TK.shape[1],
                WIDTH=width,
                BLOCK=min(BLOCK, triton.next_power_of_2(width)),
                num_warps=4,
            )
        return grad_rows, grad_shares, None, None


def to_experts(states_TW: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, chosen: int) -> torch.Tensor:
    rows: torch.Tensor = _ToPairs.apply(states_TW, order_P, place_P, chosen)
    return rows


def to_tokens(
    rows_PW: torch.Tensor, shares_TK: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = _SumOfExperts.apply(rows_PW, shares_TK, order_P, place_P)
    return out


@triton.jit
def _gate(x, out, count, INNER: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes act(gate) * up of rows that have the gates before the ups."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    gates = x + places // INNER * (2 * INNER) + places % INNER
    g = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gates + INNER, mask=inside, other=0.0).to(tl.float32)
    act = activated(g, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, (act * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradient(  # type: ignore[no-untyped-def]
    x, upstream, grad, count, INNER: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    offsets = places // INNER * (2 * INNER) + places % INNER
    g = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(x + offsets + INNER, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(upstream + places, mask=inside, other=0.0).to(tl.float32)
    act, slope = with_slope(g, GELU)
    act = act.to(x.dtype.element_ty).to(tl.float32)
    tl.store(grad + offsets, (above * u * slope).to(x.dtype.element_ty), mask=inside)
    tl.store(grad + offsets + INNER, (above * act).to(x.dtype.element_ty), mask=inside)


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PO: torch.Tensor, gelu: bool) -> torch.Tensor:
        x_PO = x_PO.contiguous()
        ctx.save_for_backward(x_PO)
        ctx.gelu, inner = gelu, x_PO.shape[1] // 2
        out = x_PO.new_empty(len(x_PO), inner)
        if out.numel():
            grid = (triton.cdiv(out.numel(), BLOCK),)
            _gate[grid](x_PO, out, out.numel(), INNER=inner, GELU=gelu, BLOCK=BLOCK, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x_PO,) = ctx.saved_tensors
        grad, upstream, inner = torch.empty_like(x_PO), grads[0].contiguous(), x_PO.shape[1] // 2
        if upstream.numel():
            _gate_gradient[(triton.cdiv(upstream.numel(), BLOCK),)](
                x_PO, upstream, grad, upstream.numel(), INNER=inner, GELU=ctx.gelu, BLOCK=BLOCK, num_warps=4
            )
        return grad, None


def gate(x_PO: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Computes act(gate) * up, where each row has all gates and then all ups."""
    out: torch.Tensor = _GatedHalves.apply(x_PO, gelu)
    return out


def plain_gate(x_PO: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Reference implementation of `gate`."""
    gates, ups = x_PO.chunk(2, -1)
    return plain_swiglu(gates, ups, gelu)
