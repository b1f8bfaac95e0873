"""The work of one step, in tokens: what a prediction of its time needs of the rows or prompts."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.data.batching import shared_beginnings
from lockstep.data.updates import row_size
from lockstep.recipe import Recipe
from lockstep.recipe.rows import estimator_row
from lockstep.train.prepare import Prepared, PreparedOnline
from lockstep.types import Item


@dataclass(frozen=True)
class StepWork:
    """One step on all devices together. Of an offline run it is one update, and generates nothing."""

    rows: int
    """What an update divides over the devices: sequences of an online run, rows of an offline one."""
    tokens: float
    """On the lines of all micro-batches; a prompt that several responses share counts once."""
    squares: float
    """Sum of S^2 over the sequences, without what their shared beginnings would be counted twice."""
    whole: float
    """Tokens of the sequences, each with its whole prompt."""
    targets: float
    updates: int = 1
    epochs: int = 1
    prompts: int = 0
    samples: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0


def work_of_rows(prepared: Prepared) -> StepWork:
    """An update of mean rows."""
    recipe, items = prepared.recipe, prepared.train.items
    packed, shared = recipe.batch.tokens is not None, recipe.parallel.context == 1
    each = min(recipe.batch.rows_per_update, prepared.batches.total_rows) / len(items)
    # Padded rows are as wide as the widest of their micro-batch.
    width = 1 if packed else 1 / prepared.batches.fill
    examples = [example for item in items for example in item.examples]
    return StepWork(
        rows=min(recipe.batch.rows_per_update, prepared.batches.total_rows),
        tokens=each * sum(_tokens(item, packed=packed, shared=shared) for item in items) * width,
        squares=each * sum(_squares(item, shared=packed and shared) for item in items) * width,
        whole=each * sum(len(example) for example in examples) * width,
        targets=each * sum(example.targets for example in examples),
    )


def _tokens(item: Item, *, packed: bool, shared: bool) -> int:
    size = row_size(item, packed=packed, shared=shared)
    return size if packed else size * len(item.examples)


def _squares(item: Item, *, shared: bool) -> int:
    common = shared_beginnings(item.examples) if shared and len(item.examples) > 1 else []
    return sum(len(example) ** 2 for example in item.examples) - sum(length**2 for length in common)


def work_of_prompts(prepared: PreparedOnline, response_tokens: float) -> StepWork:
    """A step of mean prompts, each answered with so many tokens."""
    prompts = prepared.train.items
    mean = sum(len(prompt.ids) for prompt in prompts) / len(prompts)
    return online_work(prepared.recipe, mean, response_tokens)


def online_work(recipe: Recipe, prompt_tokens: float, response_tokens: float) -> StepWork:
    batch, samples = recipe.batch, recipe.rollout.n
    length = prompt_tokens + response_tokens
    shared = batch.tokens is not None and recipe.parallel.context == 1 and samples > 1
    again = batch.prompts * (samples - 1) if shared else 0
    sequences = batch.prompts * samples
    return StepWork(
        rows=sequences,
        tokens=sequences * length - again * prompt_tokens,
        squares=sequences * length**2 - again * prompt_tokens**2,
        whole=sequences * length,
        targets=sequences * response_tokens,
        updates=batch.prompts // (batch.prompts_per_update or batch.prompts),
        epochs=recipe.algorithm.epochs,
        prompts=batch.prompts,
        samples=samples + int(estimator_row(recipe.algorithm.advantage).greedy_baseline),
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
    )
