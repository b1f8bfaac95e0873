"""Everything that can be refused, before a weight is loaded: device, tokenizer, rows, questions, plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from lockstep.data.array_store import sequences
from lockstep.data.dataset import Dataset, open_sources, rows_taken
from lockstep.data.encode.chat_template import end_of_turn, with_template
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.prompt_rows import PromptSet, find_question_columns, load_prompts, read_questions
from lockstep.data.sources.read import read_rows
from lockstep.data.sources.user_reader import UserReader
from lockstep.data.updates import row_sizes, sequence_counts
from lockstep.device.base import Device
from lockstep.doctor.local_machine import Machine
from lockstep.doctor.package_checks import unfit_packages
from lockstep.errors import Problem, Refusal, refuse_all, shortened
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.kernels.rotary import fixed_length
from lockstep.launch.launcher import ranks_here
from lockstep.methods import METHODS
from lockstep.model.heads import refuse_no_classifier
from lockstep.model.load import load_config, load_tokenizer, refuse_foreign_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.parallel.sharding import grid_of, refuse_offload
from lockstep.parallel.world import refuse_ranks
from lockstep.preflight.async_worker import refuse_beside, with_worker
from lockstep.preflight.batch_plan import BatchPlan, OnlinePlan, plan_batches, plan_online, prompt_limit, row_limit
from lockstep.preflight.function_trials import try_functions
from lockstep.preflight.memory_plan import MemoryPlan, on_device, plan_memory, refuse_misfit
from lockstep.preflight.model_checks import (
    missing_weights,
    refuse_indivisible_models,
    refuse_models,
    refuse_placeholders,
    refuse_routers,
)
from lockstep.preflight.model_sizes import count_parameters
from lockstep.preflight.row_notes import repeated_rows, seen_in_training
from lockstep.recipe import Recipe, Source
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES
from lockstep.reward.row_rewards import read_by_rewards
from lockstep.reward.rules import rule_for, rule_named, unmatched_rules
from lockstep.reward.scorer import active_weights
from lockstep.rollout.collect import encode_questions, prompt_format
from lockstep.rollout.engine import refuse_unknown_ids
from lockstep.rollout.native.native_engine import kept_cache, prefill_budget, refuse_moving_positions
from lockstep.rollout.servers.server_process import refuse_absent
from lockstep.rollout.servers.weight_transports import refuse_shared_device
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.trackers.tracker import open_sinks
from lockstep.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")


@dataclass(frozen=True)
class Checked:
    """A recipe with everything it names found and checked."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    config: Any
    questions: list[Question]
    memory: MemoryPlan

    def data(self, train: Dataset[Any] | PromptSet, val: Dataset[Any] | None = None) -> dict[str, Any]:
        """What the rows are and what was kept of them: all that a resume must find unchanged."""
        return {
            "train": train.fingerprints,
            "val": val.fingerprints if val else [],
            "kept": {"rows": train.counts.rows, "tokens": train.counts.tokens},
        }

    @property
    def pad_id(self) -> int:
        """Padding is never attended to nor trained, so any id does where the tokenizer has none."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0


@dataclass(frozen=True)
class Prepared(Checked):
    """An offline run: rows."""

    tokens_metric: ClassVar[str] = "train/tokens"
    train: Dataset[Any]
    val: Dataset[Any] | None
    batches: BatchPlan
    limit: int
    remarks: list[str]

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a response; of a reward model, which generates nothing, those that end a text."""
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
    """An online run: prompts."""

    tokens_metric: ClassVar[str] = "perf/total_num_tokens"
    train: PromptSet
    batches: OnlinePlan
    remarks: list[str]

    @property
    def end_tokens(self) -> list[int]:
        end = end_of_turn(self.tokenizer, self.recipe.data)
        return sorted({*self.recipe.rollout.stop_ids, *([] if end is None else [end])})

    @property
    def fingerprints(self) -> dict[str, Any]:
        return self.data(self.train)

    def rows_seen(self, step: int, carried: Mapping[str, float]) -> int:
        return int(carried["position"])


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
            # Several checks may come to the same one.
            raise Refusal(list(dict.fromkeys(self.problems)))


