"""The offline methods: one literal row each. A new method is a row, a reader and a loss; the loop stays as it is.

The online methods are named sets of defaults over one loop's keys: see `recipe/methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.algorithms import supervised
from lockstep.data.dataset import Dataset, load_dataset
from lockstep.kernels.logprob import Scores
from lockstep.types import MicroBatch, Sums


@dataclass(frozen=True)
class Method:
    """How a method reads its rows, and what it minimises."""

    read: Callable[..., Dataset]
    loss: Callable[[Scores, MicroBatch], Sums]


def _nll(scores: Scores, batch: MicroBatch) -> Sums:
    return supervised.nll(scores.logprobs_K)


METHODS: dict[str, Method] = {
    "sft": Method(read=load_dataset, loss=_nll),
}
