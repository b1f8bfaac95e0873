"""Arithmetic of log-probabilities that keeps its digits."""

from __future__ import annotations

import math

import torch

CERTAIN = -1e-6
"""Log-probabilities above are taken as this: the sums of float32 do not tell them from 0."""


def log_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x): the log-probability of everything else, with probabilities over 1 - 1e-6 taken as that.

    Near 0 and far from it different forms keep the digits (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012).
    """
    logprobs = logprobs.clamp(max=CERTAIN)
    return torch.where(logprobs > -math.log(2), torch.log(-torch.expm1(logprobs)), torch.log1p(-logprobs.exp()))
