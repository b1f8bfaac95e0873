"""The result of a replay: all checks, the first divergence, and its output as JSON and on the console (80 columns)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.parity.compare.compare_report import strict
from lockstep.parity.replay.diverged_module import DivergedModule, first_diverged
from lockstep.parity.replay.locate_operator import Located
from lockstep.parity.replay.replay_checks import STAGES, Check, first_cause, verdicts, worst_of
from lockstep.parity.replay.replay_loop import Mode
from lockstep.parity.replay.stage_checks import TapeSide, check_step
from lockstep.parity.replay.tolerances import Tolerance, inherited, tolerance_of
from lockstep.run.console import Console
from lockstep.tape.module_trace import BACKWARD, FORWARD
from lockstep.tape.tape_format import TapeFolder

RESULT = "replay.json"
MODE_TITLES = {
    "forced": "each step from the recorded weights",
    "chained": "weights of the replay, rows and responses of the recording",
    "free": "weights and responses of the replay",
}


@dataclass(frozen=True)
class Replayed:
    """The result of a replay. `cause` is the failed check that comes first in `CAUSE_ORDER`."""

    mode: Mode
    folder: Path
    steps: list[int]
    checks: list[Check]
    cause: Check | None
    module: DivergedModule | None
    step: int | None = None
    """The first step that diverges."""
    operator: Located | None = None
    remarks: tuple[str, ...] = ()

    @property
    def in_step(self) -> bool:
        return self.cause is None and self.module is None

    @property
    def stage(self) -> str | None:
        """The stage that is reported as the cause of the divergence. A diverged module belongs to the stage log-probs
        or gradient."""
        if self.module is not None:
            return "log-probs" if self.module.phase == FORWARD else "gradient"
        return None if self.cause is None else self.cause.stage


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
    """Compares every step that both recordings contain. A step that does not start from recorded weights inherits the
    differences of earlier steps, so its tolerances are larger.

    `trained` is the recipe with which A's steps were trained, if it differs from the last recipe of the run. At the
    step `first`, both runs start from the same weights. Stages in `skip` are not compared. Modules are compared only in
    the passes (forward, backward) in `phases`.
    """
    ours, theirs = TapeSide.open(a), TapeSide.open(b)
    if trained is not None:
        ours = replace(ours, manifest={**ours.manifest, "recipe": trained})
    tolerance = tolerance or tolerance_of(*(side.recipe["model"]["dtype"] for side in (ours, theirs)))
    steps = [step for step in b.steps() if step in set(a.steps())]
    result = Replayed(mode, folder, steps, [], None, None, remarks=tuple(_other_noise(ours, theirs, mode)))
    for step in steps:
        fresh = mode == "forced" or step == first
        allowed = tolerance if fresh else inherited(tolerance, step)
        generated = mode == "forced" or (mode == "free" and fresh)
        found = check_step(ours, theirs, step, allowed, generated=generated)
        found = [check for check in found if check.stage not in skip]
        if mode == "free" and not fresh and not found[0].passed:
            remark = (
                f"From step {step} on the responses differ: rounding changed the weights, and different weights "
                "sampled a different token. "
                f"Compare the curves with `lockstep compare`."
            )
            return replace(result, remarks=(*result.remarks, remark))
        result.checks.extend(found)
        if result.in_step:
            module = first_diverged(a.read_step(step), b.read_step(step), tolerance, phases) if fresh else None
            cause = first_cause(found)
            if cause is not None and module is not None and not _explains(module, cause):
                module = None
            if cause is not None or module is not None:
                result = replace(result, cause=cause, module=module, step=step)
    return result


def _other_noise(a: TapeSide, b: TapeSide, mode: Mode) -> Iterator[str]:
    if "rollout" in a.recipe and a.drawn_by != b.drawn_by and mode != "chained":
        yield (
            f"Generation is not checked: {a.drawn_by} sampled the recorded responses, and {b.drawn_by} samples with"
            " other random numbers."
        )


def _explains(module: DivergedModule, cause: Check) -> bool:
    """Returns whether a diverged module explains the failed check. A diverged module can explain only checks of later
    stages, so it cannot explain a wrong loss mask or reward."""
    if module.phase == FORWARD:
        return cause.stage not in ("batch", "reward")
    return cause.stage in ("gradient", "weights")


def as_json(result: Replayed) -> dict[str, Any]:
    """Returns the result as plain values for JSON. NaN and infinity become null."""
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


# -- console


def show(result: Replayed, console: Console, title: str | None = None) -> None:
    """Prints one line per stage, then the first divergence."""
    steps = f"{len(result.steps)} steps ({result.steps[0]} to {result.steps[-1]})" if result.steps else "no step"
    console.banner(
        title or f"replay, {result.mode}: {MODE_TITLES[result.mode]}",
        [("compared" if title else "replayed", steps), ("folder", str(result.folder))],
    )
    console.say("")
    console.say(f"{'stage':<12}{'verdict':<12}{'worst':>10}{'allowed':>10}  at step, of what")
    for stage in STAGES:
        mine = [check for check in result.checks if check.stage == stage]
        if mine:
            console.say(_line(stage, mine))
    console.say("")
    for remark in result.remarks:
        console.say(remark)
    verdict = "verdict" if title is None else "verdict, update by update"
    if result.in_step:
        console.banner(f"{verdict}: in step", [])
    else:
        console.banner(f"{verdict}: out of step", first_divergence(result))


def _line(stage: str, checks: list[Check]) -> str:
    worst = worst_of(checks)
    verdict = "in step" if all(check.passed for check in checks) else "OUT OF STEP"
    what = f"{worst.step}, {worst.what}"
    room = 80 - 12 - 12 - 20 - 2
    short = what if len(what) <= room else what[: room - 3] + "..."
    return f"{stage:<12}{verdict:<12}{worst.error:>10.2g}{worst.allowed:>10.2g}  {short}"


def first_divergence(result: Replayed) -> list[tuple[str, str]]:
    """Returns where the replay diverges: stage, check, module, operator."""
    rows: list[tuple[str, str]] = []
    if result.stage is not None:
        rows += [("stage", result.stage), ("step", str(result.step))]
    if result.cause is not None:
        cause = result.cause
        rows.append(("check", cause.what))
        rows.append(("error", f"{cause.error:.3g}, allowed {cause.allowed:.3g}"))
        if cause.where:
            rows.append(("where", cause.where))
    if result.module is not None:
        rows += _module_rows(result.module)
    if result.operator is not None:
        rows += _operator_rows(result.operator)
    return rows


def _module_rows(module: DivergedModule) -> Iterator[tuple[str, str]]:
    yield "module", f"{module.module} ({module.kind or 'module'}), {module.phase}"
    if module.rank:
        yield "rank", str(module.rank)
    yield "growth", f"from {module.error_in:.2g} at its input to {module.error_out:.2g} at its output"
    if module.systematic:
        yield "systematic", module.systematic
    after, before = module.between
    if after or before:
        yield "between", f"{after or 'its start'} and {before or 'its end'}: outside its children"
    if module.parameter:
        yield "parameter", module.parameter


def _operator_rows(operator: Located) -> Iterator[tuple[str, str]]:
    yield "wrong side", operator.side
    if operator.judge:
        yield "evidence", operator.judge
    if operator.operator:
        yield "operator", f"{operator.operator}: {operator.why}"
        inputs = zip(operator.dtypes, operator.shapes, strict=True)
        yield "inputs", ", ".join(f"{dtype}{shape}" for dtype, shape in inputs) or "none"
    else:
        yield "operator", operator.why
    if operator.values:
        yield "values", f"{operator.values[0]:.9g} found, {operator.values[1]:.9g} wanted"
    if operator.script:
        yield "reproduce", f"python {operator.script}"
