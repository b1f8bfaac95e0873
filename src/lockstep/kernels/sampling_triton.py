"""From logits to the next token and its log-probability on an NVIDIA device, in one pass over the logits.

The plain-torch twin is the engine's `choose`; the noise is that of `noise.py`, bit for bit, so both draw the same
tokens. B rows, V vocabulary. A row is read in parts of one size, whatever the batch: neither a token nor its
log-probability depends on what else is drawn at the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.sampling import FIRST, SECOND, STRIDE
from lockstep.kernels.triton_math import log, log1p

# Entries of a part, and warps of the program that reads it.
PART, WARPS = 4096, 8
_FIRST, _SECOND, _STRIDE = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(STRIDE)
# No entry has this number.
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 13)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _gumbel(columns, first, second):  # type: ignore[no-untyped-def]
    """Noise of the entries at `columns`, for a row with the mixed keys `first` and `second`."""
    entries = _mix((columns + 1).to(tl.uint32))
    bits = _mix(_mix(entries ^ first) + second)
    share = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    return -log(-log1p(-tl.minimum(share, 0.99999994)))  # 1 - 2^-24


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    offered,
    scored,
    keys,
    positions,
    bests,
    winners,
    peaks,
    totals,
    offered_stride,
    scored_stride,
    vocabulary,
    sharpness,
    NOISE: tl.constexpr,
    APART: tl.constexpr,
    PART: tl.constexpr,
):
    """One part of a row: its best entry with noise, and its largest logit with the sum of exponentials below it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < vocabulary
    logits = tl.load(offered + row * offered_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    logits *= sharpness
    if NOISE:
        step = tl.load(positions + row).to(tl.uint32)
        first = _mix(tl.load(keys + 2 * row).to(tl.uint32) + step * _STRIDE)
        second = _mix(tl.load(keys + 2 * row + 1).to(tl.uint32) ^ (step * _FIRST))
        noisy = logits + _gumbel(columns, first, second)
    else:
        noisy = logits
    # As torch's argmax: what is not a number is the largest, and of equals the first one wins.
    noisy = tl.where(inside, tl.where(noisy != noisy, float("inf"), noisy), -float("inf"))
    best = tl.max(noisy, axis=0)
    winner = tl.min(tl.where(noisy == best, columns, _NONE), axis=0)
    if APART:
        logits = tl.load(scored + row * scored_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
        logits *= sharpness
    peak = tl.max(logits, axis=0)
    # A part may hold nothing but -inf, and -inf - -inf is no number.
    total = tl.sum(tl.exp(logits - tl.where(peak == -float("inf"), 0.0, peak)), axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(bests + place, best)
    tl.store(winners + place, winner)
    tl.store(peaks + place, peak)
    tl.store(totals + place, total)


@triton.jit
def _whole(  # type: ignore[no-untyped-def]
    scored,
    bests,
    winners,
    peaks,
    totals,
    tokens,
    logprobs,
    scored_stride,
    parts,
    sharpness,
    PARTS: tl.constexpr,
):
    """A row from its parts."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PARTS)
    places = row * parts + columns
    inside = columns < parts
    best = tl.load(bests + places, mask=inside, other=-float("inf"))
    winner = tl.load(winners + places, mask=inside, other=_NONE)
    token = tl.min(tl.where(best == tl.max(best, axis=0), winner, _NONE), axis=0)
    peak = tl.load(peaks + places, mask=inside, other=-float("inf"))
    total = tl.load(totals + places, mask=inside, other=0.0)
    largest = tl.max(peak, axis=0)
    normaliser = largest + tl.log(tl.sum(total * tl.exp(peak - largest), axis=0))
    chosen = tl.load(scored + row * scored_stride + token).to(tl.float32) * sharpness
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - normaliser)


def draw(
    offered_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    temperature: float,
    scored_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row of `offered_BV` at the temperature (0: the likeliest), and its log-probability.

    With `scored_BV` the log-probability is that of these logits, at the same temperature.
    """
    batch, vocabulary = offered_BV.shape
    parts = triton.cdiv(vocabulary, PART)
    scored = offered_BV if scored_BV is None else scored_BV
    assert offered_BV.stride(1) == scored.stride(1) == 1
    device = offered_BV.device
    bests, peaks, totals = torch.empty(3, batch, parts, dtype=torch.float32, device=device)
    winners = torch.empty(batch, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=device)
    # What torch computes there for a division by a number: the product with its fp32 inverse.
    sharpness = float(torch.tensor(1.0) / torch.tensor(temperature)) if temperature else 1.0
    _parts[(batch, parts)](
        offered_BV,
        scored,
        keys_B2.contiguous(),
        positions_B.contiguous(),
        bests,
        winners,
        peaks,
        totals,
        offered_BV.stride(0),
        scored.stride(0),
        vocabulary,
        sharpness,
        NOISE=temperature != 0,
        APART=scored_BV is not None,
        PART=PART,
        num_warps=WARPS,
        # A product and a sum in one rounding would be another number than the twin's.
        enable_fp_fusion=False,
    )
    _whole[(batch,)](
        scored,
        bests,
        winners,
        peaks,
        totals,
        tokens,
        logprobs,
        scored.stride(0),
        parts,
        sharpness,
        PARTS=triton.next_power_of_2(parts),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens, logprobs
