"""All checks of a recipe before weights load, by recipe section. `train`, `plan` and `train --smoke` run all checks.

A check is a function of a `Context` that returns problems or raises a refusal. Checks run stage by stage, and all
problems of the stages before the plan are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from lockstep.doctor.local_machine import Machine
from lockstep.doctor.package_checks import unfit_packages
from lockstep.errors import Problem, Refusal
from lockstep.functions import is_function_path
from lockstep.launch.launcher import ranks_here
from lockstep.model.text_model import text_config
from lockstep.parallel.sharding import grid_of, refuse_offload
from lockstep.parallel.world import refuse_ranks
from lockstep.preflight import model_checks as model
from lockstep.preflight import row_checks as rows
from lockstep.preflight import user_trials as trials
from lockstep.preflight.async_worker import refuse_beside
from lockstep.preflight.memory_plan import MemoryPlan, refuse_misfit
from lockstep.preflight.prepared import Context
from lockstep.recipe import Recipe
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.engine import refuse_unknown_ids
from lockstep.rollout.native.native_engine import refuse_moving_positions
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder, run_folder
from lockstep.run.metrics import read_metrics
from lockstep.run.trackers.tracker import check_sinks, open_sinks


class CheckStage(IntEnum):
    """The stage at which a check runs, which depends on the inputs that it needs."""

    SETTINGS = 1
    """The recipe and the device."""
    OPEN = 2
    """Checks of this stage read the tokenizer, the model's configuration and the validation questions into the
    context."""
    MODEL = 3
    """What `OPEN` read."""
    READ = 4
    """Checks of this stage read rows or prompts into the context and encode them."""
    ROWS = 5
    """Rows or prompts."""
    PLAN = 6
    """Checks of this stage need the batch plan and the memory plan."""


def _always(context: Context) -> bool:
    return True


@dataclass(frozen=True)
class PreflightCheck:
    """One check of a recipe section. `applies` decides whether the check runs for a recipe."""

    function: Callable[[Context], Iterable[Problem] | None]
    stage: CheckStage
    applies: Callable[[Context], bool] = _always
    in_plan: Literal["refuse", "remark", "last"] = "refuse"
    """How `lockstep plan` treats a problem: it refuses the recipe, prints a remark, or refuses the recipe after it has
    printed the plan."""
    before_data: bool = False
    """Whether a problem is reported before the training data is read and encoded, which may take minutes."""

    def problems(self, context: Context) -> list[Problem]:
        problems: list[Problem] = []
        try:
            for problem in self.function(context) or ():
                problems.append(problem)
        except Refusal as refusal:
            problems += refusal.problems
        return problems


# Checks of recipe sections that have no check file of their own.


def context_ranks(context: Context) -> None:
    refuse_ranks(context.recipe.parallel.context_parallel, context.devices)


def device_mesh(context: Context) -> None:
    grid_of(context.recipe.parallel, context.devices)


def offloaded_weights(context: Context) -> None:
    refuse_offload(context.recipe.parallel, context.devices)


def async_worker(context: Context) -> None:
    device = context.device
    refuse_beside(context.recipe, device, ranks_here(context.devices), device.count() if context.local else None)


# The server modules are imported only for runs with a serving engine.
def engine_package(context: Context) -> None:
    from lockstep.rollout.servers.server_process import refuse_absent

    # The package of an engine on a Ray cluster is needed only on its node, which is asked when the engine starts.
    if context.recipe.rollout.server.replicas is None:
        refuse_absent(context.recipe.rollout, context.device)


def engine_device(context: Context) -> None:
    from lockstep.rollout.servers.weight_transports import refuse_shared_device

    refuse_shared_device(context.recipe.rollout, context.device)


def stop_ids(context: Context) -> None:
    refuse_unknown_ids(context.recipe.rollout.stop_ids, text_config(context.config).vocab_size)


def cached_positions(context: Context) -> None:
    longest = context.prompts.longest + context.recipe.rollout.max_tokens
    refuse_moving_positions(text_config(context.config), longest, context.config.model_type)


def packages(context: Context) -> list[Problem]:
    return unfit_packages(context.device.name, Machine())


def trackers(context: Context) -> None:
    log = context.recipe.log
    port = None if context.plans else log.prometheus  # a plan must not need the port of a run that trains meanwhile
    check_sinks(open_sinks(list(log.track), run_folder(context.recipe), log.project, Console.silent(), port))


def resumed_run(context: Context) -> Iterator[Problem]:
    """Reports a run folder that contradicts `run.resume`."""
    folder, resume = run_folder(context.recipe), context.recipe.run.resume
    if resume == "never" and folder.path.exists():
        yield Problem(
            "run.resume",
            f"{folder.path} exists, and run.resume=never allows only a new folder",
            "choose another run.name",
            code="already-exists",
        )
    if resume == "required" and not _has_checkpoint(folder):
        yield Problem(
            "run.resume",
            f"{folder.path} has no checkpoint to continue from",
            "set run.resume=auto",
            code="no-checkpoint",
        )


def finished_run(context: Context) -> Iterator[Problem]:
    """Reports a run folder with a finished run without checkpoints, because a new run would overwrite its metrics."""
    assert context.batches is not None
    folder = run_folder(context.recipe)
    if not folder.metrics.exists() or _has_checkpoint(folder):
        return
    if folder.export.exists() or context.batches.steps in [step for step, _ in read_metrics(folder.metrics)]:
        yield Problem(
            f"run folder {folder.path}",
            "contains a finished run without checkpoints: a new run would overwrite its metrics",
            "choose another run.name, or remove the folder",
            code="already-exists",
        )


def _has_checkpoint(folder: RunFolder) -> bool:
    return folder.path.exists() and bool(checkpoints.steps_in(folder.checkpoints))


def checkpoint_space(context: Context) -> None:
    assert context.memory is not None
    refuse_full_disk(context.recipe, context.memory)


def refuse_full_disk(recipe: Recipe, memory: MemoryPlan) -> None:
    """Refuses a run whose checkpoint does not fit on the disk."""
    checkpoints.require_disk(run_folder(recipe).checkpoints, memory.checkpoint_bytes, "a checkpoint")


def device_memory(context: Context) -> None:
    assert context.memory is not None
    refuse_misfit(context.memory, context.device.memory().total, context.device.name)


def _offline(context: Context) -> bool:
    return not context.online


def _replays_routing(context: Context) -> bool:
    return _online(context) and context.recipe.algorithm.routing_replay != "off"


def _online(context: Context) -> bool:
    return context.online


def _interactive(context: Context) -> bool:
    recipe = context.recipe
    validated = recipe.val.environment is not None or recipe.val.agent is not None
    return context.online and context.plays and (recipe.rollout.interactive or validated)


def _asynchronous(context: Context) -> bool:
    return context.online and context.recipe.rollout.max_staleness is not None


def _served(context: Context) -> bool:
    return context.generates and ENGINES[context.recipe.rollout.engine].served


def _packed(context: Context) -> bool:
    return (
        not context.online and context.recipe.batch.tokens is not None and context.recipe.parallel.context_parallel == 1
    )


def _has_limit(context: Context) -> bool:
    return context.limit > 0


def _has_validation(context: Context) -> bool:
    return context.limit > 0 and bool(context.recipe.data.val)


def _writes_run(context: Context) -> bool:
    return context.main and context.local


CHECKS: dict[str, tuple[PreflightCheck, ...]] = {
    "parallel": (
        PreflightCheck(context_ranks, CheckStage.SETTINGS),
        PreflightCheck(
            model.context_division, CheckStage.MODEL, lambda context: context.recipe.parallel.context_parallel > 1
        ),
        PreflightCheck(device_mesh, CheckStage.SETTINGS),
        PreflightCheck(offloaded_weights, CheckStage.SETTINGS),
        PreflightCheck(
            model.tensor_division, CheckStage.MODEL, lambda context: context.recipe.parallel.tensor_parallel > 1
        ),
        PreflightCheck(
            model.expert_division, CheckStage.MODEL, lambda context: context.recipe.parallel.expert_parallel > 1
        ),
    ),
    "device": (PreflightCheck(packages, CheckStage.SETTINGS),),
    "run": (
        PreflightCheck(resumed_run, CheckStage.SETTINGS, _writes_run),
        PreflightCheck(finished_run, CheckStage.PLAN, _writes_run),
    ),
    "log": (PreflightCheck(trackers, CheckStage.SETTINGS, lambda context: context.main, before_data=True),),
    "model": (
        PreflightCheck(model.dtype_of_device, CheckStage.SETTINGS),
        PreflightCheck(model.matmul_of_device, CheckStage.SETTINGS),
        PreflightCheck(model.open_tokenizer, CheckStage.OPEN),
        PreflightCheck(model.open_config, CheckStage.OPEN),
        PreflightCheck(model.tokenizer_of_model, CheckStage.MODEL),
        PreflightCheck(model.routers, CheckStage.MODEL),
        PreflightCheck(model.replayed_routers, CheckStage.MODEL, _replays_routing),
        PreflightCheck(model.classifier, CheckStage.MODEL, lambda context: model.trains_value_model(context.recipe)),
        PreflightCheck(model.architectures, CheckStage.MODEL),
        PreflightCheck(model.tiled_mlps, CheckStage.MODEL, lambda context: context.recipe.model.tiled_mlp is not None),
        PreflightCheck(model.missing_weights, CheckStage.MODEL, in_plan="remark"),
    ),
    "rollout": (
        PreflightCheck(model.precision_of_device, CheckStage.SETTINGS, _online),
        PreflightCheck(async_worker, CheckStage.SETTINGS, _asynchronous),
        PreflightCheck(engine_package, CheckStage.SETTINGS, _served),
        PreflightCheck(engine_device, CheckStage.SETTINGS, _served),
        PreflightCheck(
            model.served_images,
            CheckStage.MODEL,
            lambda context: _served(context) and context.recipe.model.vision is not None,
        ),
        PreflightCheck(stop_ids, CheckStage.MODEL),
        PreflightCheck(
            trials.rollout_function, CheckStage.ROWS, lambda context: context.recipe.rollout.function is not None
        ),
        PreflightCheck(trials.environment, CheckStage.ROWS, _interactive),
        # The environment may make prompts longer.
        PreflightCheck(cached_positions, CheckStage.ROWS, _online),
    ),
    "val": (
        PreflightCheck(rows.read_questions_of, CheckStage.OPEN),
        PreflightCheck(rows.long_questions, CheckStage.MODEL),
    ),
    "data": (
        PreflightCheck(rows.read_limit, CheckStage.READ),
        PreflightCheck(rows.read_training, CheckStage.READ, _has_limit),
        PreflightCheck(
            rows.read_validation, CheckStage.READ, lambda context: context.limit > 0 and bool(context.recipe.data.val)
        ),
        PreflightCheck(rows.method_rows, CheckStage.ROWS, _offline),
        PreflightCheck(rows.placeholder_tokens, CheckStage.ROWS),
    ),
    "batch": (
        PreflightCheck(rows.oversized_rows, CheckStage.ROWS, _offline),
        PreflightCheck(rows.moving_row_positions, CheckStage.ROWS, _packed),
    ),
    "reward": (PreflightCheck(rows.reward_rules, CheckStage.ROWS, _online),),
    "algorithm": (
        PreflightCheck(
            trials.advantage_function,
            CheckStage.MODEL,
            lambda context: context.online and is_function_path(context.recipe.algorithm.advantage),
        ),
        PreflightCheck(
            trials.loss_function,
            CheckStage.MODEL,
            lambda context: context.online and is_function_path(context.recipe.algorithm.loss),
        ),
    ),
    "memory": (PreflightCheck(device_memory, CheckStage.PLAN, lambda context: context.local, in_plan="last"),),
    "checkpoint": (PreflightCheck(checkpoint_space, CheckStage.PLAN, _writes_run, in_plan="last"),),
}


def run_checks(stage: CheckStage, context: Context) -> list[Problem]:
    """Returns the problems that all checks of a stage find. `lockstep plan` adds some of these problems as remarks to
    the context instead."""
    problems: list[Problem] = []
    for check in (check for section in CHECKS.values() for check in section):
        if check.stage != stage or not check.applies(context):
            continue
        if context.plans and check.in_plan == "last":
            continue
        new = check.problems(context)
        context.stops_before_data |= check.before_data and bool(new)
        if context.plans and check.in_plan == "remark":
            context.remarks += [
                f"{problem.where} {problem.why}: `lockstep train` would refuse this run" for problem in new
            ]
        else:
            problems += new
    return problems
