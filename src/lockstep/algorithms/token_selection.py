"""Which tokens and responses an update uses: Clip-Cov, KL-Cov and policy filtration (PF-PPO)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.algorithms.reduce import floored
from lockstep.errors import Refusal

# Which tokens Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617) hold back in an update.
#
# The covariance of a token is (A - mean A)(log p - mean log p), the means over the kept tokens of the update.
#
# Deviation: the paper's code chooses in each micro-batch, by the current log-probabilities, and Clip-Cov passes over
# tokens that PPO already clips. Here the choice is made once for the whole update, from the log-probabilities before
# it, so that the size of micro-batches and the number of devices cannot change it; no token is clipped at that point.


def clip_cov_held(
    old_K: torch.Tensor,
    advantages_K: torch.Tensor,
    keep_K: torch.Tensor,
    *,
    share: float,
    low: float,
    high: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """1 at randomly chosen tokens whose covariance is in [low, high]: `share` of all kept tokens, at least one.

    Fewer when the band holds fewer, none when it is empty or `share` is 0. The choice is drawn on the generator's
    device; with generators of one seed every rank draws the same.
    """
    covariance_K = _covariance(old_K, advantages_K, keep_K)
    band = torch.nonzero((keep_K > 0) & (covariance_K >= low) & (covariance_K <= high)).flatten()
    order = torch.randperm(len(band), generator=generator, device=generator.device).to(band.device)
    return _marked(old_K, band[order[: _count(share, keep_K)]])


def kl_cov_held(
    old_K: torch.Tensor,
    advantages_K: torch.Tensor,
    keep_K: torch.Tensor,
    *,
    share: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """1 at the tokens of highest covariance: `share` of all kept tokens, at least one unless `share` is 0.

    Of equal covariances the earlier token is taken; nothing is drawn.
    """
    kept = torch.nonzero(keep_K > 0).flatten()
    covariance = _covariance(old_K, advantages_K, keep_K)[kept]
    order = torch.argsort(covariance, descending=True, stable=True)
    return _marked(old_K, kept[order[: _count(share, keep_K)]])


# By the loss that holds tokens back.
HELD: dict[str, Callable[..., torch.Tensor]] = {"clip_cov": clip_cov_held, "kl_cov": kl_cov_held}


def _covariance(old_K: torch.Tensor, advantages_K: torch.Tensor, keep_K: torch.Tensor) -> torch.Tensor:
    return _centred(advantages_K, keep_K) * _centred(floored(old_K), keep_K)


def _centred(values_K: torch.Tensor, keep_K: torch.Tensor) -> torch.Tensor:
    """In float64, less the mean of the kept; 0 elsewhere."""
    kept_K = keep_K > 0
    values_K = torch.where(kept_K, values_K.double(), 0.0)
    return torch.where(kept_K, values_K - values_K.sum() / kept_K.sum().clamp(min=1), 0.0)


def _count(share: float, keep_K: torch.Tensor) -> int:
    return max(int(share * int((keep_K > 0).sum())), 1) if share > 0 else 0


def _marked(like_K: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    held_K = torch.zeros_like(like_K)
    held_K[chosen] = 1
    return held_K


# Policy filtration (PF-PPO, arXiv 2409.06957): responses whose reward can be relied on are learned from more often.
#
# Shapes: S responses of a step. The paper draws the step's responses anew from themselves, with replacement, by
# weights of their rewards. Here a response keeps its place and counts as often as it was drawn, which is the same
# sum; verl shuffles the copies over the updates of a step.

METHODS = ("none", "pow", "max_min", "max_random")
# Nothing is impossible to draw, as in verl.
LEAST = 1e-8


def drawn_times(scores_S: torch.Tensor, method: str, power: float, generator: torch.Generator) -> torch.Tensor:
    """How often each response is drawn: S draws with replacement, by weight.

    `pow` weighs |s|^power, `max_min` the step's best and worst scores 1 and others 0, `max_random` the best ones 0.4
    and others 0.1. Drawn on the generator's device: with generators of one seed every rank draws the same.
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
