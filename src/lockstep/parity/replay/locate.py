"""From the module that parted to the operator in it, while the replay still has its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.cpu import Cpu
from lockstep.model.load import DTYPES
from lockstep.model.policy import Policy
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World
from lockstep.parity.replay.host_operators import on_host
from lockstep.parity.replay.listen import Heard, hear
from lockstep.parity.replay.modules import Blamed
from lockstep.parity.replay.operators import Culprit, other_code, other_values, wrong_kernel
from lockstep.parity.replay.reference import TokenLine
from lockstep.parity.replay.reproduce import write_reproducer
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.side import (
    RECORDED,
    REPLAY,
    UNKNOWN,
    SideCase,
    SideVerdict,
    line_of,
    read_config,
    weights_for,
    which_side,
)
from lockstep.parity.replay.tolerance import operator_tolerance, tolerance_of
from lockstep.recipe import Recipe
from lockstep.tape.format import TapeFolder
from lockstep.tape.observer import answers_of
from lockstep.tape.probe import BACKWARD
from lockstep.tape.record import short
from lockstep.tape.rows import fed_examples
from lockstep.train.models import Models, build_critic, build_learner
from lockstep.train.run_writer import Run
from lockstep.train.step import Learner
from lockstep.types import MicroBatch


@dataclass(frozen=True)
class Located:
    """The operator inside a blamed module, judged by double precision on the host."""

    side: str
    """Who is off: the replay or the recorded run, or that nobody can tell."""
    operator: str | None
    why: str
    shapes: list[list[int]]
    dtypes: list[str]
    values: tuple[float, float] | None
    """Found and wanted, where they differ most."""
    script: str | None = None
    judge: str = ""
    """In words: what tells the side."""


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
        return Located(UNKNOWN, None, "the weights of this step are not on the tape", [], [], None)
    clean = clean_learner(run.recipe, blamed.learner, tape, step)
    same = listen(clean.module, batch, given=heard.border)
    if fused := same.children - heard.children:
        # A fused operator does what these children do, so they count as parts of the clean module.
        same = listen(clean.module, batch, given=heard.border, through=fused)
    judged = which_side(_case(run.recipe, clean, tape, step, blamed, line_of(batch)), heard, same, record)
    return judge_module(heard, same, judged, blamed, run)


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


def _case(recipe: Recipe, clean: Learner, tape: TapeFolder, step: int, blamed: Blamed, line: TokenLine) -> SideCase:
    """What a judge of the two sides needs: settings and weights from files, and the line that went through."""
    folder, recorded = Path(model_folder(recipe.model.path)), tape.manifest()["recipe"]["model"]["dtype"]
    dtypes = DTYPES[recorded], DTYPES[recipe.model.dtype]
    weights = weights_for(blamed.module, tape, step, blamed.learner, folder, dtypes)
    scoring = clean.module.scoring if isinstance(clean.module, Policy) else None
    plain = scoring is not None and scoring.truncation is None and scoring.comparison is None
    temperature = scoring.temperature if scoring is not None and plain else None
    return SideCase(
        blamed, read_config(folder), *weights, line, temperature, tolerance_of(recorded, recipe.model.dtype)
    )


def judge_module(heard: Heard, same: Heard, judged: SideVerdict, blamed: Blamed, run: Run) -> Located:
    """Which operator of the replay's module is off. `same` is a clean copy of the module in the replay's own precision,
    on the very numbers that the replay's was given."""
    shapes = [list(t.shape) for t in heard.outputs]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in heard.outputs]
    alike = operator_tolerance(run.recipe.model.dtype, backwards=blamed.phase == BACKWARD)
    culprit = None
    if judged.side != RECORDED:
        culprit = wrong_kernel(heard.calls) or other_code(heard.calls, same.calls, alike)
    if culprit is None and judged.side == REPLAY:
        culprit = other_values(heard.calls, judged.noted, heard.outputs, alike)
    if culprit is None:
        why = "no single operator of the module is off on its own inputs"
        if judged.side == RECORDED:
            why = "the replay's are right; to name the other, record here and replay where the run was recorded"
        return Located(judged.side, None, why, shapes, dtypes, None, judge=judged.why)
    side, said = judged.side, judged.why
    if side == UNKNOWN and culprit.fault == "kernel" and on_host(culprit.call) is not None:
        side, said = REPLAY, f"{culprit.call.name} of the replay gives another result than its inputs do by numpy"
    script = _reproducer(culprit, run.folder.path, blamed)
    return Located(
        side,
        culprit.call.name,
        culprit.why,
        [list(t.shape) for t in culprit.call.inputs],
        [str(t.dtype).removeprefix("torch.") for t in culprit.call.inputs],
        _values(culprit),
        str(script) if script else None,
        said,
    )


def _reproducer(culprit: Culprit, folder: Path, blamed: Blamed) -> Path | None:
    where = f"{blamed.module}, {blamed.phase}"
    return write_reproducer(culprit, folder / "reproduce.py", f"{where}: {culprit.call.name} is off")


def _values(culprit: Culprit) -> tuple[float, float] | None:
    found, wanted = culprit.actual, culprit.expected
    if found.shape != wanted.shape or not found.numel():
        return None
    index = int((found.double() - wanted.double()).abs().flatten().argmax())
    return float(found.flatten()[index]), float(wanted.flatten()[index])
