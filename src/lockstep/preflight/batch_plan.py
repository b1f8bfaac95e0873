"""The batch plan: how rows or prompts are divided into updates and micro-batches, and the limits of their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.batching import plan_micro_batches
from lockstep.data.dataset import BatchSource, Dataset, Loader, steps_and_rows
from lockstep.data.encode.prompt_rows import PromptSet
from lockstep.data.updates import row_size
from lockstep.errors import Refusal
from lockstep.model.text_model import text_config
from lockstep.recipe import Recipe
from lockstep.recipe.registry import ENGINES, estimator_row, loss_row

UNLIMITED = 2**31
"""The prompt limit if neither the model nor the recipe limits the length of a prompt."""
# The plan computes the packing of this many updates. Other updates are similar.
SAMPLED_UPDATES = 100


@dataclass(frozen=True)
class BatchPlan:
    """How an offline run divides its rows into updates and micro-batches."""

    rows: int
    rows_per_update: int
    steps: int
    total_rows: int
    devices: int
    fewest: int
    most: int
    fill: float
    group: int = 1
    """The number of devices (context- and tensor-parallel) that train on the same rows."""

    @property
    def steps_per_epoch(self) -> float:
        return self.rows / self.rows_per_update

    def lines(self) -> list[tuple[str, str]]:
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        return [
            ("rows", f"{self.rows:,} an epoch, {self.total_rows:,} in all"),
            ("updates", f"{self.steps:,} of {self.rows_per_update} rows ({self.steps_per_epoch:,.1f} an epoch)"),
            (
                "micro-batches",
                f"{each} an update on each of {_places(self.devices, self.group)}, {self.fill:.0%} full",
            ),
        ]


class StreamedPlan(BatchPlan):
    """The updates of a run with streamed rows. The number and the lengths of the rows are unknown before training."""

    def lines(self) -> list[tuple[str, str]]:
        return [
            ("rows", f"{self.total_rows:,} in all, streamed; the rows of an epoch are not counted"),
            ("updates", f"{self.steps:,} of {self.rows_per_update} rows"),
        ]


@dataclass(frozen=True)
class OnlinePlan:
    """How an online run divides its prompts and sampled sequences into updates."""

    rows: int
    prompts: int
    samples: int
    prompts_per_update: int
    epochs: int
    steps: int
    devices: int
    tokens: int | None
    longest: int
    group: int = 1
    """The number of devices (context- and tensor-parallel) that train on the same rows."""

    @property
    def updates(self) -> int:
        return self.prompts // self.prompts_per_update * self.epochs

    def lines(self) -> list[tuple[str, str]]:
        sequences = self.prompts * self.samples
        epochs = f"({self.rows / self.prompts:,.1f} an epoch)" if self.rows else "(streamed)"
        each = self.prompts_per_update * self.samples
        # A sequence is never split. The maximum number of micro-batches assumes that all sequences have the maximum
        # length.
        shares = self.devices // self.group
        most = -(-each // (self.tokens // self.longest * shares)) if self.tokens else None
        places = _places(self.devices, self.group)
        packed = "" if most is None else f", at most {most} micro-batches on each of {places}"
        return [
            ("steps", f"{self.steps:,} of {self.prompts} prompts {epochs}"),
            ("sequences", f"{self.prompts} prompts x {self.samples} = {sequences} a step, up to {self.longest} tokens"),
            ("updates", f"{self.updates} a step of {each} sequences{packed}"),
        ]


def _places(devices: int, group: int) -> str:
    return f"{devices} device(s)" if group == 1 else f"{devices // group} group(s) of {group} devices"


def sequences_per_update(recipe: Recipe) -> int:
    return (recipe.batch.prompts_per_update or recipe.batch.prompts) * recipe.rollout.n


def plan_online(recipe: Recipe, prompts: PromptSet, devices: int) -> OnlinePlan:
    batch, rollout = recipe.batch, recipe.rollout
    rows = 0 if prompts.streamed else sum(len(source) for source in prompts.sources)
    steps, _ = _steps(recipe, rows, batch.prompts)
    per_update = batch.prompts_per_update or batch.prompts
    longest = prompts.longest + rollout.max_tokens
    epochs = recipe.algorithm.epochs
    tokens, group = recipe.line_tokens, recipe.parallel.group
    return OnlinePlan(rows, batch.prompts, rollout.n, per_update, epochs, steps, devices, tokens, longest, group)


def plan_batches(recipe: Recipe, dataset: Dataset[Any], devices: int) -> BatchPlan:
    batch, context, group = recipe.batch, recipe.parallel.context_parallel, recipe.parallel.group
    if dataset.streamed:
        steps, total = _steps(recipe, 0, batch.rows_per_update)
        return StreamedPlan(0, batch.rows_per_update, steps, total, devices, 0, 0, 0.0, group)
    rows = sum(len(source) for source in dataset.sources)
    steps, total = _steps(recipe, rows, batch.rows_per_update)
    loader = memory_loader(recipe, dataset)
    counts, used, room = [], 0, 0
    for step in range(min(steps, SAMPLED_UPDATES)):
        lengths = [row_size(item, packed=batch.tokens is not None, shared=context == 1) for item in loader.take(step)]
        bins = plan_micro_batches(
            lengths, devices=devices // group, tokens=recipe.line_tokens, rows=batch.micro_batch_size
        )
        counts.append(len(bins[0]))
        used += sum(lengths)
        room += sum(_room(members, lengths, recipe.line_tokens) for share in bins for members in share)
    most, fill = max(counts), used / room
    return BatchPlan(rows, batch.rows_per_update, steps, total, devices, min(counts), most, fill, group)


def make_loader(
    recipe: Recipe, read: Dataset[Any] | PromptSet, carried: Mapping[str, float] | None = None
) -> BatchSource[Any]:
    """Returns the data loader of a run, or its stream of rows if the data set is streamed. A stream continues where the
    checkpoint with the values `carried` was saved."""
    if read.open_stream is None:
        return memory_loader(recipe, read)
    each = recipe.batch.prompts if isinstance(read, PromptSet) else recipe.batch.rows_per_update
    return read.open_stream(each, recipe.run.seed, carried or {}, read.workers)


def memory_loader(recipe: Recipe, read: Dataset[Any] | PromptSet) -> Loader[Any]:
    """Returns the data loader of a data set in memory. The loader of a `PromptSet` has no end, because dynamic sampling
    takes as many prompts as it needs."""
    batch = recipe.batch
    if isinstance(read, PromptSet):
        each, total = batch.prompts, None
    else:
        rows, each = sum(len(source) for source in read.sources), batch.rows_per_update
        _, total = _steps(recipe, rows, each)
    return Loader(
        read.sources,
        read.weights,
        rows_per_update=each,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        total_rows=total,
        drop_last=recipe.data.drop_last,
    )


def _steps(recipe: Recipe, rows: int, rows_per_update: int) -> tuple[int, int]:
    run, drop_last = recipe.run, recipe.data.drop_last
    return steps_and_rows(rows, rows_per_update, epochs=run.epochs, steps=run.steps, drop_last=drop_last)


def _room(members: Sequence[int], lengths: Sequence[int], tokens: int | None) -> int:
    if tokens is not None:
        return tokens
    return max((lengths[i] for i in members), default=1) * max(1, len(members))


# The allowed mean of |log p_trainer - log p_engine| for a serving engine, by dtype. Rounding differences of other
# attention kernels and other expert choices stay well below this limit. If an error swaps responses between prompts,
# the mean difference is about 1 nat. The limit of the k3 KL estimate is half of this limit, because k3 gives more
# weight to the few tokens with large differences.
LOGPROB_LIMITS = {"fp32": 0.005, "fp16": 0.03, "bf16": 0.1}
# The limit with `rollout.precision`, where the weights of the engine have eight bits.
LOW_PRECISION_LIMIT = 0.25


def old_needed(recipe: Recipe, updates: int) -> bool:
    """Returns whether the trainer must compute old log-probs before the first update of a step.

    With one update per step, the old log-probs equal the current log-probs, so they are computed only if the reward or
    the loss needs them before the update. With `rollout_correction.bypass`, the engine's log-probs replace the old
    log-probs. With bypass, the trainer computes its own log-probs only if they are compared with the engine's.
    """
    algorithm = recipe.algorithm
    if algorithm.rollout_correction.compares or estimator_row(algorithm.advantage).energy:
        return True
    if recipe.rollout.low_precision is not None:
        return True  # the mismatch is measured in every step
    if algorithm.routing_replay == "old" and updates * algorithm.epochs > 1:
        return True  # the updates replay the experts of this pass
    chosen_before = loss_row(algorithm.loss).selection_keys is not None
    needed = updates * algorithm.epochs > 1 or algorithm.kl.in_reward() or chosen_before
    return needed and not algorithm.rollout_correction.bypass


def logprob_limit(recipe: Recipe) -> float | None:
    """Returns the largest allowed mean difference between the log-probs of the engine and the trainer, or None if they
    are not compared."""
    rollout = recipe.rollout
    if rollout.max_logprob_diff != "auto":
        return rollout.max_logprob_diff
    # Responses of earlier weights differ by more than rounding.
    low_precision = rollout.low_precision is not None and not rollout.max_staleness
    if not (low_precision or ENGINES[rollout.engine].served):
        return None
    limit = LOW_PRECISION_LIMIT if low_precision else LOGPROB_LIMITS[recipe.model.dtype]
    # Logits are divided by the temperature, so a temperature below 1 also increases their rounding errors.
    return limit / min(1.0, rollout.temperature)


def prompt_limit(recipe: Recipe, config: Any) -> int:
    """Returns the maximum length of a prompt in tokens. The maximum is `data.max_prompt_tokens`. If this key is not
    set, it is the model's context or the size of a micro-batch, whichever is smaller, minus `rollout.max_tokens`."""
    longest = recipe.rollout.max_tokens
    context = getattr(text_config(config), "max_position_embeddings", None)
    bounds = {"the model's context": context, "batch.tokens": recipe.line_tokens}
    rooms = {name: bound - longest for name, bound in bounds.items() if bound}
    wanted = recipe.data.max_prompt_tokens
    for name, room in rooms.items():
        if room < (wanted or 1):
            raise Refusal.at(
                "rollout.max_tokens",
                f"a response of {longest} tokens leaves {room} tokens of {name} ({bounds[name]}) for the prompt"
                + (f", and data.max_prompt_tokens is {wanted}" if wanted else ""),
                (f"set data.max_prompt_tokens to {room} or less, or lower it" if wanted and room > 0 else "lower it")
                + (", or raise batch.tokens" if name == "batch.tokens" else ""),
                code="over-context",
            )
    return wanted or min(rooms.values(), default=UNLIMITED)


def row_limit(recipe: Recipe, config: Any) -> int:
    """Returns the maximum length of a row in tokens: the smallest of `data.max_tokens`, the model's context and the
    token budget of a micro-batch."""
    context = getattr(text_config(config), "max_position_embeddings", None)
    wanted = recipe.data.max_tokens
    if wanted and context and wanted > context:
        raise Refusal.at(
            "data.max_tokens",
            f"{wanted} is more than the model's context of {context}",
            f"set data.max_tokens to {context} or less",
            code="over-context",
        )
    bounds = [bound for bound in (wanted, context, recipe.line_tokens) if bound]
    return min(bounds)
