"""From the module that parted to the operator in it, while the replay still has its models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.cpu import Cpu
from lockstep.parallel.world import World
from lockstep.parity.replay.listen import Heard, hear
from lockstep.parity.replay.modules import WAY_BACK, Blamed, traces_of
from lockstep.parity.replay.operators import Culprit, other_code, wrong_kernel
from lockstep.parity.replay.reproduce import write_reproducer
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.tolerance import Tolerance, operator_tolerance, tolerance_of
from lockstep.recipe import Recipe
from lockstep.tape.digest import digest, relative
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.observer import answers_of
from lockstep.tape.probe import BACKWARD, FORWARD
from lockstep.tape.record import short
from lockstep.tape.rows import fed_examples
from lockstep.train.build import build_critic, build_learner
from lockstep.train.models import Models
from lockstep.train.run import Run
from lockstep.train.step import Learner
from lockstep.types import MicroBatch


@dataclass(frozen=True)
class Located:
    """The operator inside a blamed module, judged by double precision on the CPU."""

    side: str
    """Who is off: the replay, the recorded run, or both."""
    operator: str | None
    why: str
    shapes: list[list[int]]
    dtypes: list[str]
    values: tuple[float, float] | None
    """Found and wanted, where they differ most."""
    script: str | None = None


def locate(run: Run, models: Models, tape: TapeFolder, step: int, blamed: Blamed) -> Located | None:
    """Every rank takes part (a sharded model runs together); the first one judges."""
    record = tape.read_step(step)
    settings = record.info["probe"]
    chosen = short(fed_examples(record.tensors), settings["rows"])
    batch = micro_batch(chosen, packed=True, pad_id=0)
    learner = next(one for one in models.learners if one.name == blamed.learner)
    here = to_device(batch, learner.device)

    def listen(module: nn.Module, rows: MicroBatch, **how: Any) -> Heard:
        return hear(module, blamed.module, lambda: answers_of(module(rows)), phase=blamed.phase, **how)

    everyone = run.world.gather(listen(learner.module, here, ranks=run.world.size))
    if not run.world.main:
        return None
    heard = everyone[blamed.rank]
    if step not in tape.weighed() and step != 1:
        return Located("unknown", None, "the weights of this step are not on the tape", [], [], None)
    clean = clean_learner(run.recipe, blamed.learner, tape, step)
    same = listen(clean.module, batch, given=heard.border)
    if fused := same.children - heard.children:
        # A fused operator does what these children do, so they count as parts of the clean module.
        same = listen(clean.module, batch, given=heard.border, through=fused)
    clean.module.double()
    exact = listen(clean.module, batch)
    return judge_module(heard, same, exact, blamed, record, run)


def clean_learner(recipe: Recipe, name: str, tape: TapeFolder, step: int) -> Learner:
    """The recorded weights in a model of its own on the CPU: untouched by what the replay may have wrong."""
    whole = {"gradient_checkpointing": False, "activation_offload": False}
    plain = recipe.model.model_copy(update={**whole, "attention": "sdpa"})
    recipe = recipe.model_copy(update={"model": plain, "device": "cpu"})
    device, torch_device = Cpu(), torch.device("cpu")
    build = build_critic if name == "critic" else build_learner
    learner = build(recipe, device, World(), torch_device)
    assert learner is not None
    if step in tape.weighed():
        restore_learner(learner, tape.read_weights(step), str(tape.path))
    return learner


def judge_module(heard: Heard, same: Heard, exact: Heard, blamed: Blamed, record: StepRecord, run: Run) -> Located:
    """Which side is off, and which operator of the replay's module. `same` is a clean copy of the module in the
    replay's own precision, on the very numbers that the replay's was given; `exact` runs by itself in float64."""
    tolerance = tolerance_of(run.recipe.model.dtype)
    if blamed.phase == BACKWARD:
        tolerance = replace(tolerance, module=WAY_BACK * tolerance.module)
    replay_off = _far(heard, exact, tolerance)
    recorded_off = _recorded_far(record, blamed, exact, tolerance)
    side = "both" if replay_off and recorded_off else "recorded run" if recorded_off else "replay"
    shapes = [list(t.shape) for t in heard.outputs]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in heard.outputs]
    alike = operator_tolerance(run.recipe.model.dtype, backwards=blamed.phase == BACKWARD)
    culprit = wrong_kernel(heard.calls) or other_code(heard.calls, same.calls, alike)
    if culprit is None:
        why = "no single operator of the module is off on its own inputs"
        return Located(side, None, why, shapes, dtypes, None)
    script = _reproducer(culprit, run.folder.path, blamed)
    return Located(
        side,
        culprit.call.name,
        culprit.why,
        [list(t.shape) for t in culprit.call.inputs],
        [str(t.dtype).removeprefix("torch.") for t in culprit.call.inputs],
        _values(culprit),
        str(script) if script else None,
    )


def _reproducer(culprit: Culprit, folder: Path, blamed: Blamed) -> Path | None:
    where = f"{blamed.module}, {blamed.phase}"
    return write_reproducer(culprit, folder / "reproduce.py", f"{where}: {culprit.call.name} is off")


def _far(heard: Heard, exact: Heard, tolerance: Tolerance) -> bool:
    pairs = zip(heard.outputs, exact.outputs, strict=False)
    if any(x.shape != y.shape or not relative(digest(x), digest(y)) <= tolerance.module for x, y in pairs):
        return True
    common = heard.parameters.keys() & exact.parameters.keys()
    return any(not relative(heard.parameters[n], exact.parameters[n]) <= tolerance.gradient for n in common)


def _recorded_far(record: StepRecord, blamed: Blamed, exact: Heard, tolerance: Tolerance) -> bool:
    """Whether what the recorded module gave lies far from the judge's, by their digests."""
    traces = traces_of(record)
    trace = traces.get((blamed.learner, blamed.rank)) or traces.get((blamed.learner, 0))
    if trace is None:
        return False
    judge = [digest(tensor) for tensor in exact.outputs if tensor.numel()]
    events = [event for event in trace.events if (event.module, event.phase) == (blamed.module, blamed.phase)]
    if blamed.phase == FORWARD:
        ours = trace.outputs(events[0]) if events else []
    else:
        # One event for each gradient that left; those of a module's later calls come back first.
        ours = [tensor for event in events[-len(judge) :] for tensor in trace.outputs(event)]
    if any(not relative(x, y) <= tolerance.module for x, y in zip(ours, judge, strict=False)):
        return True
    names = {name: trace.tensors.get(f"parameter/{blamed.module}.{name}") for name in exact.parameters}
    return any(
        found is not None and not relative(found, exact.parameters[name]) <= tolerance.gradient
        for name, found in names.items()
    )


def _values(culprit: Culprit) -> tuple[float, float] | None:
    found, wanted = culprit.actual, culprit.expected
    if found.shape != wanted.shape or not found.numel():
        return None
    index = int((found.double() - wanted.double()).abs().flatten().argmax())
    return float(found.flatten()[index]), float(wanted.flatten()[index])