def prepare(recipe: Recipe, device: Device, devices: int, console: Console, *, must_fit: bool = True) -> Prepared:
    """Find and check everything; `must_fit` also refuses what the device's memory cannot hold."""
    collect = Collector()
    collect(lambda: refuse_ranks(recipe.parallel.context_parallel, devices))
    tokenizer, config, questions = _common(recipe, device, collect)
    collect(lambda: grid_of(recipe.parallel, devices))
    collect(lambda: refuse_offload(recipe.parallel, devices))
    collect.problems += refuse_indivisible_models(recipe)
    remarks = _refuse_before_loading(recipe, device, collect, trains=must_fit)
    limit = collect(lambda: row_limit(recipe, config)) or 0
    train = collect(lambda: _read(recipe, recipe.data.taken, tokenizer, limit, console, "training"))
    val = None
    if recipe.data.val:
        val = collect(lambda: _read(recipe, recipe.data.val, tokenizer, limit, console, "validation"))
    if METHODS[recipe.method].model == "value":
        collect(lambda: refuse_no_classifier(config, recipe.model.path))
    for key, rows in (("data.train", train), ("data.val", val)):
        if rows is not None:
            problems, said = METHODS[recipe.method].check(recipe, rows, key)
            collect.problems += [*problems, *oversized(rows, recipe)]
            collect.problems += refuse_placeholders(config, ((one.origin, one.ids) for one in sequences(rows.items)))
            if recipe.batch.tokens is not None and recipe.parallel.context_parallel == 1:
                collect.problems += shared_and_moving(rows, *read_by(recipe, config))
            remarks += said
    collect.refuse()
    assert train is not None
    remarks += [*train.warnings, *(val.warnings if val is not None else ()), *repeated_rows(recipe, train)]
    if val is not None:
        remarks += seen_in_training(train.items, val.items, "data.val")
    _warn_slow(recipe, config, device, console)
    batches = plan_batches(recipe, train, devices)
    most = longest_row(recipe, train)
    memory = plan_memory(
        recipe,
        config,
        devices,
        most,
        recipe.batch.rows_per_update,
        device=device,
    )
    if must_fit:
        refuse_misfit(memory, device.memory().total, device.name)
    remarks += memory.remarks
    return Prepared(recipe, tokenizer, config, questions, memory, train, val, batches, limit, remarks)


def longest_row(recipe: Recipe, rows: Dataset[Any]) -> int:
    """Tokens that the longest row takes of a micro-batch."""
    packed, shared = recipe.batch.tokens is not None, recipe.parallel.context_parallel == 1
    sizes = row_sizes(rows.items, packed=packed, shared=shared)
    return int((sizes if packed else sizes * sequence_counts(rows.items)).max())


def oversized(rows: Dataset[Any], recipe: Recipe) -> list[Problem]:
    """Rows whose sequences, which one loss compares, do not fit into a micro-batch together."""
    tokens, context = recipe.line_tokens, recipe.parallel.context_parallel
    if tokens is None:
        return []
    items, counts = rows.items, sequence_counts(rows.items)
    sizes = row_sizes(items, packed=True, shared=context == 1)
    problems = [
        Problem(
            str(items[number].origin),
            f"its {counts[number]} sequences have {sizes[number]} tokens together, "
            f"over batch.tokens={recipe.batch.tokens}" + (f" on each of {context} devices" if context > 1 else ""),
            "raise batch.tokens, or lower data.max_tokens and choose data.overlong",
            code="over-batch-tokens",
        )
        for number in np.flatnonzero((counts > 1) & (sizes > tokens)).tolist()
    ]
    return shortened(problems, "rows")


