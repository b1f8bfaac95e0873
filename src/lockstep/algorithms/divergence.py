"""Divergences between two policies: KL estimates on sampled tokens, and distances of full next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lockstep.algorithms.reduce import LEAST, floored, log_ratio
from lockstep.errors import Refusal

# The divergence of the policy from its reference, estimated on the sampled tokens.
#
# The estimators are Schulman's ("Approximating KL divergence", joschu.net, 2020): with d = log p - log q on tokens
# drawn from p, the means of k1 = d and of k3 = e^-d + d - 1 are KL(p, q); k2 = d^2 / 2 is close to it when p is close
# to q.

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
    raise Refusal.at("algorithm.kl.estimator", f"{estimator!r} is not known", f"one of {known}", code="unknown-name")


def adapted(coefficient: float, measured: float, target: float, horizon: int, sequences: int) -> float:
    """The next coefficient: larger when the measured divergence is over its target, smaller when under.

    Ziegler et al. 2019 (arXiv 1909.08593): proportional to the relative error, which is bounded at +-0.2; `horizon`
    sequences apply it once in full.
    """
    error = min(max(measured / target - 1, -MOST_ADAPTATION), MOST_ADAPTATION)
    return coefficient * (1 + error * sequences / horizon)


# The distance of a student's next-token distribution from its teacher's, whole or cut to the likeliest tokens.
#
# Shapes: R positions, V vocabulary, k tokens kept at a position. All are log-probabilities.

DIVERGENCES = ("forward", "reverse", "jsd")
LEAST_REST = -100.0
"""Stands for the rest of the vocabulary where nothing is left of it."""


def distribution_divergence(
    student_RV: torch.Tensor, teacher_RV: torch.Tensor, *, kind: str, mix: float = 0.5
) -> torch.Tensor:
    """The divergence at each position, in nats; the gradient goes wherever the inputs have one.

    - `forward`: KL(teacher, student).
    - `reverse`: KL(student, teacher). A word that the teacher gives probability 0 would be infinite; it adds the
      student's probability of it instead. (The generalised divergence of two sums that need not be equal, sum
      p log(p/q) - p + q, over the other tokens: it is never negative, and the student still moves off such tokens.)
    - `jsd`: mix KL(teacher, m) + (1 - mix) KL(student, m) with m = mix teacher + (1 - mix) student, the generalised
      Jensen-Shannon divergence of GKD (arXiv 2306.13649) with the paper's beta as `mix`.

    A word of probability 0 adds 0 to a sum that its probability weighs, never NaN; a student's 0 where the forward
    divergence needs more counts as e^-10000.
    """
    student_RV, teacher_RV = floored(student_RV), floored(teacher_RV)
    if kind == "forward":
        return _kl(teacher_RV, student_RV).sum(-1)
    if kind == "reverse":
        return torch.where(teacher_RV > LEAST, _kl(student_RV, teacher_RV), student_RV.exp()).sum(-1)
    if kind == "jsd":
        mixture_RV = torch.logaddexp(teacher_RV + math.log(mix), student_RV + math.log1p(-mix))
        return (mix * _kl(teacher_RV, mixture_RV) + (1 - mix) * _kl(student_RV, mixture_RV)).sum(-1)
    raise Refusal.at(
        "distill.divergence", f"{kind!r} is not known", f"one of {', '.join(DIVERGENCES)}", code="unknown-name"
    )


def folded(logprobs_RV: torch.Tensor, ids_Rk: torch.Tensor) -> torch.Tensor:
    """The chosen tokens (different ones at a position), and all the others together as one more: R x (k + 1).

    The others are summed themselves, not as 1 less the chosen, so that a tiny rest and its gradient are right too.
    Where nothing is left (k = V, or it underflows) the rest is about -100, without a gradient.
    """
    chosen_Rk = logprobs_RV.gather(-1, ids_Rk)
    rest_R1 = logprobs_RV.scatter(-1, ids_Rk, LEAST_REST).logsumexp(-1, keepdim=True)
    return torch.cat([chosen_Rk, rest_R1], dim=-1)


def _kl(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """The tokens' shares in KL(p, q)."""
    return p_RV.exp() * (p_RV - q_RV)
