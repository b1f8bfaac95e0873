"""`lockstep replay --checklist` runs the usual manual checks on the first recorded step when two devices disagree."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.model.resolve import image_folder
from lockstep.model.weights import trained_weights
from lockstep.parity.checklist.checklist_trials import OFFLINE, Bench, CheckItem, engine_items, padding
from lockstep.parity.replay.replay_checks import Check, finite, share, worst_difference
from lockstep.parity.replay.replay_loop import Replay, parts_of, replayed_recipe, reserved_name, run_replay
from lockstep.parity.replay.stage_checks import SCORE, TapeSide, by_prompt_and_sample, check_responses
from lockstep.parity.replay.tolerances import Tolerance, tolerance_of
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from lockstep.tape.tape_format import StepRecord, TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_recorder import Observer, weights_of
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.models import Models
from lockstep.train.training import Training
from lockstep.types import Rollout

__all__ = ["CheckItem", "as_json", "run_checklist", "show"]

RESULT = "checklist.json"
# Largest allowed relative difference between the recorded and the loaded weights if their dtypes differ.
ROUNDED = 5e-3
# Only this many tokens at the start of each response are compared with the recorded response.
FIRST_TOKENS = 20
MARKS = {True: "passed", False: "FAILED", None: "-"}


class Checklist(Replay):
    """Runs the first step twice from the recorded weights, to see whether its results repeat. Then runs the trials.

    Both runs of the step train on the recorded responses. Only the first of the two runs also generates responses, to
    test the engine.
    """

    def __init__(self, tape: TapeFolder):
        super().__init__(tape, "forced", only=(1,))
        self.bench: Bench | None = None
        self.replayed: list[StepRecord] = []
        self.generated: list[Rollout] = []
        self.unlike: list[str] = []
        self.tried: list[CheckItem] = []

    def steps(self) -> Iterable[int]:
        if 1 not in self.tape.steps():
            raise Refusal.at(
                str(self.tape.path),
                "the recording (tape) does not contain the first step",
                "record the run again: tape=true run.name=NEW",
                code="missing-on-tape",
            )
        return [0, 0]

    def restore(self, training: Training, step: int) -> None:
        self.mode = "forced" if self.bench is None else "chained"
        self.bench = self.bench or self._set_up(training)
        training.carried.update(self.bench.record.info["carried"])
        self.bench.restore()

    def _set_up(self, training: Training) -> Bench:
        start, self.unlike = self._start(training.models)
        files = TapeImages(self.tape.path, image_folder(training.run.recipe.model))
        rollouts = rollouts_of(self.tape.read_table(self.tape.rollouts_file(1)), files) if _online(training) else []
        tolerance = tolerance_of(self.tape.manifest()["recipe"]["model"]["dtype"], training.run.recipe.model.dtype)
        return Bench(training, self.tape.read_step(1), rollouts, start, tolerance, files)

    def _start(self, models: Models) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Returns the recorded weights before the step, and the names of the weights in the model folder that differ
        from them."""
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
            replay_tape = TapeFolder(run.folder.tape)
            if not self.replayed and _online(training):
                self.generated = _recorded(replay_tape)
            self.replayed.append(replay_tape.read_step(1))
        if self.mode == "forced":
            run.rewind(step)  # the step runs again
            return
        assert self.bench is not None
        for learner in self.bench.models.learners:
            learner.observer = Observer()  # the tape is complete
        with run.console.task("Trying engine and trainer", None):
            self.tried = [*engine_items(self.bench), padding(self.bench)]


def _recorded(tape: TapeFolder) -> list[Rollout]:
    return rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path))


def _online(training: Training) -> bool:
    return training.run.recipe.method in ONLINE


def _alike(loaded: torch.Tensor, taped: torch.Tensor | None) -> bool:
    if taped is None:
        return False
    if loaded.dtype == taped.dtype:
        return torch.equal(loaded, taped)
    return share(loaded.flatten(), taped.flatten()) <= ROUNDED


def run_checklist(run: Path, overrides: Sequence[str], console: Console) -> list[CheckItem]:
    """Runs all checklist items. `overrides` are changed recipe keys. Returns their results on rank 0, and an empty list
    on other ranks."""
    source = RunFolder(run)
    tape = TapeFolder(source.tape)
    tape.manifest()
    loop = Checklist(tape)
    # A resumed run may have several recipes; the first one trained the first step.
    with reserved_name(source, "checklist") as name:
        folder = run_replay(loop, replayed_recipe(source, name, overrides, parts_of(source)[0].recipe), console)
    if folder is None:
        return []
    items = judged(loop, TapeSide.open(tape), TapeSide.open(TapeFolder(RunFolder(folder).tape)))
    atomic_write_text(folder / RESULT, json.dumps(as_json(items), indent=2) + "\n")
    return items


