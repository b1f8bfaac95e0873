"""Runs the checks of a recipe, then plans its batches and memory (`prepare_offline` and `prepare_online`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.device.base import Device
from lockstep.errors import Problem
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.model.load_folder import DTYPES
from lockstep.model.resolve import image_folder
from lockstep.model.text_model import text_config
from lockstep.preflight.async_worker import with_worker
from lockstep.preflight.batch_plan import OnlinePlan, plan_batches, plan_online, sequences_per_update
from lockstep.preflight.checks import CheckStage, run_checks
from lockstep.preflight.memory_plan import MemoryPlan, on_device, plan_memory
from lockstep.preflight.model_checks import tokenizer_of_model
from lockstep.preflight.model_sizes import count_parameters
from lockstep.preflight.prepared import Context, Prepared, PreparedOnline, problems_of, refuse_each_once
from lockstep.preflight.row_checks import longest_row, repeated_rows, seen_in_training, unreadable_files
from lockstep.preflight.tower_sizes import ANY_IMAGES, image_load
from lockstep.recipe import Recipe
from lockstep.rollout.collect import encode_questions, prompt_format
from lockstep.rollout.native.native_engine import kept_cache, prefill_budget
from lockstep.run.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHECKING, PLANNING = "Checking the recipe, the model and the data", "Planning the memory"
_NOT_COMPARED = "{}: it is not known whether these rows are also in data.train, whose rows are streamed"


def prepare_offline(
    recipe: Recipe, device: Device, devices: int, console: Console, *, plans: bool = False, local: bool = True
) -> Prepared:
    """Runs all checks of an offline run, and plans its batches and memory. `plans` is true for `lockstep plan`. `local`
    is true if the run would use the devices of this machine."""
    context = Context(recipe, device, devices, console, plans, local)
    with console.waiting(CHECKING):
        _check(context)
    train, val = context.train, context.val
    remarks = [*train.warnings, *(val.warnings if val is not None else ()), *repeated_rows(recipe, train)]
    if val is not None and train.streamed:
        remarks.append(_NOT_COMPARED.format("data.val"))
    elif val is not None:
        remarks += seen_in_training(train.items, val.items, "data.val")
    context.batches = batches = plan_batches(recipe, train, devices)
    longest = longest_row(recipe, train)
    rows, images = recipe.batch.rows_per_update, image_load(train.items, recipe.model)
    with console.waiting(PLANNING):
        context.memory = plan_memory(recipe, context.config, devices, longest, rows, device=device, images=images)
    refuse_each_once(run_checks(CheckStage.PLAN, context))
    remarks = [*context.remarks, *remarks, *context.memory.remarks]
    tokenizer, config, questions = context.tokenizer, context.config, context.questions
    return Prepared(recipe, tokenizer, config, questions, context.memory, train, val, batches, context.limit, remarks)


def prepare_online(
    recipe: Recipe,
    device: Device,
    devices: int,
    console: Console,
    *,
    plans: bool = False,
    local: bool = True,
    plays: bool = True,
) -> PreparedOnline:
    """Runs all checks of an online run, and plans its batches and memory. The arguments are those of
    `prepare_offline`. With `plays` False, environments are not called."""
    context = Context(recipe, device, devices, console, plans, local, plays)
    with console.waiting(CHECKING):
        _check(context)
    train, questions = context.prompts, context.questions
    context.batches = batches = plan_online(recipe, train, devices)
    with console.waiting(PLANNING):
        context.memory = _online_memory(context, batches)
    refuse_each_once(run_checks(CheckStage.PLAN, context))
    remarks = [*context.remarks, *train.warnings, *repeated_rows(recipe, train), *context.memory.remarks]
    if questions and train.streamed:
        remarks.append(_NOT_COMPARED.format("val.questions"))
    elif questions:
        encoded = encode_questions(
            context.tokenizer, questions, recipe.data.system, prompt_format(recipe), image_folder(recipe.model)
        )
        remarks += seen_in_training(train.items, encoded, "val.questions")
    return PreparedOnline(recipe, context.tokenizer, context.config, questions, context.memory, train, batches, remarks)


def _check(context: Context) -> None:
    """Runs all checks that do not need the batch and memory plans, and reports all their problems in one refusal."""
    problems = _opened(context, [CheckStage.SETTINGS, CheckStage.OPEN])
    problems += run_checks(CheckStage.MODEL, context)
    if context.stops_before_data:
        refuse_each_once([*problems, *unreadable_files(context)])
    problems += run_checks(CheckStage.READ, context)
    if not context.limit:
        problems += unreadable_files(context)
    if context.train is not None or context.val is not None:
        problems += run_checks(CheckStage.ROWS, context)
    refuse_each_once(problems)
    _warn_slow(context)


def _opened(context: Context, stages: list[CheckStage]) -> list[Problem]:
    """Returns the problems of these check stages. Without a tokenizer or model configuration, rows cannot be encoded,
    so the function raises a refusal at once, which includes the problems of the data files."""
    problems = [problem for stage in stages for problem in run_checks(stage, context)]
    if context.tokenizer is None or context.config is None:
        refuse_each_once([*problems, *unreadable_files(context)])
    return problems


def _online_memory(context: Context, batches: OnlinePlan) -> MemoryPlan:
    recipe, config, device, devices = context.recipe, context.config, context.device, context.devices
    size = DTYPES[recipe.model.dtype].itemsize
    prefill_tokens = prefill_budget(recipe.rollout, device, text_config(config), size)
    total, counted = device.memory().total, count_parameters(recipe, config)
    # The images that an environment returns are not known.
    images = ANY_IMAGES if recipe.rollout.interactive else image_load(context.prompts.items, recipe.model)

    def plan_of(cache_room: int | None) -> MemoryPlan:
        return plan_memory(
            recipe,
            config,
            devices,
            batches.longest,
            sequences_per_update(recipe),
            prefill_tokens,
            device=device,
            keeps_cache=kept_cache(total) if device.graph_capture else 0,
            counted=counted,
            cache_room=cache_room,
            images=images,
        )

    memory = on_device(recipe, total, plan_of)
    if recipe.rollout.max_staleness is None:
        return memory
    on_host = device.torch_device(0).type == "cpu"
    return with_worker(memory, recipe, config, devices, batches.longest, prefill_tokens, on_host=on_host, memory=total)


def _warn_slow(context: Context) -> None:
    """Warns if matrix products with the model's shapes and dtype are slow on the device."""
    text, dtype = text_config(context.config), DTYPES[context.recipe.model.dtype]
    hidden, intermediate = getattr(text, "hidden_size", None), getattr(text, "intermediate_size", None)
    if not isinstance(hidden, int):
        return
    # On a host without fast bf16, lockstep uses other bf16 matrix products, which must be prepared before the speed is
    # judged.
    prepare_products(dtype)
    shape = (hidden, intermediate if isinstance(intermediate, int) else hidden)
    for warning in context.device.slowed_by(dtype, *shape):
        context.console.warn(warning)


@dataclass(frozen=True)
class Shown:
    """The first rows of each data source, which `lockstep plan` prints."""

    tokenizer: PreTrainedTokenizerBase
    train: Any
    """A `Dataset` or a `PromptSet`."""


def prepare_shown(recipe: Recipe, device: Device, rows: int, console: Console) -> Shown:
    """Checks and encodes only the first `rows` rows of each data source."""
    sources = [source.model_copy(update={"rows": min(rows, source.rows or rows)}) for source in recipe.data.taken]
    limited = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": sources, "val": []})})
    context = Context(limited, device, 1, console, plans=True, local=False)
    problems = _opened(context, [CheckStage.OPEN])
    problems += problems_of(tokenizer_of_model, context)
    problems += run_checks(CheckStage.READ, context)
    refuse_each_once(problems)
    return Shown(context.tokenizer, context.train)
