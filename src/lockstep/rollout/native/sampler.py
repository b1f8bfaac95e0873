"""From logits to the next token and its log-probability, on the device."""

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
    """Tokens and their log-probabilities under the distribution that the trainer will score.

    That is the softmax at the temperature, over the whole vocabulary or, with `score_truncated`, over what the
    truncation leaves; a repetition penalty is no part of it. Greedy choice (temperature 0) is scored at temperature 1.
    `positions_B` counts the response's tokens from 0; `seen_BV` marks tokens that a repetition penalty applies to.
    `kernel` is a device's `sampler`.
    """
    if kernel == "triton" and seen_BV is None:
        return _fused(logits_BV, sampling, keys_B2, positions_B)
    own = logits_BV.float()
    if sampling.temperature not in (0.0, 1.0):
        own = own / sampling.temperature
    # The penalty scales logits as the temperature does, so their order makes no difference.
    offered = own if seen_BV is None else _penalised(own, seen_BV, sampling.repetition_penalty)
    truncation = truncation_of(sampling)
    left = truncate_(offered.clone(), truncation) if truncation.active else offered
    if sampling.temperature:
        tokens = (left + gumbel_noise(keys_B2, positions_B, own.shape[-1])).argmax(-1)
    else:
        tokens = left.argmax(-1)
    scored = truncate_(own.clone(), truncation, tokens) if sampling.score_truncated and truncation.active else own
    return tokens, scored.gather(-1, tokens[:, None])[:, 0] - scored.logsumexp(-1)


def _fused(
    logits_BV: torch.Tensor, sampling: Sampling, keys_B2: torch.Tensor, positions_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens from one pass over the logits, or over what a truncation leaves of them."""
    from lockstep.kernels.sampling_triton import draw

    truncation, temperature = truncation_of(sampling), sampling.temperature
    if not truncation.active:
        return draw(logits_BV, keys_B2, positions_B, temperature)
    own = logits_BV.float()
    if temperature not in (0.0, 1.0):
        own = own / temperature
    left = truncate_(own.clone(), truncation)
    return draw(left, keys_B2, positions_B, 1.0 if temperature else 0.0, None if sampling.score_truncated else own)


def truncation_of(sampling: Sampling) -> Truncation:
    return Truncation(sampling.top_k, sampling.top_p, sampling.min_p)


def _penalised(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits with those of seen tokens made smaller: positive ones divided by the penalty, negative ones multiplied."""
    smaller = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, smaller, logits_BV)