def judged(loop: Checklist, a: TapeSide, b: TapeSide) -> list[CheckItem]:
    """Returns all checklist items: the comparisons of the replayed step with the recorded one, and the trials."""
    recorded, (replayed, again) = a.tape.read_step(1), loop.replayed
    tolerance = tolerance_of(*(side.recipe["model"]["dtype"] for side in (a, b)))
    if loop.generated and a.drawn_by != b.drawn_by:
        why = f"{a.drawn_by} sampled the recorded responses, and {b.drawn_by} has different sampling noise"
        responses = [CheckItem("first tokens", None, "", why), rewards(recorded, replayed)]
    elif loop.generated:
        responses = [first_tokens(a, recorded, loop.generated, tolerance), rewards(recorded, replayed)]
    else:
        responses = [CheckItem(name, None, "", OFFLINE) for name in ("first tokens", "rewards")]
    return [
        starting_weights(a.manifest, b.manifest, loop.unlike),
        *responses,
        first_update(recorded, replayed, tolerance),
        *loop.tried,
        repeatability(replayed, again),
    ]


def show(items: Sequence[CheckItem], console: Console) -> None:
    failed = sum(item.passed is False for item in items)
    passed = sum(item.passed is True for item in items)
    rows = [(f"{MARKS[item.passed]:6} {item.name}", _text(item)) for item in items]
    console.banner(f"checklist: {passed} passed, {failed} failed, {len(items) - passed - failed} without result", rows)


def _text(item: CheckItem) -> str:
    if item.passed:
        return item.measured
    return f"{item.measured}\n-> {item.means}" if item.measured else item.means


def as_json(items: Sequence[CheckItem]) -> dict[str, Any]:
    return {"passed": all(item.passed is not False for item in items), "items": [asdict(item) for item in items]}


# -- items that compare the replayed first step with the recorded one


def starting_weights(a: dict[str, Any], b: dict[str, Any], unlike: Sequence[str]) -> CheckItem:
    """Compares the model folder of this device with that of the recorded run."""
    name, ours, theirs = "starting weights", a["model"], b["model"]
    parts = [part for part in ours if ours[part] is not None and theirs.get(part) is not None]
    other = [part for part in parts if ours[part] != theirs[part]]
    if other or unlike:
        found = [f"other {part}" for part in other]
        found += [f"{len(unlike)} weights differ, the first is {unlike[0]}"] if unlike else []
        means = (
            "recorded run and replay start from different models: copy the model folder, and run the checklist again"
        )
        return CheckItem(name, False, "; ".join(found), means)
    if "weights" not in parts:
        return CheckItem(name, None, "", "the model of one run is not a local folder, so its files cannot be compared")
    return CheckItem(name, True, f"the same {', '.join(parts)}", "recorded run and replay start from the same model")


def first_tokens(a: TapeSide, recorded: StepRecord, generated: Sequence[Rollout], tolerance: Tolerance) -> CheckItem:
    rollouts = _recorded(a.tape)
    ours, theirs = _beginnings(rollouts), _beginnings(generated)
    check = check_responses(a, recorded, ours, theirs, tolerance)
    replayed = by_prompt_and_sample(theirs)
    same = sum(
        which in replayed and replayed[which].ids == rollout.ids
        for which, rollout in by_prompt_and_sample(ours).items()
    )
    measured = f"{same} of {len(ours)} responses begin with the recorded {FIRST_TOKENS} tokens; "
    measured += f"log-probabilities differ by {check.error:.2g} (at most {check.allowed:.2g} is allowed)"
    if check.passed:
        measured += "" if same == len(ours) else "; where responses diverge, two tokens tied within the tolerance"
        return CheckItem("first tokens", True, measured, "the engines generate the same tokens from the same weights")
    means = (
        f"the engine generates other tokens from the same weights, and no tie explains it ({check.where}): see the "
        "item `prefill and decode`; if it passes, check sampling (seed, temperature, top-p, end tokens)"
    )
    return CheckItem("first tokens", False, measured, means)


