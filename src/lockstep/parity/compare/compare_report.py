"""Outputs the result of `lockstep compare` as console text, strict JSON and an offline HTML page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.page import resource, script_of, style_of
from lockstep.parity.compare.comparison import Comparison, Difference, Metric, Power, Throughput, Verdict
from lockstep.parity.compare.curve_tests import DEEP
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
    ("since", 7),
)
MAX_VALUE = 24
"""The console shows at most this many characters of a differing set-up value. The HTML report shows all characters."""

# A page with at most this many curve points (a few MB) contains exact values. A page with more points contains rounded
# values.
EXACT_POINTS = 200_000
ROUNDED_DIGITS = 7


# Console -------------------------------------------------------------------------------------------------------------


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
    """Returns table lines for the metrics with a verdict, then for other losses and rewards that vary. The last line
    gives the number of metrics that are not shown."""
    shown = [metric for metric in metrics if metric.verdict is not None or (metric.kind != "other" and _moves(metric))]
    lines = ["metric".ljust(NAME) + "".join(head.rjust(width) for head, width in HEADS)] if shown else []
    for metric in shown:
        lines += _metric_lines(metric)
    if rest := len(metrics) - len(shown):
        lines.append(f"{rest} more metrics that both logs contain are in the HTML report and in --json")
    return lines


def _moves(metric: Metric) -> bool:
    """Returns False if the metric has one constant value in both runs."""
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
            lines.append(f"  the true drift is within {metric.power.drift_within:.2g}, with 95 % confidence")
    if metric.noise is not None:
        lines.append(f"  mean error between repeats {metric.noise.mean_error_percent:.3g} %")
    return lines


def _power(power: Power) -> str:
    if power.noise_sd == 0:
        curves = "repeats" if power.repeats else "two curves"
        return f"the {curves} show no noise, so the test would find any difference"
    steps = f"{power.collapse_steps:,} steps" if power.collapse_steps > 1 else "step"
    late = f"a collapse of {power.collapse:.2g} in the last {steps}"
    latest = f", a drop of {DEEP} noise sd as late as step {power.latest_step}" if power.latest_step is not None else ""
    return f"found with 95 %: a drift of {power.drift:.2g}, {late}{latest}"


def _cell(value: float | int | None, width: int) -> str:
    """Formats a table cell with three significant digits, or with fewer if the column is too narrow."""
    if value is None:
        return "-".rjust(width)
    texts = [str(value)] if isinstance(value, int) else [f"{value:{form}}" for form in (".3g", ".2g", ".1e", ".0e")]
    return next((text for text in texts if len(text) < width), texts[-1]).rjust(width)


def _speed(throughput: Throughput) -> list[tuple[str, str]]:
    rows = []
    if throughput.ratio is not None:
        rates = f"B {throughput.b:,.0f}, A {throughput.a:,.0f} tokens/s per device"
        rows.append(("first 4 steps", f"{throughput.ratio:.3f} ({rates})"))
    if throughput.matched_ratio is not None:
        rows.append(("equal lengths", f"{throughput.matched_ratio:.3f} ({throughput.matched_steps:,} steps)"))
    rows += [(phase.name, f"{phase.ratio:.3f} (B {phase.b:,.0f}, A {phase.a:,.0f})") for phase in throughput.phases]
    return rows or [("unknown", "the logs contain no throughput")]


def _show_differences(comparison: Comparison, console: Console) -> None:
    listed = [each for each in comparison.differences if each.weight != "harmless"]
    harmless = len(comparison.differences) - len(listed)
    if listed or harmless:
        console.say("")
        rest = [("harmless", f"{harmless} more differences, which do not change the curves")] if harmless else []
        console.banner("set-up differences", [*(_difference(each) for each in listed), *rest])
    if not comparison.setup_known:
        console.say("")
        console.banner("set-up differences", [("unknown", "only lockstep's run folders contain the set-up of a run")])
    if comparison.known:
        console.say("")
        console.banner(f"known differences from {comparison.known[0].peer}", [])
        for each in comparison.known:
            console.say(f"  {each.key}: {each.how} ({each.concerns})")
    for remark in comparison.remarks:
        console.say(f"remark: {remark}")
    for sentence in comparison.unknown:
        console.say(f"unknown: {sentence}")


def _difference(each: Difference) -> tuple[str, str]:
    return each.key, f"{_brief(each.a)} against {_brief(each.b)} ({each.weight}): {each.effect}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


# JSON ----------------------------------------------------------------------------------------------------------------


def as_strict_json(comparison: Comparison) -> str:
    """Returns the comparison as one line of strict JSON, which has null instead of NaN and infinity."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    values = strict(replace(comparison, metrics=bare).as_json())
    # The curves already have None instead of NaN. Converting the curves again would be slow, because they are long.
    for metric, written in zip(comparison.metrics, values["metrics"], strict=True):
        written |= {"steps": metric.steps, "a": metric.a, "b": metric.b, "repeats": metric.repeats}
    return json.dumps(values, allow_nan=False, ensure_ascii=False)


def strict(value: Any) -> Any:
    """Returns a copy of the value for strict JSON, in which NaN and infinity are None and objects of other types are
    text."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def curve(values: list[float | None], digits: int | None) -> list[float | None]:
    """Replaces NaN and infinity with None and rounds other points to `digits` significant digits (None: exact)."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if digits is None:
        return finite
    return [None if value is None else float(f"{value:.{digits}g}") for value in finite]


# HTML page -----------------------------------------------------------------------------------------------------------


def write_report(comparison: Comparison, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparison), encoding="utf-8")


def page(comparison: Comparison) -> str:
    parts = {"style": style_of("compare"), "script": script_of("compare"), "data": _inline_json(page_data(comparison))}
    # All placeholders of the HTML template are replaced at once, because inserted text may look like a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], resource("compare.html"))


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Returns the data of the HTML page, which is `as_json()` as strict JSON with each distinct list of steps stored
    once."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    data: dict[str, Any] = strict(replace(comparison, metrics=bare).as_json())
    points = sum(_points(metric) for metric in comparison.metrics)
    digits = None if points <= EXACT_POINTS else ROUNDED_DIGITS
    shared: dict[tuple[int, ...], int] = {}
    for metric, values in zip(comparison.metrics, data["metrics"], strict=True):
        values["steps"] = shared.setdefault(tuple(metric.steps), len(shared))
        values["a"], values["b"] = curve(metric.a, digits), curve(metric.b, digits)
        values["repeats"] = [curve(repeat, digits) for repeat in metric.repeats]
    return {**data, "steps": [list(steps) for steps in shared], "rounded_to": digits}


def _points(metric: Metric) -> int:
    return len(metric.steps) * (2 + len(metric.repeats))


def _inline_json(data: dict[str, Any]) -> str:
    """Returns JSON without `<`, so that `</script>` or `<!--` in a sample cannot end the script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
