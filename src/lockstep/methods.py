"""The methods: one literal row each. A new method is a row, a reader and a loss; the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.algorithms import supervised
from lockstep.data.dataset import Dataset, load_dataset
from lockstep.types import Sums


@dataclass(frozen=True)
class Method:
    """How a method reads its rows, and what it minimises."""

    read: Callable[..., Dataset]
    loss: Callable[..., Sums]


METHODS: dict[str, Method] = {
    "sft": Method(read=load_dataset, loss=supervised.nll),
}