def read_by(recipe: Recipe, config: Any) -> list[Any]:
    """Configurations of all models that the rows are run through."""
    if reference_kind(recipe) not in ("model", "disk") or reference_folder(recipe) == recipe.model.path:
        return [config]
    return [config, load_config(reference_folder(recipe))]


def shared_and_moving(rows: Dataset[Any], *configs: Any) -> list[Problem]:
    """Rows whose sequences share a beginning when packed, in a model that would place it differently for each."""
    lengths = [(fixed_length(config.get_text_config()), config) for config in configs]
    moving = [(fixed, config) for fixed, config in lengths if fixed is not None]
    if not moving:
        return []
    fixed, config = min(moving, key=lambda one: one[0])
    items = rows.items
    longest = row_sizes(items, packed=False)
    problems = [
        Problem(
            str(items[number].origin),
            f"{longest[number]} tokens, and over {fixed} all positions of {config.model_type} move with the length of "
            "a sequence (longrope or dynamic rotary embedding), while packed sequences of a row share their beginning",
            "set batch.micro_batch_size instead of batch.tokens, or lower data.max_tokens",
            code="rotary-limit",
        )
        for number in np.flatnonzero((sequence_counts(items) > 1) & (longest > fixed)).tolist()
    ]
    return shortened(problems, "rows")


def prepare_online(
    recipe: Recipe, device: Device, devices: int, console: Console, *, must_fit: bool = True, here: bool = True
) -> PreparedOnline:
    """As `prepare`, for prompts. `here`: the run would train on the devices of this machine."""
    collect = Collector()
    collect(lambda: refuse_ranks(recipe.parallel.context_parallel, devices))
    collect(lambda: refuse_beside(recipe, device, ranks_here(devices), device.count() if here else None))
    tokenizer, config, questions = _common(recipe, device, collect)
    collect(lambda: grid_of(recipe.parallel, devices))
    collect(lambda: refuse_offload(recipe.parallel, devices))
    collect.problems += refuse_indivisible_models(recipe)
    remarks = _refuse_before_loading(recipe, device, collect, trains=must_fit)
    limit = collect(lambda: prompt_limit(recipe, config)) or 0
    train = collect(lambda: _read_prompts(recipe, tokenizer, limit, console)) if limit else None
    if train is not None:
        prompts = (prompt for source in train.sources for prompt in source)
        collect.problems += refuse_placeholders(config, ((prompt.question.origin, prompt.ids) for prompt in prompts))
        _find_rules(recipe, train, questions, collect)
    for line in collect(lambda: try_functions(recipe, train, tokenizer, config.get_text_config().vocab_size)) or []:
        console.say(line)
    collect.refuse()
    assert train is not None
    _warn_slow(recipe, config, device, console)
    batches = plan_online(recipe, train, devices)
    refuse_moving_positions(config.get_text_config(), batches.longest, config.model_type)
    rows = sequences_per_update(recipe)
    size = DTYPES[recipe.model.dtype].itemsize
    prefill_tokens = prefill_budget(recipe.rollout, device, config.get_text_config(), size)
    total, counted = device.memory().total, count_parameters(recipe, config)

    def planned(cache_room: int | None) -> MemoryPlan:
        return plan_memory(
            recipe,
            config,
            devices,
            batches.longest,
            rows,
            prefill_tokens,
            device=device,
            keeps_cache=kept_cache(total) if device.graph_capture else 0,
            counted=counted,
            cache_room=cache_room,
        )

    memory = on_device(recipe, total, planned)
    on_host = device.torch_device(0).type == "cpu"
    memory = with_worker(
        memory, recipe, config, devices, batches.longest, prefill_tokens, on_host=on_host, memory=total
    )
    if must_fit:
        refuse_misfit(memory, total, device.name)
    remarks += [*train.warnings, *repeated_rows(recipe, train), *memory.remarks]
    if questions:
        asked = encode_questions(tokenizer, questions, recipe.data.system, prompt_format(recipe))
        remarks += seen_in_training(train.items, asked, "val.questions")
    return PreparedOnline(recipe, tokenizer, config, questions, memory, train, batches, remarks)


