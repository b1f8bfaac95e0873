"""Log-softmax of logits in Triton. The forward reads the logits once; the backward overwrites them with the gradient.

The plain-torch references are `row_logprobs` and `row_gradients_` in `logprob.py`. R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.sampling import LEFT_OUT, left_out_below
from lockstep.kernels.triton_math import tanh

BLOCK = 4096
# Block size of the forward kernel along the vocabulary, chosen so that all running values stay in registers.
LANES = 2048
# LEAST replaces a logit of -inf, because the product of -inf and its probability 0 would be NaN.
LEAST = tl.constexpr(-1e30)


@triton.jit
def _capped(logits, softcap, low, FILL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Applies the soft cap to logits. The logit of a truncated token becomes FILL instead."""
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
    """Computes log-sum-exp, log-prob and entropy of one row per program by online softmax. Every lane keeps its running
    maximum (m_i), sum of exponentials (l_i) and weighted sum of logits; lanes are merged after the loop, so that the
    loop has no reductions."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    m_i = tl.full((BLOCK,), LEAST, dtype=tl.float32)
    l_i = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, vocabulary, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        in_row = columns < vocabulary
        values = tl.load(start + columns, mask=in_row, other=0.0).to(tl.float32)
        if CAPPED:
            values = _capped(values, softcap, low, FILL)
        values = tl.maximum(values * sharpness, LEAST)
        # The weighted sum uses logits relative to the running maximum, so that large logits cause no cancellation in
        # the entropy. One exponential serves two purposes: with a new maximum it rescales the old sum, else it weights
        # the new term.
        diff = values - m_i
        alpha = tl.exp(-tl.abs(diff))
        is_new_max = in_row & (diff > 0)
        weighted = tl.where(
            is_new_max, (weighted - l_i * diff) * alpha, tl.where(in_row, weighted + alpha * diff, weighted)
        )
        l_i = tl.where(is_new_max, l_i * alpha + 1.0, tl.where(in_row, l_i + alpha, l_i))
        m_i = tl.where(is_new_max, values, m_i)
    m_lanes, l_lanes = m_i, l_i
    m_i = tl.max(m_lanes, axis=0)
    lane_alpha = tl.exp(m_lanes - m_i)
    weighted = tl.sum((weighted + l_lanes * (m_lanes - m_i)) * lane_alpha, axis=0)
    l_i = tl.sum(l_lanes * lane_alpha, axis=0)
    lse = m_i + tl.log(l_i)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32)
    if CAPPED:
        chosen = _capped(chosen, softcap, low, FILL)
    tl.store(normalisers + row, lse)
    tl.store(logprobs + row, chosen * sharpness - lse)
    tl.store(entropies + row, tl.log(l_i) - weighted / l_i)


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
    """Overwrites one block of a row of logits with the gradient of the log-prob. If SPREAD is set, the kernel also adds
    the gradient of the entropy."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = logits + row * stride + columns
    in_row = columns < vocabulary
    values = tl.load(address, mask=in_row, other=0.0).to(tl.float32)
    slope = sharpness
    if CAPPED:
        tanh_x = tanh(values / softcap)
        slope = sharpness * (1.0 - tanh_x * tanh_x)
        values = tl.where(values <= low, FILL, softcap * tanh_x)
    values *= sharpness
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    log_p = tl.maximum(values - tl.load(normalisers + row), LEAST)
    p = tl.exp(log_p)
    grad = tl.load(upstream + row) * (chosen - p)
    if SPREAD:
        grad -= tl.load(entropy_upstream + row) * p * (log_p + tl.load(entropies + row))
    grad *= slope
    tl.store(address, grad.to(logits.dtype.element_ty), mask=in_row)


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
