"""A replay on the console: a line a stage, then the first place where it left the recorded run. Fits 80 columns."""

from __future__ import annotations

from lockstep.parity.replay.checks import STAGES, Check, worst_of
from lockstep.parity.replay.replay import Replayed
from lockstep.run.console import Console

MODES = {
    "forced": "each step from the recorded weights",
    "chained": "own weights, recorded rows and responses",
    "free": "own weights and responses",
}


def show(result: Replayed, console: Console, title: str | None = None) -> None:
    steps = f"{len(result.steps)} steps ({result.steps[0]} to {result.steps[-1]})" if result.steps else "no step"
    console.banner(
        title or f"replay, {result.mode}: {MODES[result.mode]}",
        [("judged" if title else "replayed", steps), ("folder", str(result.folder))],
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
        return
    console.banner(f"{verdict}: out of step", first_divergence(result))


def _line(stage: str, checks: list[Check]) -> str:
    worst = worst_of(checks)
    verdict = "in step" if all(check.passed for check in checks) else "OUT OF STEP"
    what = f"{worst.step}, {worst.what}"
    room = 80 - 12 - 12 - 20 - 2
    short = what if len(what) <= room else what[: room - 3] + "..."
    return f"{stage:<12}{verdict:<12}{worst.error:>10.2g}{worst.allowed:>10.2g}  {short}"


def first_divergence(result: Replayed) -> list[tuple[str, str]]:
    """Where the replay parts, from the coarse to the fine."""
    rows: list[tuple[str, str]] = []
    if result.stage is not None:
        rows += [("stage", result.stage), ("step", str(result.step))]
    if result.cause is not None:
        cause = result.cause
        rows.append(("check", cause.what))
        rows.append(("error", f"{cause.error:.3g}, allowed {cause.allowed:.3g}"))
        if cause.where:
            rows.append(("where", cause.where))
    module = result.module
    if module is not None:
        rows.append(("module", f"{module.module} ({module.kind or 'module'}), {module.phase}"))
        if module.rank:
            rows.append(("rank", str(module.rank)))
        rows.append(("growth", f"from {module.error_in:.2g} at its input to {module.error_out:.2g} at its output"))
        if module.systematic:
            rows.append(("systematic", module.systematic))
        after, before = module.between
        if after or before:
            rows.append(("between", f"{after or 'its beginning'} and {before or 'its end'}: in its own computation"))
        if module.parameter:
            rows.append(("parameter", module.parameter))
    operator = result.operator
    if operator is not None:
        rows.append(("who is off", operator.side))
        if operator.judge:
            rows.append(("judged by", operator.judge))
        if operator.operator:
            rows.append(("operator", f"{operator.operator}: {operator.why}"))
            rows.append(("inputs", _inputs(operator.shapes, operator.dtypes)))
        else:
            rows.append(("operator", operator.why))
        if operator.values:
            rows.append(("values", f"{operator.values[0]:.9g} found, {operator.values[1]:.9g} wanted"))
        if operator.script:
            rows.append(("reproduce", f"python {operator.script}"))
    return rows


def _inputs(shapes: list[list[int]], dtypes: list[str]) -> str:
    return ", ".join(f"{dtype}{shape}" for shape, dtype in zip(shapes, dtypes, strict=True)) or "none"