def _find_rules(recipe: Recipe, train: PromptSet, questions: list[Question], collect: Collector) -> None:
    """Of every data source, where rules judge. Rewards that are opened look for them too; a plan opens none."""
    if "rule" not in active_weights(recipe.reward)[0]:
        return
    asked = [*questions, *(prompt.question for source in train.sources for prompt in source)]
    sources = sorted({question.data_source for question in asked})
    for name in sources:
        collect(partial(rule_for, name, recipe.reward.rules))
    collect(lambda: refuse_all(unmatched_rules(recipe.reward.rules, sources)))


@dataclass(frozen=True)
class Shown:
    """The first rows of each source, to be looked at."""

    tokenizer: PreTrainedTokenizerBase
    train: Any
    """A `Dataset` or a `PromptSet`."""


def prepare_shown(recipe: Recipe, device: Device, rows: int, console: Console) -> Shown:
    """Find and check what `rows` rows of each source need; no other row is encoded."""
    collect = Collector()
    tokenizer, config, _ = _common(recipe, device, collect)
    online = recipe.method in ONLINE
    limit = collect(lambda: (prompt_limit if online else row_limit)(recipe, config)) or 0
    sources = [source.model_copy(update={"rows": min(rows, source.rows or rows)}) for source in recipe.data.taken]
    limited = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": sources})})

    def read() -> Dataset[Any] | PromptSet:
        if online:
            return _read_prompts(limited, tokenizer, limit, console)
        return _read(limited, sources, tokenizer, limit, console, "the first")

    train = collect(read) if limit else None
    collect.refuse()
    return Shown(tokenizer, train)


def sequences_per_update(recipe: Recipe) -> int:
    return (recipe.batch.prompts_per_update or recipe.batch.prompts) * recipe.rollout.n


def _common(recipe: Recipe, device: Device, collect: Collector) -> tuple[PreTrainedTokenizerBase, Any, list[Question]]:
    collect(lambda: _refuse_dtype(recipe, device))
    if recipe.method in ONLINE or recipe.val.questions:
        collect(lambda: refuse_absent(recipe.rollout, device))
        collect(lambda: refuse_shared_device(recipe.rollout, device))
    collect.problems += unfit_packages(device.name, Machine())
    tokenizer = collect(lambda: with_template(load_tokenizer(recipe.model.path), recipe.data))
    config = collect(lambda: load_config(recipe.model.path))
    questions = collect(lambda: _questions(recipe))
    if tokenizer is None or config is None:
        # Rows cannot be encoded, but they can be read: say now what is wrong with the files too.
        for source in (*recipe.data.train, *recipe.data.val):
            collect(lambda source=source: read_rows(source.path, reader=UserReader.of(recipe.data)))  # type: ignore[misc]
        collect.refuse()
        raise AssertionError("a missing tokenizer or config is always a problem")
    collect(lambda: refuse_foreign_tokenizer(tokenizer, config.vocab_size, recipe.model.path))
    collect(lambda: refuse_unknown_ids(recipe.rollout.stop_ids, config.get_text_config().vocab_size))
    collect.problems += refuse_routers(recipe)
    collect(lambda: _refuse_long_questions(recipe, tokenizer, config, questions or []))
    return tokenizer, config, questions or []


def _refuse_before_loading(recipe: Recipe, device: Device, collect: Collector, *, trains: bool) -> list[str]:
    """What loading the models and starting the trackers would refuse, for `train` and `plan` alike. Weights may be
    missing for a plan: that is returned as a remark."""
    collect.problems += refuse_models(recipe, device)
    if int(os.environ.get("RANK", "0")) == 0:  # the only rank that writes to trackers
        folder = RunFolder(Path(recipe.run.folder) / recipe.run.name)
        collect(lambda: open_sinks(list(recipe.log.track), folder, recipe.log.project, Console.silent()))
    missing = missing_weights(recipe)
    if trains:
        collect.problems += missing
    return [] if trains else [f"{one.where} {one.why}: training would be refused" for one in missing]


