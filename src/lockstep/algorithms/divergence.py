"""Divergences between two policies: KL estimates on sampled tokens, and distances of full next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lockstep.algorithms.reduce import LEAST, floor_logprobs, log_ratio
from lockstep.errors import Refusal

# KL estimates on sampled tokens.
#
# The estimators are Schulman's ("Approximating KL divergence", joschu.net, 2020): with d = log p - log q on tokens
# sampled from p, the means of k1 = d and of k3 = e^-d + d - 1 are KL(p, q). The mean of k2 = d^2 / 2 is close to
# KL(p, q) if p is close to q.

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0
MOST_ADAPTATION = 0.2
# Maximum importance weight (new / old probability) of a token.
MOST_WEIGHT = 10.0


def _k1(log_ratio_K: torch.Tensor) -> torch.Tensor:
    return log_ratio_K


def _k2(log_ratio_K: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio_K.square()


def _k3(log_ratio_K: torch.Tensor) -> torch.Tensor:
    """k3, clamped as in verl: the exponent to +-20, the result to at most 10. Clamped tokens have no gradient."""
    back_K = (-log_ratio_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (back_K.exp() - back_K - 1).clamp(-K3_BOUND, K3_BOUND)


_FORWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": _k1, "abs": torch.abs, "k2": _k2, "k3": _k3}
_STRAIGHT_THROUGH = ("k1+", "abs+", "k2+", "k3+")


def divergence(
    estimator: str, logprobs_K: torch.Tensor, reference_K: torch.Tensor, old_K: torch.Tensor | None = None
) -> torch.Tensor:
    """The KL estimate at each token. `estimator` is `k1`, `abs`, `k2`, `k3`, or one of these names with `+` appended.

    If the estimate is a term of the loss, only k2 has a gradient whose mean is the gradient of KL(policy, reference).
    (The mean gradient of k1 is zero; that of k3 is the gradient of KL(reference, policy).) An estimator with `+` has
    the value of the estimator without `+`, and the gradient of k2. With `old_K`, the log-probs of the sampling policy,
    the gradient of k2 is weighted by the detached ratio of new to old probability (at most 10). A token that is
    impossible under policy and reference has divergence 0; see `floor_logprobs`.
    """
    log_ratio_K = log_ratio(logprobs_K, reference_K)
    if estimator in _FORWARD:
        return _FORWARD[estimator](log_ratio_K)
    if estimator in _STRAIGHT_THROUGH:
        k2_K = _k2(log_ratio_K)
        if old_K is not None:
            since_K = log_ratio(logprobs_K, old_K).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            k2_K = k2_K * since_K.exp().clamp(max=MOST_WEIGHT).detach()
        return _FORWARD[estimator[:-1]](log_ratio_K.detach()) + (k2_K - k2_K.detach())
    names = ", ".join([*_FORWARD, *_STRAIGHT_THROUGH])
    raise Refusal.at("algorithm.kl.estimator", f"{estimator!r} is not known", f"one of {names}", code="unknown-name")


def adapt_coefficient(coefficient: float, measured: float, target: float, horizon: int, sequences: int) -> float:
    """The next KL coefficient: larger if the measured KL is above its target, smaller if below.

    As in Ziegler et al. 2019 (arXiv 1909.08593), the coefficient is multiplied by 1 + error x sequences / `horizon`.
    The relative error of the KL is clamped to +-0.2.
    """
    error = min(max(measured / target - 1, -MOST_ADAPTATION), MOST_ADAPTATION)
    return coefficient * (1 + error * sequences / horizon)


# Divergences between the next-token distributions of student and teacher, full or top-k. The suffixes of tensor names
# mean R positions, V vocabulary, k tokens kept at a position. All tensors contain log-probs.

DIVERGENCES = ("forward", "reverse", "jsd")
LEAST_REST = -100.0
"""The log-prob of "all other tokens" if the chosen tokens are the full vocabulary."""


def distribution_divergence(
    student_RV: torch.Tensor, teacher_RV: torch.Tensor, *, kind: str, mix: float = 0.5
) -> torch.Tensor:
    """The divergence of student and teacher at each position, in nats, differentiable in both inputs.

    - `forward`: KL(teacher, student).
    - `reverse`: KL(student, teacher). A token of teacher probability 0 would make the divergence infinite, so it adds
      the student's probability instead. The result equals the generalised KL divergence, the sum of p log(p/q) - p + q
      over all tokens of non-zero teacher probability, which is never negative. The student still learns to avoid tokens
      of teacher probability 0.
    - `jsd`: mix KL(teacher, m) + (1 - mix) KL(student, m) with m = mix teacher + (1 - mix) student, the generalised
      Jensen-Shannon divergence of GKD (arXiv 2306.13649) with the paper's beta as `mix`.

    A token of probability 0 adds 0, never NaN, to a sum weighted by its probability. In the forward divergence, a
    student probability of 0 is replaced by e^-10000.
    """
    student_RV, teacher_RV = floor_logprobs(student_RV), floor_logprobs(teacher_RV)
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


def fold_rest(logprobs_RV: torch.Tensor, ids_Rk: torch.Tensor) -> torch.Tensor:
    """Log-probs [R, k + 1]: those of the k chosen tokens (distinct at a position), then one for all other tokens.

    The probabilities of the other tokens are summed directly, not computed as 1 minus the chosen ones, so a tiny sum
    and its gradient are accurate. If there are no other tokens (k = V) or the sum underflows, the last entry is about
    -100, without a gradient.
    """
    chosen_Rk = logprobs_RV.gather(-1, ids_Rk)
    rest_R1 = logprobs_RV.scatter(-1, ids_Rk, LEAST_REST).logsumexp(-1, keepdim=True)
    return torch.cat([chosen_Rk, rest_R1], dim=-1)


def _kl(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """The summands of KL(p, q), one per vocabulary token."""
    return p_RV.exp() * (p_RV - q_RV)
