"""Results of `bench/evidence.py` and their table in docs/support.md. A result is a small JSON file with its curves.

The table does not trust the verdict of a file: mean error and verdict are computed again from the curves, and a file
that states a better verdict is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evidence_rows import PAIRS, ROWS
from lockstep.parity.compare.align_curves import Pair, align
from lockstep.parity.compare.compare_report import strict
from lockstep.parity.compare.comparison import Comparison, Verdict
from lockstep.parity.compare.curve_errors import figures
from lockstep.parity.compare.curve_tests import Examined, examine
from lockstep.parity.compare.logs.log_curves import Series
from lockstep.parity.compare.verdict import bar_of, judge, kind_of

PASSED: tuple[Verdict, ...] = ("in step", "within noise")
# From the worst to the best verdict.
ORDER: tuple[Verdict, ...] = ("not comparable", "out of step", "cannot tell", "within noise", "in step")
BEGIN, END = "<!-- evidence: written by bench/evidence.py table -->", "<!-- end of evidence -->"
NOT_MEASURED = "not measured"


class EvidenceError(Exception):
    """Evidence that is incomplete, damaged or in conflict with itself."""


@dataclass(frozen=True)
class Result:
    """One row and pair. `curves` has the steps and the judged metric of the runs of A and of B, the compared run first.
    `power_percent` is the smallest drift that the test finds with 95 %, in the unit of the error that is judged."""

    row: str
    pair: str
    model: str
    parameters: int
    steps: int
    metric: str
    bar_percent: float
    scaled: bool
    mean_error_percent: float
    scaled_error_percent: float | None
    power_percent: float | None
    verdict: Verdict
    reason: str
    sides: tuple[str, str]
    hardware: tuple[str, str]
    dtypes: tuple[str, str]
    versions: tuple[str, str]
    emulated: bool
    throughput_ratio: float | None
    differences: list[str]
    curves: dict[str, Any]
    replay: dict[str, Any] | None
    settings: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = strict(asdict(self))
        return values

    @property
    def error_percent(self) -> float | None:
        return self.scaled_error_percent if self.scaled else self.mean_error_percent

    def text(self) -> str:
        power = "" if self.power_percent is None else f", finds a drift of {self.power_percent:.2g} % with 95 %"
        return f"{self.verdict}, mean error {self.mean_error_percent:.3g} %{power} ({self.reason})"


@dataclass(frozen=True)
class Recomputed:
    verdict: Verdict
    explanation: str
    mean_error_percent: float
    scaled: bool
    scaled_error_percent: float | None
    bar_percent: float
    power_percent: float | None


def recompute(
    metric: str, steps: Sequence[int], a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> Recomputed:
    """The error and the verdict of two sides from their curves alone."""
    at = np.asarray(steps)
    (first_a, *more_a), (first_b, *more_b) = (
        [Series(at, np.asarray(run, dtype=float)) for run in side] for side in (a, b)
    )
    pair = align(first_a, first_b)
    bar = bar_of(kind_of(metric), pair, None)
    measured = figures(pair, bar.tolerance(pair.a))
    examined = examine(pair, more_a, more_b)
    judgement = judge(bar, pair, measured, examined)
    verdict, why = judgement.verdict, judgement.explanation
    if verdict in PASSED and len(set(pair.a.tolist()) | set(pair.b.tolist())) == 1:
        verdict, why = "cannot tell", f"{metric} is {pair.a[0]:g} at every step: equal constants show nothing"
    return Recomputed(
        verdict=verdict,
        explanation=why,
        mean_error_percent=measured.mean_error_percent,
        scaled=bool(bar.scaled_because),
        scaled_error_percent=measured.scaled_error_percent,
        bar_percent=bar.percent,
        power_percent=_power(examined, pair, bool(bar.scaled_because)),
    )


def _power(examined: Examined, pair: Pair, scaled: bool) -> float | None:
    if examined.power is None:
        return None
    size = float(np.abs(pair.a).mean()) if scaled else 1.0
    return 100 * examined.power.drift / size if size else None


def result_of(
    comparison: Comparison,
    settings: dict[str, Any],
    sides: tuple[str, str],
    repeats_of_a: int,
    envs: Sequence[dict[str, Any]],
    replay: dict[str, Any] | None,
) -> Result:
    judged = [metric for metric in comparison.metrics if metric.verdict is not None]
    if len(judged) != 1:
        raise EvidenceError(f"{comparison.a} and {comparison.b} have {len(judged)} judged metrics: {comparison.reason}")
    (metric,) = judged
    runs = metric.repeats
    curves: dict[str, Any] = {
        "steps": metric.steps,
        "a": [metric.a, *runs[:repeats_of_a]],
        "b": [metric.b, *runs[repeats_of_a:]],
    }
    again = recompute(metric.name, curves["steps"], curves["a"], curves["b"])
    verdict = min(comparison.verdict, again.verdict, key=ORDER.index)
    parameters = [env.get("model", {}).get("parameters") for env in envs]
    if parameters[0] is None or parameters[0] != parameters[1]:
        raise EvidenceError(f"{comparison.a} and {comparison.b} trained models of different size: {parameters}")
    facts = {name: (str(a), str(b)) for name, (a, b) in comparison.facts.items()}
    return Result(
        row=settings["row"],
        pair=settings["pair"],
        model=settings["model"],
        parameters=parameters[0],
        steps=settings["steps"],
        metric=metric.name,
        bar_percent=again.bar_percent,
        scaled=again.scaled,
        mean_error_percent=again.mean_error_percent,
        scaled_error_percent=again.scaled_error_percent,
        power_percent=again.power_percent,
        verdict=verdict,
        reason=comparison.reason if verdict == comparison.verdict else again.explanation,
        sides=sides,
        hardware=facts["hardware"],
        dtypes=facts["dtype"],
        versions=facts["versions"],
        emulated=any(env.get("device", {}).get("emulated") for env in envs),
        throughput_ratio=comparison.throughput.ratio,
        differences=[
            f"{each.key}: {each.a} / {each.b}"[:120] for each in comparison.differences if each.weight != "harmless"
        ],
        curves=curves,
        replay=replay,
        settings={key: value for key, value in settings.items() if key not in ("row", "pair", "model", "steps")},
    )


# Reading -------------------------------------------------------------------------------------------------------------


def read_result(file: Path) -> Result:
    """A result whose curves are complete and agree with what the file says about them."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        known = {**values, **{key: tuple(values[key]) for key in ("sides", "hardware", "dtypes", "versions")}}
        result = Result(**known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{file} is not a result of bench/evidence.py: {error}") from error
    if result.row not in ROWS or result.pair not in PAIRS or result.verdict not in ORDER:
        raise EvidenceError(f"{file}: unknown row {result.row}, pair {result.pair} or verdict {result.verdict}")
    _check_curves(file, result)
    again = recompute(result.metric, result.curves["steps"], result.curves["a"], result.curves["b"])
    if not math.isclose(result.mean_error_percent, again.mean_error_percent, rel_tol=1e-6, abs_tol=1e-12):
        raise EvidenceError(
            f"{file}: it states a mean error of {result.mean_error_percent:g} %, and its curves have "
            f"{again.mean_error_percent:g} %"
        )
    if ORDER.index(result.verdict) > ORDER.index(again.verdict):
        raise EvidenceError(
            f"{file}: it states {result.verdict}, and its curves are {again.verdict}: {again.explanation}"
        )
    return result


def _check_curves(file: Path, result: Result) -> None:
    steps = result.curves.get("steps", [])
    if steps != list(range(1, result.steps + 1)):
        raise EvidenceError(f"{file}: the curves have {len(steps)} of {result.steps} steps")
    for letter, side in zip("ab", result.sides, strict=True):
        runs = result.curves.get(letter, [])
        wanted = PAIRS[result.pair].sides[side].runs
        if len(runs) != wanted:
            raise EvidenceError(f"{file}: side {side} has {len(runs)} of {wanted} runs")
        for number, run in enumerate(runs, start=1):
            if len(run) != len(steps) or not all(
                isinstance(value, (int, float)) and math.isfinite(value) for value in run
            ):
                raise EvidenceError(f"{file}: run {number} of side {side} has steps without a number")


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableColumn:
    title: str
    holds: Callable[[Result], bool]
    least_steps: int


def _near(result: Result, low: float, high: float) -> bool:
    return low <= result.parameters < high


COLUMNS: dict[str, TableColumn] = {
    "cpu-cuda": TableColumn(
        "CPU fp32, H200 bf16 (135M)",
        lambda result: result.pair == "cpu-cuda" and not result.emulated and _near(result, 100e6, 200e6),
        30,
    ),
    "kernels": TableColumn(
        "H200 torch, H200 kernels (0.5B)",
        lambda result: result.pair == "kernels" and not result.emulated and _near(result, 400e6, 700e6),
        30,
    ),
    "npu-tiny": TableColumn(
        "CPU, emulated NPU (tiny)",
        lambda result: result.pair == "npu" and result.emulated and _near(result, 0, 10e6),
        1,
    ),
    "npu-135m": TableColumn(
        "CPU, emulated NPU (135M)",
        lambda result: result.pair == "npu" and result.emulated and _near(result, 100e6, 200e6),
        1,
    ),
    "ascend": TableColumn(
        "CPU fp32, Ascend bf16 (135M)",
        lambda result: result.pair == "npu" and not result.emulated and _near(result, 100e6, 200e6),
        30,
    ),
}


def column_of(file: Path, result: Result) -> str:
    found = [name for name, column in COLUMNS.items() if column.holds(result)]
    if not found:
        raise EvidenceError(
            f"{file}: the table has no column for the pair {result.pair} with {result.parameters:,} parameters"
        )
    least = COLUMNS[found[0]].least_steps
    if result.steps < least:
        raise EvidenceError(f"{file}: {result.steps} steps, and the column {found[0]} needs at least {least}")
    return found[0]


def cell(result: Result | None, note: int | None = None) -> str:
    """Verdict, mean error and, in brackets, the power. What has not passed is bold."""
    if result is None:
        return NOT_MEASURED
    verdict = result.verdict if result.verdict in PASSED else f"**{result.verdict}**"
    error = f"{result.mean_error_percent:.2g} %"
    if result.scaled and result.scaled_error_percent is not None:
        error += f", scaled {result.scaled_error_percent:.2g} %"
    brackets = [] if result.power_percent is None else [f"{result.power_percent:.2g} %"]
    if result.steps < 30:
        brackets.append(f"{result.steps} steps")
    power = f" ({', '.join(brackets)})" if brackets else ""
    return f"{verdict} {error}{power}{f' [{note}]' if note else ''}"


def table_text(results: dict[tuple[str, str], Result]) -> str:
    """The table, a row for each row of the document, and a note for each pair that has not passed."""
    titles = [column.title for column in COLUMNS.values()]
    lines = [f"| algorithm | {' | '.join(titles)} | OpenRLHF: GPU, NPU |", f"|{'---|' * (len(titles) + 2)}"]
    notes: list[str] = []
    for name, row in ROWS.items():
        cells = []
        for column in COLUMNS:
            result = results.get((name, column))
            if result is not None and result.verdict not in PASSED:
                notes.append(
                    f"{row.title}, {COLUMNS[column].title}: {result.verdict}. {result.reason}. {replay_text(result)}"
                )
                cells.append(cell(result, len(notes)))
            else:
                cells.append(cell(result))
        lines.append(f"| {row.title} | {' | '.join(cells)} | {row.published:.2f} % |")
    return "\n".join([*lines, *([""] if notes else []), *(f"{at}. {note}" for at, note in enumerate(notes, start=1))])


def replay_text(result: Result) -> str:
    """What `lockstep replay` found for a pair that has not passed."""
    replay = result.replay
    if replay is None:
        return "Not replayed."
    steps = f"{len(replay['steps'])} steps"
    if replay["in_step"]:
        return f"Replay: no stage of {steps}, each from A's weights, exceeds its tolerance."
    module = (replay["module"] or {}).get("name")
    where = f", module {module}" if module else ""
    return f"Replay: the first difference is in stage {replay['stage']} at step {replay['step']}{where}."


def write_table(files: Sequence[Path], results: Path, page: Path | None) -> int:
    """Adds the given result files to the folder of results, and writes the table of all results of that folder into the
    page. Returns the number of results."""
    checked = [(file, read_result(file)) for file in files]
    names = [f"{result.row}.{column_of(file, result)}.json" for file, result in checked]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EvidenceError(f"two folders have the same cell: {', '.join(sorted(twice))}")
    results.mkdir(parents=True, exist_ok=True)
    for name, (_, result) in zip(names, checked, strict=True):
        (results / name).write_text(json.dumps(result.as_json(), indent=None) + "\n", encoding="utf-8")
    found = stored_results(results)
    text = table_text(found)
    if page is None:
        print(text)
    else:
        page.write_text(with_table(page, text), encoding="utf-8")
    return len(found)


def stored_results(results: Path) -> dict[tuple[str, str], Result]:
    found = {}
    for file in sorted(results.glob("*.json")):
        result = read_result(file)
        column = column_of(file, result)
        if file.name != f"{result.row}.{column}.json":
            raise EvidenceError(f"{file}: its contents belong into {result.row}.{column}.json")
        found[result.row, column] = result
    return found


def with_table(page: Path, table: str) -> str:
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise EvidenceError(f"{page} needs the lines `{BEGIN}` and `{END}` once, in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# The curves ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 60, 34, 30
COLORS = {"a": "#3355bb", "b": "#cc5522"}


def curves_svg(result: Result) -> str:
    """The judged metric of all runs: A blue, B orange, repeats thin."""
    steps = result.curves["steps"]
    values = [value for letter in "ab" for run in result.curves[letter] for value in run]
    low, high = min(values), max(values)
    high = high if high > low else low + 1

    def x(step: float) -> float:
        return LEFT + (step - steps[0]) / max(1, steps[-1] - steps[0]) * (WIDTH - LEFT - 12)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    lines = []
    for letter in "ab":
        for number, run in enumerate(result.curves[letter]):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, run, strict=True))
            width = 0.6 if number else 1.8
            lines.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[letter]}" stroke-width="{width}"/>')
    title = f"{ROWS[result.row].title}, {result.metric}: {result.verdict}, mean error {result.mean_error_percent:.3g} %"
    words = [
        (LEFT, 14, "#222", title),
        *((LEFT + 140 * at, 28, COLORS["ab"[at]], f"{result.sides[at]} ({result.dtypes[at]})") for at in (0, 1)),
        (4, TOP + 8, "#222", f"{high:.4g}"),
        (4, HEIGHT - BOTTOM, "#222", f"{low:.4g}"),
        (LEFT, HEIGHT - 10, "#222", f"step {steps[0]}"),
        (WIDTH - 70, HEIGHT - 10, "#222", f"step {steps[-1]}"),
    ]
    texts = "".join(f'<text x="{a}" y="{b}" fill="{color}">{text}</text>' for a, b, color, text in words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(lines)}{texts}</svg>\n'
    )
