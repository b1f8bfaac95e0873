"""Supervised losses as sums over tokens. K is the number of trained tokens in a micro-batch."""

from __future__ import annotations

import torch

from lockstep.algorithms.stable import floored
from lockstep.types import Sums


def nll(logprobs_K: torch.Tensor) -> Sums:
    """Negative log-likelihood of the trained tokens: the cross entropy of next-token prediction.

    A sum, not a mean: the step divides once by the trained tokens of the whole update. This is the per-token
    mean over the update, as in transformers with `num_items_in_batch`; a mean of per-row means differs from it.
    A token that the model finds impossible costs 10,000 nats; see `stable`.
    """
    return Sums(loss=-floored(logprobs_K).sum())
