"""The loss of a process reward model: at each judged position the wanted distribution over a few tokens.

Shapes: L judged positions, W judging tokens, the first of them the good one.
"""

from __future__ import annotations

import torch

from lockstep.algorithms.stable import floored
from lockstep.types import Sums


def step_loss(logprobs_LW: torch.Tensor, labels_LW: torch.Tensor) -> Sums:
    """Cross entropy to the labels, with the model's distribution restricted to the judging tokens.

    A label is a distribution: one-hot when the verdict is hard. Metrics are sums over positions: `positive` the
    probability of the good word, `label_positive` the wanted one, and `accuracy` where the likeliest word is the
    label's. Ties are shared: of two tokens, a label of 0.5 or equal log-probabilities count 0.5. Where the model finds
    all the tokens impossible they are equally likely; see `stable`.
    """
    restricted_LW = torch.log_softmax(floored(logprobs_LW), dim=-1)
    loss = -(labels_LW * restricted_LW).sum()
    agreement_LW = _likeliest(restricted_LW.detach()) * _likeliest(labels_LW)
    metrics = {
        "accuracy": agreement_LW.sum(),
        "positive": good_probability(logprobs_LW.detach()).sum(),
        "label_positive": labels_LW[:, 0].sum(),
    }
    return Sums(loss=loss, metrics=metrics)


def good_probability(logprobs_LW: torch.Tensor) -> torch.Tensor:
    """The probability of the good token at each position, among the judging ones."""
    return torch.softmax(floored(logprobs_LW), dim=-1)[:, 0]


def _likeliest(values_LW: torch.Tensor) -> torch.Tensor:
    """1 at the largest value of each position, shared by equals."""
    largest_LW = (values_LW == values_LW.amax(dim=-1, keepdim=True)).to(values_LW.dtype)
    return largest_LW / largest_LW.sum(dim=-1, keepdim=True)
