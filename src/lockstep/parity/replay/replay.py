"""Replay a tape on another device, dtype, engine or number of processes, and say where it leaves the recorded run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.kernel_trial import judged_later
from lockstep.parallel.world import joined
from lockstep.parity.compare.compare_report import strict
from lockstep.parity.replay.checks import BLAME, STAGES, Check, worst_of
from lockstep.parity.replay.locate import Located
from lockstep.parity.replay.loop import Mode, Replay
from lockstep.parity.replay.modules import Blamed, blame
from lockstep.parity.replay.parts import Part, left_out, shared_out
from lockstep.parity.replay.stages import Side, judge_step
from lockstep.parity.replay.tolerance import Tolerance, tolerance_of
from lockstep.recipe import Recipe, load_recipe
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder
from lockstep.tape.format import TapeFolder
from lockstep.tape.probe import BACKWARD, FORWARD

REPLAYS = "replays"
RESULT = "replay.json"


@dataclass(frozen=True)
class Replayed:
    """What a replay found. `cause` is the check that failed first, in the order in which blame falls."""

    mode: Mode
    folder: Path
    steps: list[int]
    checks: list[Check]
    cause: Check | None
    module: Blamed | None
    step: int | None = None
    """Where it parts first."""
    operator: Located | None = None
    remarks: tuple[str, ...] = ()

    @property
    def in_step(self) -> bool:
        return self.cause is None and self.module is None

    @property
    def stage(self) -> str | None:
        """The stage to blame: a module that is off makes the model's log-probabilities, or its gradients."""
        if self.module is not None:
            return "log-probs" if self.module.phase == FORWARD else "gradient"
        return None if self.cause is None else self.cause.stage


def replay(
    run: Path, mode: Mode, overrides: Sequence[str], console: Console, steps: Sequence[int] = ()
) -> Replayed | None:
    """Run the recorded steps again with some keys changed, then judge. Ranks other than the first get None."""
    source = RunFolder(run)
    tape = TapeFolder(source.tape)
    tape.manifest()
    forced = mode == "forced"
    found = [
        _replay_part(source, part, mode, overrides, console, mine)
        for part, mine in shared_out(source, tape, steps, forced=forced)
    ]
    results = [result for result in found if result is not None]
    if not results:
        return None
    result = _joined(results, left_out(source, tape, forced=forced))
    atomic_write_text(result.folder / RESULT, json.dumps(as_json(result), indent=2) + "\n")
    return result


def _replay_part(
    source: RunFolder,
    part: Part,
    mode: Mode,
    overrides: Sequence[str],
    console: Console,
    steps: Sequence[int],
) -> Replayed | None:
    """Steps that one recipe trained."""
    tape = TapeFolder(source.tape)
    loop = Replay(tape, mode, steps)
    with judged_later() as problems, reserved_name(source, mode) as name:
        folder = run_replay(loop, replayed_recipe(source, name, overrides, part.recipe), console)
    if folder is None:
        return None
    result = judge(tape, TapeFolder(RunFolder(folder).tape), mode, folder, trained=_keys(part.recipe))
    remarks = [f"The check at load: {problem}" for problem in problems]
    if part.last is not None and result.steps:
        named = f"Steps {result.steps[0]} to {result.steps[-1]}"
        remarks.append(f"{named} were trained with {part.recipe.name}, and replayed with it in {folder}.")
    result = replace(result, remarks=(*remarks, *result.remarks))
    if result.module is not None and result.step == loop.parted:
        result = replace(result, operator=loop.located)
    return result


def _joined(results: Sequence[Replayed], remarks: Sequence[str]) -> Replayed:
    """One verdict of all parts: what the first that is out of step says, or else the first."""
    first = next((result for result in results if not result.in_step), results[0])
    return replace(
        first,
        steps=[step for result in results for step in result.steps],
        checks=[check for result in results for check in result.checks],
        remarks=(*(remark for result in results for remark in result.remarks), *remarks),
    )


def _keys(recipe: Path) -> dict[str, Any]:
    keys: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    return keys


def run_replay(replay: Replay, recipe: Recipe, console: Console) -> Path | None:
    """The folder of the run; None for ranks that only took part."""
    replay.run(recipe, console)
    return None if int(os.environ.get("RANK", "0")) else Path(recipe.run.folder) / recipe.run.name


def replayed_recipe(source: RunFolder, name: str, overrides: Sequence[str], recorded: Path) -> Recipe:
    """The recorded recipe with what a replay must have: a folder of its own, a tape, and nothing to keep."""
    settled = [
        f"run.folder={source.path / REPLAYS}",
        f"run.name={name}",
        "run.resume=never",
        "run.export=false",
        "log.track=[]",
        "val.questions=null",
        "data.val=[]",
        "checkpoint.best=null",
        "checkpoint.keep_best=0",
        "run.stop_early=null",
        "tape.record=true",
    ]
    if any(word.startswith("model.dtype=") for word in overrides):
        settled.append("model.master_weights=null")  # its default depends on the dtype
    return load_recipe(str(recorded), [*settled, *overrides], stored=True)


