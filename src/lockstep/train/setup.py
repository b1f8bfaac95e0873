"""Everything that can be refused, before a weight is loaded: device, tokenizer, rows, questions, plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from lockstep.data.dataset import Dataset
from lockstep.data.questions import read_questions
from lockstep.data.read import read_rows
from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal
from lockstep.methods import METHODS
from lockstep.model.load import DTYPES, load_config, load_tokenizer, refuse_foreign_tokenizer
from lockstep.recipe import Recipe, Source
from lockstep.reward.rules import rule_for
from lockstep.run.progress import Console
from lockstep.train.plan import BatchPlan, MemoryPlan, plan_batches, plan_memory, refuse_misfit
from lockstep.types import Question

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A recipe with everything it names found and checked."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    config: Any
    train: Dataset
    val: Dataset | None
    questions: list[Question]
    batches: BatchPlan
    memory: MemoryPlan

    @property
    def end_tokens(self) -> list[int]:
        return sorted(self.train.end_tokens)

    @property
    def fingerprints(self) -> dict[str, Any]:
        """What the rows are and what was kept of them: all that a resume must find unchanged."""
        return {
            "train": self.train.fingerprints,
            "val": self.val.fingerprints if self.val else [],
            "kept": {"rows": self.train.counts.rows, "tokens": self.train.counts.tokens},
        }

    @property
    def pad_id(self) -> int:
        """Padding is never attended to nor trained, so any id does where the tokenizer has none."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0


class Collector:
    """Runs checks one after another and refuses with the problems of all of them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def __call__(self, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except Refusal as refusal:
            self.problems += refusal.problems
            return None

    def refuse(self) -> None:
        if self.problems:
            raise Refusal(self.problems)


def prepare(recipe: Recipe, device: Device, devices: int, console: Console, *, must_fit: bool = True) -> Prepared:
    """Find and check everything; `must_fit` also refuses what the device's memory cannot hold."""
    collect = Collector()
    collect(lambda: _refuse_dtype(recipe, device))
    tokenizer = collect(lambda: load_tokenizer(recipe.model.path))
    config = collect(lambda: load_config(recipe.model.path))
    questions = collect(lambda: _questions(recipe))
    if tokenizer is None or config is None:
        # Rows cannot be encoded, but they can be read: say now what is wrong with the files too.
        for source in (*recipe.data.train, *recipe.data.val):
            collect(lambda source=source: read_rows(source.path))  # type: ignore[misc]
        collect.refuse()
        raise AssertionError("a missing tokenizer or config is always a problem")
    collect(lambda: refuse_foreign_tokenizer(tokenizer, config.vocab_size, recipe.model.path))
    limit = collect(lambda: row_limit(recipe, config)) or 0
    train = collect(lambda: _read(recipe, recipe.data.train, tokenizer, limit, console, "training"))
    val = None
    if recipe.data.val:
        val = collect(lambda: _read(recipe, recipe.data.val, tokenizer, limit, console, "validation"))
    collect.refuse()
    assert train is not None
    assert questions is not None
    batches = plan_batches(recipe, train, devices)
    memory = plan_memory(recipe, config, devices, train.counts.longest)
    if must_fit:
        refuse_misfit(memory, device.memory().total, device.name)
    return Prepared(recipe, tokenizer, config, train, val, questions, batches, memory)


def row_limit(recipe: Recipe, config: Any) -> int:
    """Longest row in tokens: the recipe's, or the model's context within the token budget."""
    context = getattr(config, "max_position_embeddings", None)
    wanted = recipe.data.max_tokens
    if wanted and context and wanted > context:
        raise Refusal.at(
            "data.max_tokens", f"{wanted} is more than the model's context of {context}", f"set it to {context} or less"
        )
    bounds = [bound for bound in (wanted, context, recipe.batch.tokens) if bound]
    return min(bounds)


def _read(
    recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase, limit: int, console: Console, what: str
) -> Dataset:
    opened = [read_rows(source.path) for source in sources]
    with console.task(f"Encoding {what} rows", sum(len(rows) for rows in opened)) as task:
        read = METHODS[recipe.method].read
        return read(sources, recipe.data, tokenizer, limit, task.advance, opened)


def _questions(recipe: Recipe) -> list[Question]:
    if recipe.val.questions is None:
        return []
    questions = read_questions(read_rows(recipe.val.questions), recipe.val.question_rows)
    for source in sorted({question.data_source for question in questions}):
        rule_for(source)
    return questions


def _refuse_dtype(recipe: Recipe, device: Device) -> None:
    dtype = recipe.model.dtype
    if not device.supports(DTYPES[dtype]):
        usable = [name for name, kind in DTYPES.items() if device.supports(kind)]
        raise Refusal.at("model.dtype", f"{device.name} does not compute in {dtype}", f"use {' or '.join(usable)}")
