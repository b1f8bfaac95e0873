"""Log-softmax of rows of logits on an NVIDIA device: each pass reads the logits once, the gradient is written in place.

The plain-torch twins are `row_logprobs` and `row_gradients_` in `logprob.py`. R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.sampling import LEFT_OUT, left_out_below
from lockstep.kernels.triton_math import tanh

BLOCK = 4096
# Lanes of a row's sums: as many as leave all of a lane's numbers in registers.
LANES = 2048
# A logit of -inf is taken as this where it is multiplied by its probability, which is 0 either way.
LEAST = tl.constexpr(-1e30)


@triton.jit
def _capped(logits, softcap, low, FILL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Soft-capped, except what was left out of the distribution: that stays far below."""
    return tl.where(logits <= low, FILL, softcap * tanh(logits / softcap))


@triton.jit
def _stats(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalisers,
    logprobs,
    entropies,
    stride,
    vocabulary,
    sharpness,
    softcap,
    low,
    CAPPED: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. Every lane has its own running maximum, sum of exponentials and sum of logits weighted by
    them; lanes are put together at the end, so that nothing waits for its neighbours inside the loop."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest = tl.full((BLOCK,), LEAST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, vocabulary, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            values = _capped(values, softcap, low, FILL)
        values = tl.maximum(values * sharpness, LEAST)
        # Logits are weighed relative to the largest one so far, so that nothing large cancels in the entropy. One
        # exponential serves both cases: what was there shrinks, or what comes is small.
        apart = values - largest
        small = tl.exp(-tl.abs(apart))
        grows = inside & (apart > 0)
        weighted = tl.where(
            grows, (weighted - total * apart) * small, tl.where(inside, weighted + small * apart, weighted)
        )
        total = tl.where(grows, total * small + 1.0, tl.where(inside, total + small, total))
        largest = tl.where(grows, values, largest)
    lanes, lane_totals = largest, total
    largest = tl.max(lanes, axis=0)
    shrink = tl.exp(lanes - largest)
    weighted = tl.sum((weighted + lane_totals * (lanes - largest)) * shrink, axis=0)
    total = tl.sum(lane_totals * shrink, axis=0)
    normaliser = largest + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32)
    if CAPPED:
        chosen = _capped(chosen, softcap, low, FILL)
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, chosen * sharpness - normaliser)
    tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    logits,
    targets,
    normalisers,
    upstream,
    entropies,
    entropy_upstream,
    stride,
    vocabulary,
    sharpness,
    softcap,
    low,
    SPREAD: tl.constexpr,
    CAPPED: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a row a program: the gradient of log-probability and, with SPREAD, entropy over what was the logit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = logits + row * stride + columns
    inside = columns < vocabulary
    values = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    slope = sharpness
    if CAPPED:
        bent = tanh(values / softcap)
        slope = sharpness * (1.0 - bent * bent)
        values = tl.where(values <= low, FILL, softcap * bent)
    values *= sharpness
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    every = tl.maximum(values - tl.load(normalisers + row), LEAST)
    softmax = tl.exp(every)
    gradient = tl.load(upstream + row) * (chosen - softmax)
    if SPREAD:
        gradient -= tl.load(entropy_upstream + row) * softmax * (every + tl.load(entropies + row))
    gradient *= slope
    tl.store(address, gradient.to(logits.dtype.element_ty), mask=inside)


def row_logprobs(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: float,
    entropy: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, vocabulary = logits_RV.shape
    normalisers = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    logprobs, entropies = torch.empty_like(normalisers), torch.empty_like(normalisers)
    _stats[(rows,)](
        logits_RV,
        targets_R,
        normalisers,
        logprobs,
        entropies,
        logits_RV.stride(0),
        vocabulary,
        1.0 / temperature,
        1.0 if softcap is None else float(softcap),
        left_out_below(logits_RV.dtype),
        CAPPED=softcap is not None,
        FILL=LEFT_OUT,
        BLOCK=LANES,
        num_warps=8,
    )
    return normalisers, logprobs, entropies if entropy else None


def row_gradients_(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    normalisers_R: torch.Tensor,
    upstream_R: torch.Tensor,
    temperature: float,
    entropies_R: torch.Tensor | None = None,
    entropy_upstream_R: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    rows, vocabulary = logits_RV.shape
    spread = entropies_R is not None and entropy_upstream_R is not None
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    _gradients[grid](
        logits_RV,
        targets_R,
        normalisers_R,
        upstream_R.contiguous(),
        entropies_R if spread else normalisers_R,
        entropy_upstream_R.contiguous() if spread else normalisers_R,  # type: ignore[union-attr]
        logits_RV.stride(0),
        vocabulary,
        1.0 / temperature,
        1.0 if softcap is None else float(softcap),
        left_out_below(logits_RV.dtype),
        SPREAD=spread,
        CAPPED=softcap is not None,
        FILL=LEFT_OUT,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return logits_RV
