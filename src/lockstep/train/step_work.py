"""The work of one step, in tokens: what a prediction of memory and time needs of the rows or prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.data.batching import shared_beginnings
from lockstep.data.updates import row_size
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.train.prepare import Prepared, longest_row, sequences_per_update
from lockstep.types import Item


@dataclass(frozen=True)
class StepWork:
    """One step on all devices together. Of an offline run it is one update, and generates nothing."""

    rows: int
    """What an update divides over the devices: sequences of an online run, rows of an offline one."""
    tokens: float
    """On the lines of all micro-batches; a prompt counts once for the responses that share it there."""
    squares: float
    """Sum of S^2 over the sequences, without what is shared and computed once."""
    whole: float
    """Tokens of the sequences, each with its whole prompt."""
    targets: float
    updates: int = 1
    epochs: int = 1
    prompts: int = 0
    samples: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0


class StepSource(Protocol):
    """The steps of a run, whatever keys of its recipe are changed that do not change what it trains on."""

    def work(self, recipe: Recipe) -> StepWork: ...

    def longest(self, recipe: Recipe) -> int:
        """Tokens of a micro-batch that the longest row takes."""
        ...

    def rows(self, recipe: Recipe) -> int:
        """Sequences of an update, none longer than that."""
        ...


class OfflineSteps:
    """Updates of mean rows."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        # By whether rows are packed, and whether the sequences of a row share their beginning.
        self._works: dict[tuple[bool, bool], StepWork] = {}
        self._longest: dict[tuple[bool, bool], int] = {}

    def work(self, recipe: Recipe) -> StepWork:
        key = _packed_and_shared(recipe)
        if key not in self._works:
            self._works[key] = self._work(*key)
        return self._works[key]

    def _work(self, packed: bool, shared: bool) -> StepWork:
        batches, items = self.prepared.batches, self.prepared.train.items
        rows = min(batches.rows_per_update, batches.total_rows)
        each = rows / len(items)
        # Padded rows are as wide as the widest of their micro-batch.
        width = 1 if packed else 1 / batches.fill
        examples = [example for item in items for example in item.examples]
        return StepWork(
            rows=rows,
            tokens=each * width * sum(_tokens(item, packed, shared) for item in items),
            squares=each * width * sum(_squares(item, packed and shared) for item in items),
            whole=each * width * sum(len(example) for example in examples),
            targets=each * sum(example.targets for example in examples),
        )

    def longest(self, recipe: Recipe) -> int:
        key = _packed_and_shared(recipe)
        if key not in self._longest:
            self._longest[key] = longest_row(recipe, self.prepared.train)
        return self._longest[key]

    def rows(self, recipe: Recipe) -> int:
        return recipe.batch.rows_per_update


def _packed_and_shared(recipe: Recipe) -> tuple[bool, bool]:
    return recipe.batch.tokens is not None, recipe.parallel.context == 1


def _tokens(item: Item, packed: bool, shared: bool) -> int:
    size = row_size(item, packed=packed, shared=shared)
    return size if packed else size * len(item.examples)


def _squares(item: Item, shared: bool) -> int:
    common = shared_beginnings(item.examples) if shared and len(item.examples) > 1 else []
    return sum(len(example) ** 2 for example in item.examples) - sum(length**2 for length in common)


@dataclass(frozen=True)
class OnlineSteps:
    """StepSource of prompts of a mean length, each response of another."""

    prompt_tokens: float
    response_tokens: float
    longest_prompt: int

    @classmethod
    def of(cls, prompts: Sequence[Any], response_tokens: float) -> OnlineSteps:
        lengths = [len(prompt.ids) for prompt in prompts]
        return cls(sum(lengths) / len(lengths), response_tokens, max(lengths))

    def longest(self, recipe: Recipe) -> int:
        return self.longest_prompt + recipe.rollout.max_tokens

    def rows(self, recipe: Recipe) -> int:
        return sequences_per_update(recipe)

    def work(self, recipe: Recipe) -> StepWork:
        batch, samples = recipe.batch, recipe.rollout.n
        prompt, response = self.prompt_tokens, self.response_tokens
        sequences, again = batch.prompts * samples, batch.prompts * self._shared(recipe)
        return StepWork(
            rows=sequences,
            tokens=sequences * (prompt + response) - again * prompt,
            squares=sequences * (prompt + response) ** 2 - again * prompt**2,
            whole=sequences * (prompt + response),
            targets=sequences * response,
            updates=batch.prompts // (batch.prompts_per_update or batch.prompts),
            epochs=recipe.algorithm.epochs,
            prompts=batch.prompts,
            samples=samples + int(estimator_row(recipe.algorithm.advantage).greedy_baseline),
            prompt_tokens=prompt,
            response_tokens=response,
        )

    def _shared(self, recipe: Recipe) -> int:
        """Responses of a group whose prompt stands on the line already: on each of its lines all but one."""
        if recipe.batch.tokens is None or recipe.parallel.context > 1:
            return 0
        on_a_line = max(1, int((recipe.batch.tokens - self.prompt_tokens) // self.response_tokens))
        return recipe.rollout.n - -(-recipe.rollout.n // on_a_line)
