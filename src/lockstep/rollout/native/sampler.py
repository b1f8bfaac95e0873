"""Samples the next token from logits on the device, and computes its log-prob."""

from __future__ import annotations

import torch

from lockstep.kernels.sampling import Truncation, gumbel_noise, truncate_
from lockstep.types import Sampling


def choose(
    logits_BV: torch.Tensor,
    sampling: Sampling,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    seen_BV: torch.Tensor | None = None,
    kernel: str = "plain",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row; returns the tokens with their log-probs under the distribution that the trainer uses.

    The trainer's distribution is the softmax at the temperature, without the repetition penalty, over the full
    vocabulary or, with `score_truncated`, over the tokens that truncation keeps. Greedy decoding (temperature 0) is
    scored at temperature 1. `positions_B` is the position of the new token in its response, counted from 0. `seen_BV`
    marks the tokens that get the repetition penalty. `kernel` is the `sampler` attribute of a device.
    """
    if kernel == "triton" and seen_BV is None:
        return _fused(logits_BV, sampling, keys_B2, positions_B)
    scaled = logits_BV.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    # Penalty and temperature both scale logits, so their order does not matter.
    offered = scaled if seen_BV is None else _penalised(scaled, seen_BV, sampling.repetition_penalty)
    truncation = truncation_of(sampling)
    left = truncate_(offered.clone(), truncation) if truncation.active else offered
    if sampling.temperature:
        tokens = (left + gumbel_noise(keys_B2, positions_B, scaled.shape[-1])).argmax(-1)
    else:
        tokens = left.argmax(-1)
    scored = truncate_(scaled.clone(), truncation, tokens) if sampling.score_truncated and truncation.active else scaled
    return tokens, scored.gather(-1, tokens[:, None])[:, 0] - scored.logsumexp(-1)


def _fused(
    logits_BV: torch.Tensor, sampling: Sampling, keys_B2: torch.Tensor, positions_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same as `choose` with a fused kernel that reads the logits once, after truncation if there is any."""
    from lockstep.kernels.sampling_triton import draw

    truncation, temperature = truncation_of(sampling), sampling.temperature
    if not truncation.active:
        return draw(logits_BV, keys_B2, positions_B, temperature)
    scaled = logits_BV.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    left = truncate_(scaled.clone(), truncation)
    return draw(left, keys_B2, positions_B, 1.0 if temperature else 0.0, None if sampling.score_truncated else scaled)


def truncation_of(sampling: Sampling) -> Truncation:
    return Truncation(sampling.top_k, sampling.top_p, sampling.min_p)


def _penalised(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Applies the repetition penalty to seen tokens: divides positive logits by the penalty and multiplies negative
    logits by it."""
    smaller = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, smaller, logits_BV)
