"""Log-softmax of rows of logits on an NVIDIA device: each pass reads the logits once, the gradient is written in place.

The plain-torch twins are `row_logprobs` and `row_gradients_` in `logprob.py`. R rows, V words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _stats(logits, targets, normalisers, logprobs, stride, words, sharpness, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row a program: running maximum and sum of exponentials, then the chosen word's log-probability."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    largest = -float("inf")
    total = 0.0
    for offset in range(0, words, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        values = tl.load(start + columns, mask=columns < words, other=-float("inf")).to(tl.float32) * sharpness
        new = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(values - new), axis=0)
        largest = new
    normaliser = largest + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * sharpness
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, chosen - normaliser)


@triton.jit
def _gradients(logits, targets, normalisers, upstream, stride, words, sharpness, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of a row a program: upstream * (onehot - softmax) over what was the logit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + columns
    inside = columns < words
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32) * sharpness
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    softmax = tl.exp(values - tl.load(normalisers + row))
    gradient = tl.load(upstream + row) * sharpness * (chosen - softmax)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)


def row_logprobs(
    logits_RV: torch.Tensor, targets_R: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, words = logits_RV.shape
    normalisers = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    logprobs = torch.empty_like(normalisers)
    _stats[(rows,)](
        logits_RV,
        targets_R,
        normalisers,
        logprobs,
        logits_RV.stride(0),
        words,
        1.0 / temperature,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return normalisers, logprobs


def row_gradients_(
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
    normalisers_R: torch.Tensor,
    upstream_R: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    rows, words = logits_RV.shape
    grid = (rows, triton.cdiv(words, BLOCK))
    _gradients[grid](
        logits_RV,
        targets_R,
        normalisers_R,
        upstream_R.contiguous(),
        logits_RV.stride(0),
        words,
        1.0 / temperature,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return logits_RV