def _beginnings(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [
        replace(
            r,
            ids=r.ids[:FIRST_TOKENS],
            logprobs=r.logprobs[:FIRST_TOKENS],
            loss_mask=r.loss_mask[:FIRST_TOKENS],
            rows=(),
        )
        for r in rollouts
    ]


def rewards(recorded: StepRecord, replayed: StepRecord) -> CheckItem:
    x, y = recorded.tensors["step/scores"], replayed.tensors["step/scores"]
    off = torch.nan_to_num((x.double() - y.double()).abs(), nan=math.inf) > SCORE
    measured = f"{int((~off).sum())} of {len(x)} recorded responses have their recorded score"
    if not bool(off.any()):
        return CheckItem("rewards", True, measured, "rewards give the recorded scores")
    means = (
        f"the same text gets another score ({worst_difference(x, y, 'response')}): another version of the reward or "
        "of its imports, another reward model, weight or overlong penalty"
    )
    return CheckItem("rewards", False, measured, means)


def first_update(recorded: StepRecord, replayed: StepRecord, tolerance: Tolerance) -> CheckItem:
    """Compares the loss and gradient norm of the first update of each trained model (policy, critic)."""
    checks = [check for pair in _firsts(recorded, replayed) for check in _update_checks(recorded, *pair, tolerance)]
    measured = "; ".join(
        f"{check.what} {check.where} (differs by {check.error:.2g}, at most {check.allowed:.2g} is allowed)"
        for check in checks
    )
    failed = [check.what for check in checks if not check.passed]
    if not any(update.get("grad_norm") for pair in _firsts(recorded, replayed) for update in pair):
        return CheckItem(
            "first loss and gradient", None, measured, "proves nothing: the gradient of the first step is 0"
        )
    if not failed:
        return CheckItem("first loss and gradient", True, measured, "the first update equals the recorded one")
    means = "the same rows and weights give another " + " and ".join(failed) + ": "
    if all("gradient" in what for what in failed):
        means += "check the backward pass and the sum over micro-batches and ranks"
    else:
        means += "`lockstep replay` names the stage and the module"
    return CheckItem("first loss and gradient", False, measured, means)


def _firsts(recorded: StepRecord, replayed: StepRecord) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    one, other = ({u["learner"]: u for u in reversed(record.info["updates"])} for record in (recorded, replayed))
    return [(one[learner], other[learner]) for learner in sorted(one.keys() & other.keys(), reverse=True)]


def _update_checks(recorded: StepRecord, a: dict[str, Any], b: dict[str, Any], tolerance: Tolerance) -> list[Check]:
    learner = a["learner"]
    # With centred advantages a loss may be 0 although its gradients are not. So the error is relative to the loss or to
    # the sum of absolute token gradients, whichever is larger.
    pulls = float(recorded.tensors[f"{learner}/0/pulls"].double().abs().sum())
    figures = {"loss": (max(abs(a["loss"]), pulls, 1e-12), tolerance.loss + tolerance.logprob)}
    if "grad_norm" in a and "grad_norm" in b:
        figures["grad_norm"] = max(a["grad_norm"], 1e-7), tolerance.gradient
    checks = []
    for key, (size, allowed) in figures.items():
        error = abs(a[key] - b[key]) / size
        what = f"{learner} {'loss' if key == 'loss' else 'gradient norm'}"
        values = f"{a[key]:.6g} against {b[key]:.6g}"
        checks.append(Check("loss", 1, what, finite(error), allowed, values))
    return checks


def repeatability(replayed: StepRecord, again: StepRecord) -> CheckItem:
    """Reports whether the step gives bitwise the same results twice. This item never fails, because devices need not be
    deterministic."""
    names = sorted(replayed.tensors.keys() | again.tensors.keys())
    differ = [
        n
        for n in names
        if n not in replayed.tensors or n not in again.tensors or not _same(replayed.tensors[n], again.tensors[n])
    ]
    if not differ and replayed.info["updates"] == again.info["updates"]:
        return CheckItem(
            "repeatability", True, f"{len(names)} tensors of the step are bitwise equal", "the step repeats exactly"
        )
    measured = f"{len(differ)} of {len(names)} tensors differ when the step runs twice"
    means = "for information: some kernels are not deterministic; run.deterministic=true selects deterministic ones"
    return CheckItem("repeatability", None, measured, means)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
