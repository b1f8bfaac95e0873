"""From logits to the next token and its log-probability, on the device."""

from __future__ import annotations

import torch

from lockstep.kernels.noise import gumbel_noise
from lockstep.kernels.truncate import Truncation, truncate_
from lockstep.types import Sampling


def choose(
    logits_BV: torch.Tensor,
    sampling: Sampling,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    seen_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probabilities under the distribution that the trainer will score.

    That is the softmax at the temperature, over the whole vocabulary or, with `score_truncated`, over what the
    truncation left. Greedy choice (temperature 0) is scored at temperature 1. `positions_B` counts the response's
    tokens from 0; `seen_BV` marks tokens that a repetition penalty applies to.
    """
    logits = logits_BV.float()
    if seen_BV is not None:
        penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen_BV, penalised, logits)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    drawn_from = truncate_(logits.clone(), truncation) if truncation.active else logits
    if sampling.temperature:
        tokens = (drawn_from + gumbel_noise(keys_B2, positions_B, logits.shape[-1])).argmax(-1)
    else:
        tokens = drawn_from.argmax(-1)
    scored = drawn_from if sampling.score_truncated else logits
    logprobs = scored.gather(-1, tokens[:, None])[:, 0] - scored.logsumexp(-1)
    return tokens, logprobs
