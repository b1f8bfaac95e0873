"""The experts of a mixture-of-experts layer for few tokens (decoding), in Triton, without a backward pass.

The pairs of a token and one of its experts are ordered by expert. A program then multiplies the pairs of one expert
with a tile of the expert's weights, so that the weights are read once if an expert has at most BLOCK_M pairs. The
plain-torch reference is `plain_experts`. Suffixes: T tokens, K experts of a token, E experts, W model width, I width of
an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear, silu

from lockstep.kernels.swiglu_triton import activated
from lockstep.kernels.triton_math import runs_on

# Number of pairs that a program of `_order` reads at once.
PAIRS = 1024
# With more pairs per expert, matrix products are limited by arithmetic, and torch's grouped product is faster.
MOST_PAIRS = 64
# Rows of a tile of pairs, as a multiple of the mean number of pairs per expert: most experts then need one tile.
ROOM = 2


class Tile(NamedTuple):
    """Launch parameters of the products: outputs per program (BLOCK_N), inner size (BLOCK_K), num_warps, num_stages."""

    outputs: int
    inner: int
    warps: int
    stages: int


UP, DOWN = Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)


@triton.jit
def _order(chosen, order, starts, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the pairs of one expert, in ascending order, after those of all earlier experts."""
    expert = tl.program_id(0)
    columns = tl.arange(0, PAIRS)
    earlier = tl.zeros([PAIRS], tl.int32)
    for first in range(0, pairs, PAIRS):
        place = first + columns
        other = tl.load(chosen + place, mask=place < pairs, other=EXPERTS)
        earlier += (other < expert).to(tl.int32)
    start = tl.sum(earlier, axis=0)
    tl.store(starts + expert, start)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, pairs)
    for first in range(0, pairs, PAIRS):
        place = first + columns
        own = tl.load(chosen + place, mask=place < pairs, other=EXPERTS) == expert
        rank = tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(order + start + rank, place, mask=own)
        start += tl.sum(own.to(tl.int32), axis=0)


