"""From the module that parted to the operator in it, while the replay still has its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.cpu import Cpu
from lockstep.parallel.world import World
from lockstep.parity.replay.modules import Blamed
from lockstep.parity.replay.operators import Culprit, other_code, wrong_kernel
from lockstep.parity.replay.oplog import Heard, hear
from lockstep.parity.replay.reproduce import write_reproducer
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.tolerance import tolerance_of
from lockstep.recipe import Recipe
from lockstep.tape.digest import digest, relative
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.record import short
from lockstep.tape.rows import fed_examples
from lockstep.train.build import build_critic, build_learner
from lockstep.train.models import Models
from lockstep.train.run import Run
from lockstep.train.step import Learner


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
    heard = hear(learner.module, blamed.module, lambda: learner.module(here))
    everyone = run.world.gather(heard)
    if not run.world.main:
        return None
    heard = everyone[blamed.rank]
    if step not in tape.weighed() and step != 1:
        return Located("unknown", None, "the weights of this step are not on the tape", [], [], None)
    clean = clean_learner(run.recipe, blamed.learner, tape, step)
    same = hear(clean.module, blamed.module, lambda: clean.module(batch))
    clean.module.double()
    exact = hear(clean.module, blamed.module, lambda: clean.module(batch))
    return judge_module(heard, same, exact, blamed, record, run)


def clean_learner(recipe: Recipe, name: str, tape: TapeFolder, step: int) -> Learner:
    """The recorded weights in a model of its own on the CPU: untouched by what the replay may have wrong."""
    plain = recipe.model.model_copy(update={"gradient_checkpointing": False})
    recipe = recipe.model_copy(update={"model": plain, "device": "cpu"})
    device, place = Cpu(), torch.device("cpu")
    build = build_critic if name == "critic" else build_learner
    learner = build(recipe, device, World(), place)
    assert learner is not None
    if step in tape.weighed():
        restore_learner(learner, tape.read_weights(step), str(tape.path))
    return learner


def judge_module(heard: Heard, same: Heard, exact: Heard, blamed: Blamed, record: StepRecord, run: Run) -> Located:
    """Which side is off, and which operator of the replay's module. `same` and `exact` are a clean copy of the module
    in the replay's own precision and in double precision."""
    tolerance = tolerance_of(run.recipe.model.dtype)
    replay_off = _far(heard.outputs or [], exact.outputs or [], tolerance.module)
    recorded_off = _recorded_far(record, blamed, exact, tolerance.module)
    side = "both" if replay_off and recorded_off else "recorded run" if recorded_off else "replay"
    shapes = [list(t.shape) for t in heard.outputs or []]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in heard.outputs or []]
    culprit = wrong_kernel(heard.calls or []) or other_code(heard.calls or [], same.calls or [], tolerance)
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
    return write_reproducer(culprit, folder / "reproduce.py", f"{blamed.module}: {culprit.call.name} is off")


def _far(found: list[torch.Tensor], wanted: list[torch.Tensor], allowed: float) -> bool:
    pairs = zip(found, wanted, strict=False)
    return any(x.shape != y.shape or not relative(digest(x), digest(y)) <= allowed for x, y in pairs)


def _recorded_far(record: StepRecord, blamed: Blamed, exact: Heard, allowed: float) -> bool:
    """Whether the recorded module's output lies far from the judge's, by their digests."""
    for trace in record.info["probe"]["traces"]:
        if trace["learner"] != blamed.learner:
            continue
        for event in trace["events"]:
            if event["module"] == blamed.module and event["phase"] == "forward":
                prefix = f"probe/{blamed.learner}/{trace['rank']}/forward/{event['left']:05d}/output"
                ours = [record.tensors[f"{prefix}/{i}"] for i in range(event["outputs"])]
                judge = [digest(t) for t in exact.outputs or [] if t.numel()]
                return any(not relative(x, y) <= allowed for x, y in zip(ours, judge, strict=False))
    return False


def _values(culprit: Culprit) -> tuple[float, float] | None:
    found, wanted = culprit.actual, culprit.expected
    if found.shape != wanted.shape or not found.numel():
        return None
    place = int((found.double() - wanted.double()).abs().flatten().argmax())
    return float(found.flatten()[place]), float(wanted.flatten()[place])
