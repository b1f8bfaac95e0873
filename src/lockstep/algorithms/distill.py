"""The distance of a student's next-token distribution from its teacher's, whole or cut to the likeliest tokens.

Shapes: R positions, V vocabulary, k tokens kept at a position. All are log-probabilities.
"""

from __future__ import annotations

import math

import torch

from lockstep.algorithms.stable import LEAST, floored
from lockstep.errors import Refusal

DIVERGENCES = ("forward", "reverse", "jsd")
LEAST_REST = -100.0
"""Stands for the rest of the vocabulary where nothing is left of it."""


def divergence(student_RV: torch.Tensor, teacher_RV: torch.Tensor, *, kind: str, mix: float = 0.5) -> torch.Tensor:
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
    raise Refusal.at("distill.divergence", f"{kind!r} is not known", f"one of {', '.join(DIVERGENCES)}")


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
