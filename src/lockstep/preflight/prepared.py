"""`Context` collects the inputs of the checks before weights load. `Prepared` and `PreparedOnline` are checked runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec

from lockstep.data.array_store import sequences
from lockstep.data.dataset import Dataset
from lockstep.data.encode.chat_template import turn_ends
from lockstep.data.encode.prompt_rows import PromptSet
from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal
from lockstep.methods import METHODS
from lockstep.preflight.batch_plan import BatchPlan, OnlinePlan
from lockstep.preflight.memory_plan import MemoryPlan
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")


@dataclass
class Context:
    """A recipe and what the checks have read for it so far: tokenizer, configuration, rows. A check gets the context
    and returns problems."""

    recipe: Recipe
    device: Device
    devices: int
    """The number of devices of the run."""
    console: Console
    plans: bool = False
    """True if `lockstep plan` runs the checks, False if the run trains."""
    local: bool = True
    """Whether the run would use the devices of this machine."""
    plays: bool = True
    """Whether the run calls its environments. A replay uses the recorded observations."""
    tokenizer: Any = None
    config: Any = None
    """Configuration of `model.path`."""
    questions: list[Question] = field(default_factory=list)
    limit: int = 0
    """The maximum length of a row or prompt in tokens."""
    train: Any = None
    """A `Dataset`, or a `PromptSet` for an online method."""
    val: Dataset[Any] | None = None
    batches: BatchPlan | OnlinePlan | None = None
    memory: MemoryPlan | None = None
    remarks: list[str] = field(default_factory=list)
    stops_before_data: bool = False
    """Whether a check has found a problem that is reported before the training data is read."""

    @property
    def online(self) -> bool:
        return self.recipe.method in ONLINE

    @property
    def generates(self) -> bool:
        return self.online or bool(self.recipe.val.questions)

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes to the run folder and to the trackers."""
        return int(os.environ.get("RANK", "0")) == 0

    @property
    def row_sets(self) -> dict[str, Dataset[Any]]:
        """The training and validation rows of an offline run, by recipe key."""
        rows = {"data.train": self.train, "data.val": self.val}
        return {key: dataset for key, dataset in rows.items() if dataset is not None}

    @property
    def prompts(self) -> PromptSet:
        assert isinstance(self.train, PromptSet)
        return self.train


def problems_of(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> list[Problem]:
    """Calls a check function and returns the problems of the refusal that it raises, or an empty list."""
    try:
        check(*args, **kwargs)
    except Refusal as refusal:
        return refusal.problems
    return []


def refuse_each_once(problems: Iterable[Problem]) -> None:
    """Raises a refusal with all problems, if there are any. A problem that several checks report appears once."""
    unique = list(dict.fromkeys(problems))
    if unique:
        raise Refusal(unique)


@dataclass(frozen=True)
class Checked:
    """A checked recipe with the tokenizer, configuration and questions that it names."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    config: Any
    questions: list[Question]
    memory: MemoryPlan

    def data(self, train: Dataset[Any] | PromptSet, val: Dataset[Any] | None = None) -> dict[str, Any]:
        """Returns the fingerprints and counts of the data rows. A resumed run must have the same fingerprints and
        counts."""
        return {
            "train": train.fingerprints,
            "val": val.fingerprints if val else [],
            "kept": train.kept,
        }

    @property
    def pad_id(self) -> int:
        """The padding token id, or 0 if the tokenizer has none. Any id works, because padding is neither attended to
        nor trained."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0


@dataclass(frozen=True)
class Prepared(Checked):
    """A checked offline run with its rows, ready to load weights."""

    tokens_metric: ClassVar[str] = "train/tokens"
    train: Dataset[Any]
    val: Dataset[Any] | None
    batches: BatchPlan
    limit: int
    remarks: list[str]

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a response. For a trained reward model, the last tokens of its training texts are
        returned."""
        if METHODS[self.recipe.method].model == "value":
            return sorted({example.ids[-1] for example in sequences(self.train.items)})
        return sorted(self.train.end_tokens)

    @property
    def fingerprints(self) -> dict[str, Any]:
        return self.data(self.train, self.val)

    def rows_seen(self, step: int, carried: Mapping[str, float]) -> int:
        return min(step * self.recipe.batch.rows_per_update, self.batches.total_rows)


@dataclass(frozen=True)
class PreparedOnline(Checked):
    """A checked online run with its prompts, ready to load weights."""

    tokens_metric: ClassVar[str] = "perf/total_num_tokens"
    train: PromptSet
    batches: OnlinePlan
    remarks: list[str]

    @property
    def end_tokens(self) -> list[int]:
        return sorted({*self.recipe.rollout.stop_ids, *turn_ends(self.tokenizer, self.recipe.data)})

    @property
    def fingerprints(self) -> dict[str, Any]:
        return self.data(self.train)

    def rows_seen(self, step: int, carried: Mapping[str, float]) -> int:
        return int(carried["position"])
