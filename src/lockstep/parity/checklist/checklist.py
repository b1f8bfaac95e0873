"""The checks that people do by hand when two devices disagree, done on the first recorded step of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.model.weights import trained_weights
from lockstep.parity.checklist.bench import OFFLINE, Bench, CheckItem
from lockstep.parity.checklist.recorded import first_tokens, first_update, repeatability, rewards, starting_weights
from lockstep.parity.checklist.trials import engine_items, padding
from lockstep.parity.replay.checks import share
from lockstep.parity.replay.loop import Replay
from lockstep.parity.replay.parts import parts_of
from lockstep.parity.replay.replay import replayed_recipe, reserved_name, run_replay
from lockstep.parity.replay.stages import Side
from lockstep.parity.replay.tolerance import tolerance_of
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.observer import Observer
from lockstep.tape.record import weights_of
from lockstep.tape.rows import rollouts_of
from lockstep.train.models import Models
from lockstep.train.training import Training
from lockstep.types import Rollout

__all__ = ["CheckItem", "as_json", "run_checklist", "show"]

RESULT = "checklist.json"
# Weights that went through another number format on one side, as a share of their size.
ROUNDED = 5e-3
MARKS = {True: "passed", False: "FAILED", None: "-"}


class Checklist(Replay):
    """The first step twice from the recorded weights, to see whether it repeats; then trials in the same run.

    The second time recorded responses stand in for generated ones.
    """

    def __init__(self, tape: TapeFolder):
        super().__init__(tape, "forced", only=(1,))
        self.bench: Bench | None = None
        self.own: list[StepRecord] = []
        self.generated: list[Rollout] = []
        self.unlike: list[str] = []
        self.tried: list[CheckItem] = []

    def steps(self) -> Iterable[int]:
        if 1 not in self.tape.steps():
            raise Refusal.at(
                str(self.tape.path), "the first step is not on the tape", "record the run again: tape=true run.name=NEW"
            )
        return [0, 0]

    def restore(self, training: Training, step: int) -> None:
        self.mode = "forced" if self.bench is None else "chained"
        self.bench = self.bench or self._set_up(training)
        training.carried.update(self.bench.record.info["carried"])
        self.bench.restore()

    def _set_up(self, training: Training) -> Bench:
        start, self.unlike = self._start(training.models)
        rollouts = rollouts_of(self.tape.read_table(self.tape.rollouts_file(1))) if _online(training) else []
        tolerance = tolerance_of(self.tape.manifest()["recipe"]["model"]["dtype"], training.run.recipe.model.dtype)
        return Bench(training, self.tape.read_step(1), rollouts, start, tolerance)

    def _start(self, models: Models) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Weights before the step, and which of the model folder's are others. A tape without weights began there."""
        if 1 not in self.tape.weighed():
            return {name: tensor.clone() for name, tensor in weights_of(models.learners).items()}, []
        taped = self.tape.read_weights(1)
        unlike = [
            name
            for learner in models.learners
            for name, loaded in trained_weights(learner.module.stored).items()  # type: ignore[arg-type]
            if not _alike(loaded, taped.get(f"{learner.name}/model/{name}"))
        ]
        return taped, unlike

    def after(self, training: Training, step: int) -> None:
        run = training.run
        if run.world.main:
            own = TapeFolder(run.folder.tape)
            if not self.own and _online(training):
                self.generated = rollouts_of(own.read_table(own.rollouts_file(1)))
            self.own.append(own.read_step(1))
        if self.mode == "forced":
            run.rewind(step)  # it comes again
            return
        assert self.bench is not None
        for learner in self.bench.models.learners:
            learner.observer = Observer()  # the tape is complete
        with run.console.task("Trying engine and trainer", None):
            self.tried = [*engine_items(self.bench), padding(self.bench)]


def _online(training: Training) -> bool:
    return training.run.recipe.method in ONLINE


def _alike(loaded: torch.Tensor, taped: torch.Tensor | None) -> bool:
    if taped is None:
        return False
    if loaded.dtype == taped.dtype:
        return torch.equal(loaded, taped)
    return share(loaded.flatten(), taped.flatten()) <= ROUNDED


def run_checklist(run: Path, overrides: Sequence[str], console: Console) -> list[CheckItem]:
    """Every item, on the device and with the keys that `overrides` ask for. Ranks other than the first get none."""
    source = RunFolder(run)
    tape = TapeFolder(source.tape)
    tape.manifest()
    loop = Checklist(tape)
    # The first step is what is looked at, so the recipe that trained it.
    with reserved_name(source, "checklist") as name:
        folder = run_replay(loop, replayed_recipe(source, name, overrides, parts_of(source)[0].recipe), console)
    if folder is None:
        return []
    items = judged(loop, Side.open(tape), Side.open(TapeFolder(RunFolder(folder).tape)))
    atomic_write_text(folder / RESULT, json.dumps(as_json(items), indent=2) + "\n")
    return items


def judged(loop: Checklist, a: Side, b: Side) -> list[CheckItem]:
    """What the replayed step says against the recorded one, around what was tried in its run."""
    recorded, (own, again) = a.tape.read_step(1), loop.own
    tolerance = tolerance_of(*(side.recipe["model"]["dtype"] for side in (a, b)))
    if loop.generated and a.drawn_by != b.drawn_by:
        why = f"the recorded responses were drawn by {a.drawn_by}'s noise, and {b.drawn_by}'s would be others"
        heard = [CheckItem("first tokens", None, "", why), rewards(recorded, own)]
    elif loop.generated:
        heard = [first_tokens(a, recorded, loop.generated, tolerance), rewards(recorded, own)]
    else:
        heard = [CheckItem(name, None, "", OFFLINE) for name in ("first tokens", "rewards")]
    return [
        starting_weights(a.manifest, b.manifest, loop.unlike),
        *heard,
        first_update(recorded, own, tolerance),
        *loop.tried,
        repeatability(own, again),
    ]


def show(items: Sequence[CheckItem], console: Console) -> None:
    failed = sum(item.passed is False for item in items)
    passed = sum(item.passed is True for item in items)
    rows = [(f"{MARKS[item.passed]:6} {item.name}", _told(item)) for item in items]
    console.banner(f"checklist: {passed} passed, {failed} failed, {len(items) - passed - failed} not judged", rows)


def _told(item: CheckItem) -> str:
    if item.passed:
        return item.measured
    return f"{item.measured}\n-> {item.means}" if item.measured else item.means


def as_json(items: Sequence[CheckItem]) -> dict[str, Any]:
    return {"passed": all(item.passed is not False for item in items), "items": [asdict(item) for item in items]}
