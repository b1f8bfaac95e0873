"""The interface of offline methods: the reader of rows and the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import torch

from lockstep.data.dataset import Dataset
from lockstep.data.sources.read import RowSet
from lockstep.data.updates import Update
from lockstep.errors import Problem
from lockstep.recipe import Recipe
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Item, Loss, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T", bound=Item)


class Reader(Protocol[T]):
    """Reads and encodes the rows of some sources."""

    def __call__(
        self,
        sources: Sequence[Source],
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        advance: Callable[[int], None] = ...,
        opened: Sequence[RowSet] | None = ...,
    ) -> Dataset[T]: ...


class MethodModels(Protocol):
    """The models of a run, as a method uses them. Vectors cover all targets of the update."""

    def arrange(self, items: Sequence[T]) -> Update[T]: ...

    def logprobs(self, update: Update[Any]) -> torch.Tensor:
        """The current log-probs of the policy."""

    def reference_logprobs(self, update: Update[Any]) -> torch.Tensor: ...

    def scores(self, update: Update[Any]) -> torch.Tensor:
        """The scores of a reward model."""

    def with_teacher(self, update: Update[Any]) -> list[MicroBatch]:
        """The micro-batches of the update with the teacher's distributions."""

    @property
    def reference(self) -> object | None:
        """A separate frozen reference model."""

    @property
    def longest(self) -> int:
        """The maximum sequence length in tokens."""


@dataclass(frozen=True)
class Task:
    """One update: its micro-batches, the loss of a micro-batch (a sum), and the divisor of the update. A trained
    position has `targets_per_token` targets."""

    batches: Sequence[MicroBatch]
    loss: Loss
    divisor: float
    targets_per_token: int = 1


class Objective(Protocol):
    def task(self, update: Update[Any], models: MethodModels) -> Task: ...

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        """Metrics of an update, from the sums of the loss function."""

    def initial_loss(self) -> float | None:
        """The loss if policy and reference are equal; None if it is not constant."""


class Plain:
    """An objective that reports mean metrics; `names` maps some of them to other metric names."""

    names: ClassVar[Mapping[str, str]] = {}

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        return {self.names.get(name, name): value / divisor for name, value in sums.items()}

    def initial_loss(self) -> float | None:
        return None


@dataclass(frozen=True)
class Method:
    reader: Callable[[Recipe], Reader[Any]]
    objective: Callable[[Recipe], Objective]
    model: Literal["policy", "value"] = "policy"
    """The trained model: a language model, or a decoder with a scalar head."""
    uniform_gradient: bool = False
    """Whether the loss is a multiple of the sum of the log-probs, so that all targets have the same gradient."""
    usage: tuple[str, str] = ("talk to it", "lockstep generate {run} --chat")
    """How to use the trained model: description and command."""
    files: Callable[[Recipe], dict[str, str]] = lambda recipe: {}
    """Additional text files of an exported model, by name."""
    score_rows: Callable[[Sequence[Any], MethodModels], list[dict[str, Any]]] | None = None
    """The scores of each row as a JSON line, for `lockstep eval`."""
    check: Callable[[Recipe, Dataset[Any], str], tuple[list[Problem], list[str]]] = lambda recipe, rows, key: ([], [])
    """Problems and notes of a data set."""