def _warn_slow(recipe: Recipe, config: Any, device: Device, console: Console) -> None:
    """Of matrices as the model has them; a square where its configuration does not tell of another."""
    text = config.get_text_config()
    inner, outer = getattr(text, "hidden_size", None), getattr(text, "intermediate_size", None)
    if not isinstance(inner, int):
        return
    dtype = DTYPES[recipe.model.dtype]
    # As they will run: where the host has no bf16 they are other ones.
    prepare_products(dtype)
    for said in device.slowed_by(dtype, inner, outer if isinstance(outer, int) else inner):
        console.warn(said)


def _read_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, limit: int, console: Console) -> PromptSet:
    opened = open_sources(recipe.data.taken, recipe.data)
    with console.task("Encoding prompts", sum(map(rows_taken, recipe.data.taken, opened))) as task:
        asked = read_by_rewards(recipe.reward)
        return load_prompts(recipe.data.taken, recipe.data, tokenizer, limit, task.advance, opened, reward_fields=asked)


def _read(
    recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase, limit: int, console: Console, what: str
) -> Dataset[Any]:
    opened = open_sources(sources, recipe.data)
    with console.task(f"Encoding {what} rows", sum(map(rows_taken, sources, opened))) as task:
        read = METHODS[recipe.method].reader(recipe)
        return read(sources, recipe.data, tokenizer, limit, task.advance, opened)


def _questions(recipe: Recipe) -> list[Question]:
    if recipe.val.questions is None:
        return []
    paths = [recipe.val.questions] if isinstance(recipe.val.questions, str) else recipe.val.questions
    online, reader = recipe.method in ONLINE, UserReader.of(recipe.data)
    questions: list[Question] = []
    for path in paths:
        rows = read_rows(path, reader=reader)
        columns = None
        if online:
            # Asked as the prompts of the run are, whose settings they share.
            finder = ColumnFinder(Source(path=path), recipe.data, rows.columns)
            columns = find_question_columns(finder, read_by_rewards(recipe.reward))
        questions += read_questions(rows, recipe.val.question_rows, columns)
    if recipe.method not in ONLINE:
        # An online run judges them by its own rewards, which are checked when these are opened.
        for source, rule in recipe.val.rules.items():
            rule_named(rule, f"val.rules.{source}")
        sources = sorted({question.data_source for question in questions})
        refuse_all(unmatched_rules(recipe.val.rules, sources, "val.rules"))
        for source in sources:
            rule_for(source, recipe.val.rules, "val.rules")
    return questions


def _refuse_long_questions(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: Any, questions: list[Question]
) -> None:
    """Questions whose answers could grow past the model's context, or past what the engine can cache of it."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not questions or context is None:
        return
    prompts = encode_questions(tokenizer, questions, recipe.data.system, prompt_format(recipe))
    long = max(prompts, key=lambda prompt: len(prompt.ids))
    longest = len(long.ids) + recipe.val.max_new_tokens
    if longest > context:
        why = f"{recipe.val.max_new_tokens} and the {len(long.ids)} tokens of the longest question"
        raise Refusal.at(
            "val.max_new_tokens",
            f"{why} ({long.question.origin}) are over the model's context of {context}",
            "lower it" if len(long.ids) < context else "leave the question out",
            code="over-context",
        )
    if not ENGINES[recipe.rollout.engine].paged or fixed_length(text) is None:
        return
    refuse_moving_positions(config.get_text_config(), longest, config.model_type, "val.max_new_tokens")


def _refuse_dtype(recipe: Recipe, device: Device) -> None:
    dtype = recipe.model.dtype
    if not device.supports(DTYPES[dtype]):
        usable = [name for name, kind in DTYPES.items() if device.supports(kind)]
        raise Refusal.at(
            "model.dtype",
            f"{device.name} does not compute in {dtype}",
            f"use {' or '.join(usable)}",
            code="unsupported-dtype",
        )
