"""A comparison on the console: the verdict, a line a metric, speed, and what differs besides. Fits 80 columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.parity.compare.comparison import Comparison, Difference, Metric, Power, Throughput, Verdict
from lockstep.parity.compare.power import DEEP
from lockstep.parity.compare.report import strict
from lockstep.run.console import Console

EXIT_CODES: dict[Verdict, int] = {
    "in step": 0,
    "within noise": 0,
    "out of step": 1,
    "cannot tell": 2,
    "not comparable": 2,
}
NAME = 19
HEADS = (
    ("mean %", 8),
    ("scaled%", 8),
    ("rel. %", 8),
    ("worst", 8),
    ("at", 6),
    ("drift", 9),
    ("corr", 7),
    ("parted", 7),
)
MOST_TOLD = 24
"""Characters of a value that differs; the report has all of them."""


def show(comparison: Comparison, console: Console) -> None:
    console.banner(f"A {comparison.a} ({comparison.kinds[0]})", [])
    console.banner(f"B {comparison.b} ({comparison.kinds[1]})", [])
    console.say("")
    for line in table_lines(comparison.metrics):
        console.say(line)
    console.say("")
    console.banner("speed, B over A", _speed(comparison.throughput))
    for warning in comparison.throughput.warnings:
        console.warn(warning)
    _show_differences(comparison, console)
    console.say("")
    console.banner(f"verdict: {comparison.verdict}", [("because", comparison.reason)])


def table_lines(metrics: Sequence[Metric]) -> list[str]:
    """The judged metrics with what decided, then the other losses and rewards that move; the rest is counted."""
    shown = [metric for metric in metrics if metric.verdict is not None or (metric.kind != "other" and _moves(metric))]
    lines = ["metric".ljust(NAME) + "".join(head.rjust(width) for head, width in HEADS)] if shown else []
    for metric in shown:
        lines += _metric_lines(metric)
    if rest := len(metrics) - len(shown):
        lines.append(f"{rest} more metrics that both have are in the report and in --json")
    return lines


def _moves(metric: Metric) -> bool:
    """Not one and the same number at every step of both sides."""
    return metric.figures.worst != 0 or len(set(metric.a)) > 1


def _metric_lines(metric: Metric) -> list[str]:
    figures = metric.figures
    values: list[float | int | None] = [
        figures.mean_error_percent,
        figures.scaled_error_percent,
        figures.relative_error_percent,
        figures.worst,
        figures.worst_step,
        figures.drift,
        figures.correlation,
        figures.parted_at,
    ]
    cells = "".join(_cell(value, width) for value, (_, width) in zip(values, HEADS, strict=True))
    lines = [metric.name.ljust(NAME) + cells] if len(metric.name) <= NAME else [metric.name, " " * NAME + cells]
    if metric.verdict is not None:
        steps = f"{figures.steps:,} step{'s' if figures.steps != 1 else ''} ({figures.first} to {figures.last})"
        lines.append(f"  {metric.verdict} over {steps}: {metric.decided_by}")
        lines.append(f"  bar: {metric.bar_result}; statistical test: {metric.test_result}")
        if metric.matching:
            lines.append(f"  {metric.matching}")
    if metric.power is not None:
        lines.append(f"  {_power(metric.power)}")
        if metric.power.noise_sd > 0:
            lines.append(f"  drift in truth, with 95 %: within {metric.power.drift_within:.2g}")
    if metric.noise is not None:
        lines.append(f"  mean error between repeats {metric.noise.mean_error_percent:.3g} %")
    return lines


def _power(power: Power) -> str:
    if power.noise_sd == 0:
        return "no noise: any difference would be seen"
    steps = f"{power.collapse_steps:,} steps" if power.collapse_steps > 1 else "step"
    late = f"a collapse of {power.collapse:.2g} in the last {steps}"
    latest = f", one of {DEEP} noise sd as late as step {power.latest_step}" if power.latest_step is not None else ""
    return f"seen with 95 %: a drift of {power.drift:.2g}, {late}{latest}"


def _cell(value: float | int | None, width: int) -> str:
    """Three digits, fewer where the power of ten leaves no room for them."""
    if value is None:
        return "-".rjust(width)
    texts = [str(value)] if isinstance(value, int) else [f"{value:{form}}" for form in (".3g", ".2g", ".1e", ".0e")]
    return next((text for text in texts if len(text) < width), texts[-1]).rjust(width)


def _speed(throughput: Throughput) -> list[tuple[str, str]]:
    rows = []
    if throughput.ratio is not None:
        rates = f"{throughput.b:,.0f} over {throughput.a:,.0f} tokens/s a device"
        rows.append(("first 4 steps", f"{throughput.ratio:.3f} ({rates})"))
    if throughput.matched_ratio is not None:
        rows.append(("equal lengths", f"{throughput.matched_ratio:.3f} ({throughput.matched_steps:,} steps)"))
    rows += [(phase.name, f"{phase.ratio:.3f} ({phase.b:,.0f} over {phase.a:,.0f})") for phase in throughput.phases]
    return rows or [("not known", "the logs do not tell")]


def _show_differences(comparison: Comparison, console: Console) -> None:
    told = [each for each in comparison.differences if each.weight != "harmless"]
    harmless = len(comparison.differences) - len(told)
    if told or harmless:
        console.say("")
        rest = [("harmless", f"{harmless} more, which must not change the curves")] if harmless else []
        console.banner("what differs besides", [*(_difference(each) for each in told), *rest])
    if not comparison.setup_known:
        console.say("")
        console.banner("what differs besides", [("unknown", "only run folders tell their set-up")])
    for remark in comparison.remarks:
        console.say(f"remark: {remark}")
    for sentence in comparison.unknown:
        console.say(f"not known: {sentence}")


def _difference(each: Difference) -> tuple[str, str]:
    return each.key, f"{_brief(each.a)} against {_brief(each.b)} ({each.weight}): {each.effect}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_TOLD else f"{text[: MOST_TOLD - 3]}..."


def as_strict_json(comparison: Comparison) -> str:
    """One line. JSON has neither NaN nor infinity: null stands for both."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    values = strict(replace(comparison, metrics=bare).as_json())
    # The curves as they are, being plain and long: `compare` left nothing in them that JSON cannot say.
    for metric, written in zip(comparison.metrics, values["metrics"], strict=True):
        written |= {"steps": metric.steps, "a": metric.a, "b": metric.b, "repeats": metric.repeats}
    return json.dumps(values, allow_nan=False, ensure_ascii=False)
