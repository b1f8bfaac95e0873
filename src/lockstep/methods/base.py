"""The interface of an offline method: a reader of data rows and an objective that computes the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from lockstep.data.dataset import Dataset, OpenRows
from lockstep.data.updates import Update
from lockstep.errors import Problem
from lockstep.recipe import Recipe
from lockstep.types import Item, Loss, MicroBatch

T = TypeVar("T", bound=Item)


class MethodModels(Protocol):
    """The functions with which a method uses the models of a run. The returned vectors have one entry per target of the
    update."""

    def arrange(self, items: Sequence[T]) -> Update[T]: ...

    def logprobs(self, update: Update[Any]) -> torch.Tensor:
        """Returns the log-probs of the update's targets under the current policy."""

    def reference_logprobs(self, update: Update[Any]) -> torch.Tensor: ...

    def scores(self, update: Update[Any]) -> torch.Tensor:
        """Returns the scores of the reward model that is trained, one per sequence."""

    def with_teacher(self, update: Update[Any]) -> list[MicroBatch]:
        """Returns the micro-batches of the update, each with the teacher's distributions at its targets."""

    @property
    def reference(self) -> object | None:
        """The separate frozen reference model, or None."""

    @property
    def longest(self) -> int:
        """The maximum length of a training sequence in tokens."""


@dataclass(frozen=True)
class Task:
    """One optimizer update: its micro-batches and their loss function. The sum of the losses is divided by `divisor`. A
    trained position has `targets_per_token` targets."""

    batches: Sequence[MicroBatch]
    loss: Loss
    divisor: float
    targets_per_token: int = 1


class Objective(Protocol):
    def task(self, update: Update[Any], models: MethodModels) -> Task: ...

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        """Returns the metrics of an update, computed from the sums of the values that the loss function returned."""

    def initial_loss(self) -> float | None:
        """Returns the loss if policy and reference give equal log-probs, or None if that loss depends on the data."""


class Plain:
    """An objective that reports the mean of each value that the loss function returns. `names` maps some metrics to the
    names under which they are reported."""

    names: ClassVar[Mapping[str, str]] = {}

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        return {self.names.get(name, name): value / divisor for name, value in sums.items()}

    def initial_loss(self) -> float | None:
        return None


@dataclass(frozen=True)
class Method:
    reader: Callable[[Recipe], OpenRows[Any]]
    """Returns the class that encodes the rows of a data source."""
    objective: Callable[[Recipe], Objective]
    model: Literal["policy", "value"] = "policy"
    """Which model is trained: `policy` is a language model, `value` a decoder with a scalar head."""
    uniform_gradient: bool = False
    """Whether the loss is a multiple of the sum of the log-probs, so that its gradient is the same for the log-prob of
    every target."""
    usage: tuple[str, str] = ("talk to it", "lockstep generate {run} --chat")
    """How to use the trained model: a description and a command or recipe key."""
    files: Callable[[Recipe], dict[str, str]] = lambda recipe: {}
    """Returns the additional text files of an exported model: file name and content."""
    score_rows: Callable[[Sequence[Any], MethodModels], list[dict[str, Any]]] | None = None
    """Computes the scores of each row. `lockstep eval` writes the scores as JSON lines."""
    check: Callable[[Recipe, Dataset[Any], str], tuple[list[Problem], list[str]]] = lambda recipe, rows, key: ([], [])
    """Checks a data set. Returns problems, which stop the run, and notes for the user."""
