"""The divergence of the policy from its reference, estimated on the sampled tokens.

The estimators are Schulman's ("Approximating KL divergence", joschu.net, 2020): with d = log p - log q on tokens drawn
from p, the means of k1 = d and of k3 = e^-d + d - 1 are KL(p, q); k2 = d^2 / 2 is close to it when p is close to q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.algorithms.stable import log_ratio
from lockstep.errors import Refusal

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
MOST_ADAPTATION = 0.2
# Largest weight of a token that has become likelier since it was drawn.
MOST_WEIGHT = 10.0


def _k1(log_ratio_K: torch.Tensor) -> torch.Tensor:
    return log_ratio_K


def _k2(log_ratio_K: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio_K.square()


def _k3(log_ratio_K: torch.Tensor) -> torch.Tensor:
    """Bounded as in verl: the exponent at +-20, the result at 10. A token beyond a bound has no gradient."""
    back_K = (-log_ratio_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (back_K.exp() - back_K - 1).clamp(-K3_BOUND, K3_BOUND)


_FORWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": _k1, "abs": torch.abs, "k2": _k2, "k3": _k3}
_STRAIGHT_THROUGH = ("k1+", "abs+", "k2+", "k3+")


def divergence(
    estimator: str, logprobs_K: torch.Tensor, reference_K: torch.Tensor, old_K: torch.Tensor | None = None
) -> torch.Tensor:
    """The estimate at each token: `k1`, `abs`, `k2`, `k3`, or one of them with `+`.

    As a term of the loss only k2 has a gradient whose mean is the gradient of the divergence (k1's mean gradient is
    zero, k3's is that of the reverse divergence). The forms with `+` have the estimator's value and the gradient of k2.
    With `old_K`, the log-probabilities of the policy that drew the tokens, that gradient is weighed by the ratio of new
    to old, at most 10 and a constant. A token that both find impossible has divergence 0; see `stable`.
    """
    log_ratio_K = log_ratio(logprobs_K, reference_K)
    if estimator in _FORWARD:
        return _FORWARD[estimator](log_ratio_K)
    if estimator in _STRAIGHT_THROUGH:
        k2_K = _k2(log_ratio_K)
        if old_K is not None:
            moved_K = log_ratio(logprobs_K, old_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            k2_K = k2_K * moved_K.exp().clamp(max=MOST_WEIGHT).detach()
        return _FORWARD[estimator[:-1]](log_ratio_K.detach()) + (k2_K - k2_K.detach())
    known = ", ".join([*_FORWARD, *_STRAIGHT_THROUGH])
    raise Refusal.at("algorithm.kl.estimator", f"{estimator!r} is not known", f"one of {known}")


def adapted(coefficient: float, measured: float, target: float, horizon: int, sequences: int) -> float:
    """The next coefficient: larger when the measured divergence is over its target, smaller when under.

    Ziegler et al. 2019 (arXiv 1909.08593): proportional to the relative error, which is bounded at +-0.2; `horizon`
    sequences apply it once in full.
    """
    error = min(max(measured / target - 1, -MOST_ADAPTATION), MOST_ADAPTATION)
    return coefficient * (1 + error * sequences / horizon)
