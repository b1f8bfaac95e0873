"""Which tokens Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617) hold back in an update.

The covariance of a token is (A - mean A)(log p - mean log p), the means over the kept tokens of the update.

Deviation: the paper's code chooses in each micro-batch, by the current log-probabilities, and Clip-Cov passes over
tokens that PPO already clips. Here the choice is made once for the whole update, from the log-probabilities before
it, so that the size of micro-batches and the number of devices cannot change it; no token is clipped at that point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.algorithms.stable import floored


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
