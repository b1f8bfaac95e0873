"""Results of `bench/evidence.py`. A result is a small JSON file with its curves.

The verdict of a file is not trusted: mean error and verdict are computed again from the curves, and a file that states
a better verdict is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evidence_rows import PAIRS, ROWS
from lockstep.parity.compare.align_curves import Pair, align
from lockstep.parity.compare.compare_report import strict
from lockstep.parity.compare.comparison import Comparison, Verdict
from lockstep.parity.compare.curve_errors import figures
from lockstep.parity.compare.curve_tests import Examined, examine
from lockstep.parity.compare.logs.log_curves import Series
from lockstep.parity.compare.verdict import Judgement, bar_of, judge, kind_of

PASSED: tuple[Verdict, ...] = ("in step", "within noise")
# From the worst to the best verdict.
ORDER: tuple[Verdict, ...] = ("not comparable", "out of step", "cannot tell", "within noise", "in step")


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

    def text(self) -> str:
        power = "" if self.power_percent is None else f", finds a drift of {self.power_percent:.2g} % with 95 %"
        return f"{self.verdict}, mean error {self.mean_error_percent:.3g} %{power} ({self.reason})"


# Why a pair that misses its bar has no verdict: the noise hides a drift, or it is unknown.
Unsettled = Literal["noise", "no repeats", "copies"]


@dataclass(frozen=True)
class Recomputed:
    """Error and verdict of two sides. `remedy` says what would settle a verdict that noise leaves open, and `size` is
    the mean of the larger curve, which decides whether the scaled error is judged."""

    verdict: Verdict
    explanation: str
    unsettled: Unsettled | None
    remedy: str
    size: float
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
    unsettled = _unsettled(judgement, examined) if why == judgement.explanation else None
    return Recomputed(
        verdict=verdict,
        explanation=why,
        unsettled=unsettled,
        remedy=_remedy(examined, float(np.mean(bar.tolerance(pair.a)))) if unsettled == "noise" else "",
        size=max(float(np.abs(curve).mean()) for curve in (pair.a, pair.b)),
        mean_error_percent=measured.mean_error_percent,
        scaled=bool(bar.scaled_because),
        scaled_error_percent=measured.scaled_error_percent,
        bar_percent=bar.percent,
        power_percent=_power(examined, pair, bool(bar.scaled_because)),
    )


def _unsettled(judgement: Judgement, examined: Examined) -> Unsettled | None:
    if (judgement.verdict, judgement.bar, judgement.test) != ("cannot tell", "missed", "cannot tell"):
        return None
    if examined.power is None or judgement.parted_at is not None:
        return None
    if examined.repeats:
        return "noise"
    return "copies" if examined.copies else "no repeats"


def _remedy(examined: Examined, allowed: float) -> str:
    wanted = examined.suffices(allowed)
    if wanted is None:
        return "larger batches would help"
    more, longer = wanted.repeats - examined.repeats, wanted.steps > len(examined.steps)
    parts = [f"{more} more repeat{'s' if more != 1 else ''}"] * (more > 0) + [f"runs of {wanted.steps} steps"] * longer
    return f"{' and '.join(parts)} would suffice"


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


@dataclass(frozen=True)
class Checked:
    """A result, and what its curves show."""

    result: Result
    again: Recomputed

    @property
    def reason(self) -> str:
        """Why the pair has its verdict. A verdict that is worse than that of the curves has its own reason."""
        same = self.result.verdict == self.again.verdict
        return f"{self.result.metric}: {self.again.explanation}" if same else self.result.reason

    @property
    def error_percent(self) -> float | None:
        """The error that is compared with the bar."""
        return self.again.scaled_error_percent if self.again.scaled else self.again.mean_error_percent


def read_result(file: Path) -> Checked:
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
    return Checked(result, again)


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


# Columns and files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableColumn:
    """A column of the table: the pair of sides, the size of the model, and which results belong into it."""

    sides: str
    size: str
    holds: Callable[[Result], bool]
    least_steps: int

    @property
    def title(self) -> str:
        return f"{self.sides} ({self.size})"


def _near(result: Result, low: float, high: float) -> bool:
    return low <= result.parameters < high


COLUMNS: dict[str, TableColumn] = {
    "cpu-cuda": TableColumn(
        "CPU fp32, H200 bf16",
        "135M",
        lambda result: result.pair == "cpu-cuda" and not result.emulated and _near(result, 100e6, 200e6),
        30,
    ),
    "kernels": TableColumn(
        "H200 torch, H200 kernels",
        "0.5B",
        lambda result: result.pair == "kernels" and not result.emulated and _near(result, 400e6, 700e6),
        30,
    ),
    "npu-tiny": TableColumn(
        "CPU, emulated NPU",
        "tiny",
        lambda result: result.pair == "npu" and result.emulated and _near(result, 0, 10e6),
        1,
    ),
    "npu-135m": TableColumn(
        "CPU, emulated NPU",
        "135M",
        lambda result: result.pair == "npu" and result.emulated and _near(result, 100e6, 200e6),
        1,
    ),
    "ascend": TableColumn(
        "CPU fp32, Ascend bf16",
        "135M",
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


def place_of(results: Path, row: str, column: str) -> Path:
    return results / row / f"{column}.json"


def stored_results(results: Path) -> dict[tuple[str, str], Checked]:
    found = {}
    for file in sorted([*results.glob("*.json"), *results.glob("*/*.json")]):
        checked = read_result(file)
        row, column = checked.result.row, column_of(file, checked.result)
        if file != place_of(results, row, column):
            raise EvidenceError(f"{file}: its contents belong into {row}/{column}.json")
        found[row, column] = checked
    return found


def store(files: Sequence[Path], results: Path) -> None:
    """Copies the given result files into the folder of results."""
    checked = [(file, read_result(file)) for file in files]
    places = [place_of(results, each.result.row, column_of(file, each.result)) for file, each in checked]
    if twice := {str(place.relative_to(results)) for place in places if places.count(place) > 1}:
        raise EvidenceError(f"two folders have the same cell: {', '.join(sorted(twice))}")
    for place, (_, each) in zip(places, checked, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        stated = replace(each.result, reason=each.reason)
        place.write_text(json.dumps(stated.as_json(), indent=None) + "\n", encoding="utf-8")
