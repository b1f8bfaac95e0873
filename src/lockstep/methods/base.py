"""What an offline method is: how it reads its rows, and what it minimises over an update."""

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
    """The models of a run, as far as a method asks them something before its update. Answers cover all targets."""

    def arrange(self, items: Sequence[T]) -> Update[T]: ...

    def logprobs(self, update: Update[Any]) -> torch.Tensor:
        """The policy's log-probabilities, as it is now."""

    def reference_logprobs(self, update: Update[Any]) -> torch.Tensor: ...

    def scores(self, update: Update[Any]) -> torch.Tensor:
        """A reward model's scores."""

    def with_teacher(self, update: Update[Any]) -> list[MicroBatch]:
        """The update's micro-batches, each with what the teacher says of its targets."""

    @property
    def reference(self) -> object | None:
        """A frozen model of its own."""

    @property
    def longest(self) -> int:
        """The longest sequence in tokens that the run allows."""


@dataclass(frozen=True)
class Task:
    """One update: its micro-batches, the loss of one of them (a sum), and what the update's sum is divided by. At a
    trained token stand `answers` targets."""

    batches: Sequence[MicroBatch]
    loss: Loss
    divisor: float
    targets_per_token: int = 1


class Objective(Protocol):
    def task(self, update: Update[Any], models: MethodModels) -> Task: ...

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        """Metrics of an update, from the sums of what the loss counted beside it."""

    def initial_loss(self) -> float | None:
        """The loss while policy and reference are the same; None where no such number exists."""


class Plain:
    """What most objectives say: the means of what was counted, some under longer names."""

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
    """What is trained: a language model, or its decoder with one number for a token."""
    uniform_gradient: bool = False
    """Whether the loss is a multiple of the sum of the targets' log-probabilities, so that all have one gradient."""
    usage: tuple[str, str] = ("talk to it", "lockstep generate {run} --chat")
    """What one does with the model that came out, and how."""
    files: Callable[[Recipe], dict[str, str]] = lambda recipe: {}
    """Text files that an exported model needs besides its own, by name."""
    score_rows: Callable[[Sequence[Any], MethodModels], list[dict[str, Any]]] | None = None
    """A line for each row, with what the model says of it: for `lockstep eval`."""
    check: Callable[[Recipe, Dataset[Any], str], tuple[list[Problem], list[str]]] = lambda recipe, rows, key: ([], [])
    """Problems of all rows together, and what is worth saying of them."""
