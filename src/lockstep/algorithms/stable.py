"""Arithmetic of log-probabilities that keeps its digits.

The losses see what a model says, and a model may say that a token is impossible: its log-probability is then minus
infinity, and 0 x inf or inf - inf would make one token's NaN the NaN of the whole update. One rule for all losses: a
log-probability under -10,000 counts as -10,000 (e^-10000 is 0 in every type), so two impossible ones differ by 0 and
have the ratio 1. Minus infinity has no gradient; a finite one keeps its own, so that a model that has blown up is seen
by its gradient. A NaN stays one, and the step refuses it with the rows.
"""

from __future__ import annotations

import math

import torch

LEAST = -1e4
"""Stands for the log-probability of an impossible token."""
LEAST_SUM = -1e6
"""Stands for that of a response with such a token; a sum over real tokens may well be under LEAST."""
CERTAIN = -1e-6
"""Log-probabilities above are taken as this: the sums of float32 do not tell them from 0."""


def floored(logprobs: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """At least `least`, with the gradient of what was there; minus infinity has none."""
    own = torch.where(logprobs.isinf(), 0.0, logprobs)
    return torch.where(logprobs <= least, own - own.detach() + least, logprobs)


def log_ratio(logprobs: torch.Tensor, others: torch.Tensor, least: float = LEAST) -> torch.Tensor:
    """log p - log q, a number also where one or both are minus infinity."""
    return floored(logprobs, least) - floored(others, least)


def log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x): the log-probability of everything else, with probabilities over 1 - 1e-6 taken as that.

    Near 0 and far from it different forms keep the digits (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).
    """
    logprobs = logprobs.clamp(max=CERTAIN)
    return torch.where(logprobs > -math.log(2), torch.log(-torch.expm1(logprobs)), torch.log1p(-logprobs.exp()))
