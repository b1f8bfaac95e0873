"""Samples the next token in Triton and computes its log-prob, in one pass over the logits.

The plain-torch reference is `choose` of the rollout engine. The Gumbel noise equals that of `sampling.py` bit for bit,
so both implementations sample the same tokens. The suffixes of tensor names mean B rows and V vocabulary size. A row of
logits is split into parts of a fixed size, so tokens and log-probs do not depend on the other rows of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.sampling import FIRST, SECOND, STRIDE
from lockstep.kernels.triton_math import log, log1p

# Number of vocabulary entries of one part of a row, and the number of warps of the program that reads a part.
PART, WARPS = 4096, 8
_FIRST, _SECOND, _STRIDE = tl.constexpr(FIRST), tl.constexpr(SECOND), tl.constexpr(STRIDE)
# An index that is larger than that of any vocabulary entry.
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 13)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _gumbel(columns, first, second):  # type: ignore[no-untyped-def]
    """Computes the Gumbel noise of the vocabulary entries `columns`, for a row with the hashed keys `first` and
    `second`."""
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
    m_parts,
    l_parts,
    offered_stride,
    scored_stride,
    vocabulary,
    sharpness,
    NOISE: tl.constexpr,
    APART: tl.constexpr,
    PART: tl.constexpr,
):
    """Each program reads one part of a row of logits. The program computes the entry with the largest logit plus noise,
    the largest logit (m_i) and the sum of exponentials (l_i)."""
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
    # As in torch's argmax, NaN counts as the largest value, and of equal values the first index is returned.
    noisy = tl.where(inside, tl.where(noisy != noisy, float("inf"), noisy), -float("inf"))
    best = tl.max(noisy, axis=0)
    winner = tl.min(tl.where(noisy == best, columns, _NONE), axis=0)
    if APART:
        logits = tl.load(scored + row * scored_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
        logits *= sharpness
    m_i = tl.max(logits, axis=0)
    # If all logits of a part are -inf, 0 is subtracted instead, because -inf - -inf is NaN.
    l_i = tl.sum(tl.exp(logits - tl.where(m_i == -float("inf"), 0.0, m_i)), axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(bests + place, best)
    tl.store(winners + place, winner)
    tl.store(m_parts + place, m_i)
    tl.store(l_parts + place, l_i)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    scored,
    bests,
    winners,
    m_parts,
    l_parts,
    tokens,
    logprobs,
    scored_stride,
    parts,
    sharpness,
    PARTS: tl.constexpr,
):
    """Computes the sampled token of a row and its log-prob from the results of the row's parts."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PARTS)
    places = row * parts + columns
    inside = columns < parts
    best = tl.load(bests + places, mask=inside, other=-float("inf"))
    winner = tl.load(winners + places, mask=inside, other=_NONE)
    token = tl.min(tl.where(best == tl.max(best, axis=0), winner, _NONE), axis=0)
    m_i = tl.load(m_parts + places, mask=inside, other=-float("inf"))
    l_i = tl.load(l_parts + places, mask=inside, other=0.0)
    m = tl.max(m_i, axis=0)
    lse = m + tl.log(tl.sum(l_i * tl.exp(m_i - m), axis=0))
    chosen = tl.load(scored + row * scored_stride + token).to(tl.float32) * sharpness
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - lse)


def draw(
    offered_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    temperature: float,
    scored_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token for each row of the logits `offered_BV` at the given temperature (0: argmax). Returns the
    tokens and their log-probs.

    If `scored_BV` is given, the log-prob is computed from those logits, at the same temperature.
    """
    batch, vocabulary = offered_BV.shape
    parts = triton.cdiv(vocabulary, PART)
    scored = offered_BV if scored_BV is None else scored_BV
    assert offered_BV.stride(1) == scored.stride(1) == 1
    device = offered_BV.device
    bests, m_parts, l_parts = torch.empty(3, batch, parts, dtype=torch.float32, device=device)
    winners = torch.empty(batch, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=device)
    # Like torch, this divides by a scalar temperature by multiplying with its fp32 inverse.
    sharpness = float(torch.tensor(1.0) / torch.tensor(temperature)) if temperature else 1.0
    _parts[(batch, parts)](
        offered_BV,
        scored,
        keys_B2.contiguous(),
        positions_B.contiguous(),
        bests,
        winners,
        m_parts,
        l_parts,
        offered_BV.stride(0),
        scored.stride(0),
        vocabulary,
        sharpness,
        NOISE=temperature != 0,
        APART=scored_BV is not None,
        PART=PART,
        num_warps=WARPS,
        # Fused multiply-add would round differently from the plain-torch reference.
        enable_fp_fusion=False,
    )
    _merge[(batch,)](
        scored,
        bests,
        winners,
        m_parts,
        l_parts,
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