@triton.jit
def _up(  # type: ignore[no-untyped-def]
    x,
    weights,
    order,
    starts,
    out,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes act(gate) * up of the pairs of one expert, for BLOCK_N of its INNER outputs. Output rows are ordered."""
    kind: tl.constexpr = x.dtype.element_ty
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    start, stop = tl.load(starts + expert), tl.load(starts + expert + 1)
    gates = weights + expert * (2 * INNER * WIDTH) + n[:, None] * WIDTH + k[None, :]
    for first in range(start, stop, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        token = tl.load(order + row, mask=row < stop, other=0).to(tl.int64) // CHOSEN
        inputs = x + token[:, None] * WIDTH + k[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(0, WIDTH, BLOCK_K):
            inside = inner + k < WIDTH
            a = tl.load(inputs + inner, mask=(row < stop)[:, None] & inside[None, :], other=0.0)
            mask = (n < INNER)[:, None] & inside[None, :]
            b = tl.load(gates + inner, mask=mask, other=0.0)
            c = tl.load(gates + INNER * WIDTH + inner, mask=mask, other=0.0)
            gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
            up = tl.dot(a, tl.trans(c), up, input_precision="ieee")
        act = activated(gate.to(kind).to(tl.float32), GELU).to(kind).to(tl.float32)
        result = (act * up.to(kind).to(tl.float32)).to(kind)
        mask = (row < stop)[:, None] & (n < INNER)[None, :]
        tl.store(out + row[:, None].to(tl.int64) * INNER + n[None, :], result, mask=mask)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    x,
    weights,
    order,
    starts,
    out,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiplies the ordered pairs of one expert, for BLOCK_N of the WIDTH outputs. Output rows are in pair order."""
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    start, stop = tl.load(starts + expert), tl.load(starts + expert + 1)
    downs = weights + expert * (INNER * WIDTH) + n[:, None] * INNER + k[None, :]
    for first in range(start, stop, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        inputs = x + row[:, None].to(tl.int64) * INNER + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(0, INNER, BLOCK_K):
            inside = inner + k < INNER
            a = tl.load(inputs + inner, mask=(row < stop)[:, None] & inside[None, :], other=0.0)
            b = tl.load(downs + inner, mask=(n < WIDTH)[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        pair = tl.load(order + row, mask=row < stop, other=0).to(tl.int64)
        mask = (row < stop)[:, None] & (n < WIDTH)[None, :]
        tl.store(out + pair[:, None] * WIDTH + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine(pairs, shares, out, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums the outputs of a token's experts, weighted by the router's shares."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        share = tl.load(shares + pair).to(tl.float32)
        value = tl.load(pairs + pair * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * share
        # The product has the dtype of the shares, or of the outputs if the shares are narrower.
        if shares.dtype.element_ty != tl.float32:
            value = value.to(pairs.dtype.element_ty).to(tl.float32)
        acc += value
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=inside)


def experts(
    x_TW: torch.Tensor,
    chosen_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gelu: bool = False,
) -> torch.Tensor:
    """Computes the sum of each token's experts. `gate_up` is (E, 2 I, W), `down` is (E, W, I)."""
    x_TW, chosen_TK, shares_TK = x_TW.contiguous(), chosen_TK.contiguous(), shares_TK.contiguous()
    count, width, inner = down.shape
    chosen, pairs, device = chosen_TK.shape[1], chosen_TK.numel(), x_TW.device
    order, starts = (torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, count + 1))
    _order[(count,)](chosen_TK, order, starts, pairs, EXPERTS=count, PAIRS=PAIRS, num_warps=4)
    rows = max(16, min(64, triton.next_power_of_2(ROOM * -(-pairs // count))))
    hidden, outputs = (torch.empty(pairs, size, dtype=x_TW.dtype, device=device) for size in (inner, width))
    sizes = {"WIDTH": width, "INNER": inner, "BLOCK_M": rows}
    grid = (triton.cdiv(inner, UP.outputs), count)
    _up[grid](x_TW, gate_up, order, starts, hidden, CHOSEN=chosen, GELU=gelu, **sizes, **_launch(UP))
    grid = (triton.cdiv(width, DOWN.outputs), count)
    _down[grid](hidden, down, order, starts, outputs, **sizes, **_launch(DOWN))
    out, block = torch.empty_like(x_TW), min(1024, triton.next_power_of_2(width))
    grid = (len(x_TW), triton.cdiv(width, block))
    _combine[grid](outputs, shares_TK, out, CHOSEN=chosen, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def _launch(tile: Tile) -> dict[str, int]:
    return {"BLOCK_N": tile.outputs, "BLOCK_K": tile.inner, "num_warps": tile.warps, "num_stages": tile.stages}


def experts_fit(x: torch.Tensor, chosen: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Returns whether the kernel computes these tokens: they are few, and no gradient is needed."""
    few = 0 < chosen.numel() <= MOST_PAIRS * len(weights[0])
    plain = all(type(w.data) is torch.Tensor and w.is_contiguous() and w.dtype == x.dtype for w in weights)
    return few and plain and x.dim() == 2 and runs_on(x) and not torch.is_grad_enabled()


def plain_experts(
    x_TW: torch.Tensor,
    chosen_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Reference implementation of `experts`."""
    rows = []
    for x_W, chosen_K, shares_K in zip(x_TW, chosen_TK.tolist(), shares_TK, strict=True):
        gates = [linear(x_W, gate_up[expert]).chunk(2) for expert in chosen_K]
        outputs = [linear(silu(g) * u, down[e]) for (g, u), e in zip(gates, chosen_K, strict=True)]
        rows.append((torch.stack(outputs) * shares_K[:, None]).sum(0).to(x_TW.dtype))
    return torch.stack(rows)
