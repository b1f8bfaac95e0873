"""Selects the tokens and responses that an update uses, by Clip-Cov, KL-Cov or policy filtration (PF-PPO)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.algorithms.reduce import floor_logprobs
from lockstep.errors import Refusal

# Token selection of Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617). The covariance of a token is (A - mean
# A)(log p - mean log p), with means over the kept tokens of the update.
#
# The paper's code differs: it selects tokens in each micro-batch by the current log-probs, and its Clip-Cov skips
# tokens that PPO clips. In lockstep, tokens are selected once per update, from the log-probs before the update. So the
# selection does not depend on micro-batches or devices, and before the update no token is clipped.


def select_clip_cov(
    old_K: torch.Tensor,
    advantages_K: torch.Tensor,
    keep_K: torch.Tensor,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Returns a mask that is 1 at randomly chosen tokens whose covariance is in [low, high], and 0 elsewhere.

    `share` is the fraction of all kept tokens to choose. At least one token is chosen, unless `share` is 0 or no token
    is in the range. If the range [low, high] has too few tokens, all its tokens are chosen. With the same seed all
    ranks choose the same tokens.
    """
    covariance_K = _covariance(old_K, advantages_K, keep_K)
    band = torch.nonzero((keep_K > 0) & (covariance_K >= low) & (covariance_K <= high)).flatten()
    order = torch.randperm(len(band), generator=generator, device=generator.device).to(band.device)
    return _marked(old_K, band[order[: _count(share, keep_K)]])


def select_kl_cov(
    old_K: torch.Tensor,
    advantages_K: torch.Tensor,
    keep_K: torch.Tensor,
    *,
    share: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Returns a mask that is 1 at the tokens of highest covariance, and 0 elsewhere. `share` is the selected fraction
    of all kept tokens. At least one token is selected, unless `share` is 0.

    Of tokens with equal covariance the earlier one is selected. The selection has no randomness.
    """
    kept = torch.nonzero(keep_K > 0).flatten()
    covariance = _covariance(old_K, advantages_K, keep_K)[kept]
    order = torch.argsort(covariance, descending=True, stable=True)
    return _marked(old_K, kept[order[: _count(share, keep_K)]])


# Maps the name of a loss to its function that selects tokens.
SELECTORS: dict[str, Callable[..., torch.Tensor]] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}


def _covariance(old_K: torch.Tensor, advantages_K: torch.Tensor, keep_K: torch.Tensor) -> torch.Tensor:
    return _centred(advantages_K, keep_K) * _centred(floor_logprobs(old_K), keep_K)


def _centred(values_K: torch.Tensor, keep_K: torch.Tensor) -> torch.Tensor:
    """The values minus their mean over the kept tokens, in float64; 0 at tokens that are not kept."""
    kept_K = keep_K > 0
    values_K = torch.where(kept_K, values_K.double(), 0.0)
    return torch.where(kept_K, values_K - values_K.sum() / kept_K.sum().clamp(min=1), 0.0)


def _count(share: float, keep_K: torch.Tensor) -> int:
    return max(int(share * int((keep_K > 0).sum())), 1) if share > 0 else 0


def _marked(like_K: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    selected_K = torch.zeros_like(like_K)
    selected_K[chosen] = 1
    return selected_K


# Policy filtration (PF-PPO, arXiv 2409.06957): the paper resamples the S responses of a step with replacement, weighted
# by reward. In lockstep a response stays in its update, and its loss is multiplied by the number of times it was
# sampled, which gives the same sum. verl instead shuffles the copies over the updates of a step.

METHODS = ("none", "pow", "max_min", "max_random")
# Minimum sampling weight, as in verl.
LEAST = 1e-8


def draw_repeats(scores_S: torch.Tensor, method: str, power: float, generator: torch.Generator) -> torch.Tensor:
    """Returns how often each of the S responses is sampled in S weighted draws with replacement.

    The method `pow` gives a response with score s the weight |s|^power. `max_min` gives the best and worst scores of
    the step weight 1 and other scores weight 0. `max_random` gives the best score weight 0.4 and other scores weight
    0.1. All ranks use the same seed, so they sample the same responses.
    """
    scores_S = scores_S.double()
    if method == "pow":
        weights_S = scores_S.abs().pow(power)
    elif method == "max_min":
        weights_S = ((scores_S == scores_S.max()) | (scores_S == scores_S.min())).double()
    elif method == "max_random":
        weights_S = torch.where(scores_S == scores_S.max(), 0.4, 0.1).double()
    else:
        raise Refusal.at(
            "algorithm.pf_ppo.method", f"{method!r} is not known", f"one of {', '.join(METHODS)}", code="unknown-name"
        )
    drawn = torch.multinomial(weights_S + LEAST, len(scores_S), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(scores_S)).to(torch.float32)