@contextmanager
def reserved_name(source: RunFolder, kind: str) -> Iterator[str]:
    """`kind-1`, or the first number that no replay of the run has: replays that start at the same time get different
    ones. All ranks of one replay get the same."""
    name = _reserve(source, kind) if int(os.environ.get("RANK", "0")) == 0 else ""
    try:
        with joined(Cpu()) as world:
            agreed = world.gather(name)[0]
        yield agreed
    finally:
        if name:
            _reservation(source, name).rmdir()


def _reserve(source: RunFolder, kind: str) -> str:
    """Makes the reservation, which no two processes can. It ends when the replay's own folder is there."""
    for number in count(1):
        name = f"{kind}-{number}"
        folder, mark = source.path / REPLAYS / name, _reservation(source, name)
        try:
            mark.parent.mkdir(exist_ok=True)
            mark.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            remedy = "a replay writes into the run's folder: make it writable, or copy the run"
            raise Refusal.at(str(mark.parent), f"cannot be written to: {error.strerror}", remedy) from error
        if not folder.exists():
            return name
        mark.rmdir()
    raise AssertionError("numbers do not end")


def _reservation(source: RunFolder, name: str) -> Path:
    return source.path / REPLAYS / f".reserved-{name}"


def judge(
    a: TapeFolder,
    b: TapeFolder,
    mode: Mode,
    folder: Path,
    tolerance: Tolerance | None = None,
    *,
    trained: dict[str, Any] | None = None,
    first: int = 1,
    skip: Collection[str] = (),
    phases: Sequence[str] = (FORWARD, BACKWARD),
) -> Replayed:
    """Every step that both have. Steps that do not start from recorded weights inherit what came before them.

    `trained` is the recipe of A's steps, where it is not that with which the run went on at last. `first` is the step
    that both sides start from. Stages in `skip`, and modules outside of `phases`, are not judged.
    """
    ours, theirs = Side.open(a), Side.open(b)
    if trained is not None:
        ours = replace(ours, manifest={**ours.manifest, "recipe": trained})
    tolerance = tolerance or tolerance_of(*(side.recipe["model"]["dtype"] for side in (ours, theirs)))
    steps = [step for step in b.steps() if step in set(a.steps())]
    checks: list[Check] = []
    remarks: list[str] = []
    cause, module, parted = None, None, None
    if "rollout" in ours.recipe and ours.drawn_by != theirs.drawn_by and mode != "chained":
        remarks.append(
            f"Generation is not judged: the recorded responses were drawn by {ours.drawn_by}'s noise, and "
            f"{theirs.drawn_by}'s would be others."
        )
    for step in steps:
        fresh = mode == "forced" or step == first
        found = judge_step(
            ours,
            theirs,
            step,
            tolerance if fresh else inherited(tolerance, step),
            generated=mode == "forced" or (mode == "free" and fresh),
        )
        found = [check for check in found if check.stage not in skip]
        if mode == "free" and not fresh and not found[0].passed:
            remarks.append(
                f"From step {step} on the responses are others: rounding moved the weights and, with them, a token. "
                f"Their curves are compared by `lockstep compare`."
            )
            break
        checks += found
        if cause is None and module is None:
            module = blame(a.read_step(step), b.read_step(step), tolerance, phases) if fresh else None
            cause = first_cause(found)
            if cause is not None and module is not None and not _explains(module, cause):
                module = None
            parted = step if cause is not None or module is not None else None
    return Replayed(mode, folder, steps, checks, cause, module, parted, None, tuple(remarks))


def inherited(tolerance: Tolerance, step: int) -> Tolerance:
    """For a step whose weights have been on their own way: what one calls abnormal, not what rounding explains.

    A log-probability that is off by 0.01 is the figure of the field; losses have the 2 % of the Ascend documents.
    Weights may be off by what every update so far may be.
    """
    return replace(
        tolerance,
        logprob=max(0.01, 2 * tolerance.logprob),
        advantage=max(0.05, tolerance.advantage),
        loss=0.02,
        gradient=max(0.05, tolerance.gradient),
        update=tolerance.update * step,
        systematic=None,
    )


def first_cause(checks: Sequence[Check]) -> Check | None:
    failed = [check for check in checks if not check.passed]
    return min(failed, key=lambda check: (check.update, BLAME.index(check.stage)), default=None)


def _explains(module: Blamed, cause: Check) -> bool:
    """A module can only explain what comes after it: a wrong mask or reward is not a module's doing."""
    if module.phase == FORWARD:
        return cause.stage not in ("batch", "reward")
    return cause.stage in ("gradient", "weights")


def verdicts(checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """By stage: whether all of it is within tolerance, and its worst check."""
    table: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        mine = [check for check in checks if check.stage == stage]
        if mine:
            table[stage] = {**worst_of(mine).as_json(), "passed": all(check.passed for check in mine)}
    return table


def as_json(result: Replayed) -> dict[str, Any]:
    """Plain values; what is not finite is null, as JSON has no word for it."""
    values = {
        "mode": result.mode,
        "in_step": result.in_step,
        "stage": result.stage,
        "step": result.step,
        "steps": result.steps,
        "stages": verdicts(result.checks),
        "cause": result.cause.as_json() if result.cause else None,
        "module": vars(result.module) if result.module else None,
        "operator": vars(result.operator) if result.operator else None,
        "remarks": list(result.remarks),
    }
    return strict(values)
