"""The contents of a training log: metric curves, a run folder's evidence, and the points that a reader collects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# How JSON files write NaN and infinity, which JSON does not have.
NON_FINITE = {
    "NaN": math.nan,
    "nan": math.nan,
    "Infinity": math.inf,
    "inf": math.inf,
    "-Infinity": -math.inf,
    "-inf": -math.inf,
}
LARGEST_STEP = 2**62
MAX_REPEATED_STEPS = 2
"""A resumed run may repeat this many steps, because it had logged a step but not saved it when it stopped."""


@dataclass(frozen=True)
class Series:
    """The values of one metric by step. Steps are strictly increasing. Values may be NaN or infinite."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The contents that only lockstep's run folders have: recipe, environment and samples."""

    recipe: dict[str, Any]
    env: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first training lines of samples.jsonl."""
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Recipes used before a resume, by the last step trained with each. `recipe` is the newest."""

    @property
    def planned(self) -> int | None:
        """The last step according to the recipe; None if the run is counted in epochs or may stop early."""
        run = self.recipe.get("run", {})
        return None if run.get("early_stopping") else run.get("steps")

    def recipe_at(self, step: int) -> dict[str, Any]:
        """Returns the recipe that trained this step."""
        return next((self.earlier[last] for last in sorted(self.earlier) if step <= last), self.recipe)


@dataclass(frozen=True)
class Log:
    """A log as curves under lockstep's metric names. `written` maps each name to the name in the log."""

    source: str
    kind: str
    metrics: dict[str, Series]
    written: dict[str, str]
    evidence: Evidence | None = None
    means: frozenset[str] | None = None
    """Metrics whose values are means over the steps since the previous value; None if unspecified."""
    planned: int | None = None
    """The last planned step; None if the log does not contain it."""
    ambiguous: dict[str, str] = field(default_factory=dict)
    """Metrics with several values for one step that a resume does not explain, each with an example."""

    def is_mean(self, metric: str) -> bool | None:
        return None if self.means is None else metric in self.means


class Points:
    """The points of each metric in file order. A resumed run logs some steps twice. `source` is the rank that wrote a
    point, if the log contains it."""

    def __init__(self) -> None:
        self._points: dict[str, tuple[list[int], list[float]]] = {}
        self._sources: dict[str, dict[int, tuple[str, float]]] = {}
        self._differing: dict[str, str] = {}
        self.planned: int | None = None
        """The last planned step, if the log contains it."""

    def __bool__(self) -> bool:
        return bool(self._points)

    @property
    def names(self) -> list[str]:
        return list(self._points)

    def add(self, step: int, values: Mapping[str, float], source: str = "") -> None:
        for name, value in values.items():
            found = self._points.get(name)
            if found is None:
                found = self._points[name] = ([], [])
            found[0].append(step)
            found[1].append(value)
        if source:
            for name, value in values.items():
                self._compare_sources(name, step, value, source)

    def _compare_sources(self, name: str, step: int, value: float, source: str) -> None:
        other, first = self._sources.setdefault(name, {}).setdefault(step, (source, value))
        if other != source and not _same(first, value):
            example = f"step {step} has {first:.6g} ({other}) and {value:.6g} ({source})"
            self._differing.setdefault(name, example)

    def ambiguity(self, name: str) -> str:
        """Returns an example of a step with two values that a resume does not explain; "" if there is none."""
        return self._differing.get(name) or _unexplained_repeat(*self._points[name])

    def series(self) -> dict[str, Series]:
        """Returns each metric sorted by step. Of a repeated step the last value counts."""
        return {name: _series(steps, values) for name, (steps, values) in self._points.items()}


def numbers(row: Mapping[str, Any], without: frozenset[str] = frozenset(), prefix: str = "") -> Mapping[str, float]:
    """Returns the numbers of a JSON object; a nested object gives `outer/inner`. Other values are skipped."""
    if without and not without.isdisjoint(row):
        row = {name: value for name, value in row.items() if name not in without}
    if not prefix and set(map(type, row.values())) == {float}:
        return row  # the common case
    found: dict[str, float] = {}
    for name, value in row.items():
        kind = type(value)
        if kind is float:
            found[prefix + name] = value
        elif kind is int:
            found[prefix + name] = _float(value)
        elif kind is str and value in NON_FINITE:
            found[prefix + name] = NON_FINITE[value]
        elif kind is dict:
            found.update(numbers(value, prefix=f"{prefix}{name}/"))
    return found


def as_step(value: Any) -> int | None:
    """Returns a step as an integer; None if the value is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if abs(value) > LARGEST_STEP or value != value or value != int(value):
        return None
    return int(value)


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _unexplained_repeat(steps: list[int], values: list[float]) -> str:
    """Returns an example of a repeated step that a resume does not explain. A resumed run returns to an earlier step
    and continues, or restarts and gets further than before. If several ranks or runs write to one file, each step
    repeats at once, or all steps repeat."""
    step = np.asarray(steps, dtype=np.int64)
    back = np.flatnonzero(step[1:] <= step[:-1]) + 1
    if not len(back):
        return ""
    at_once = int((step[back] == step[back - 1]).sum())
    restarts = step[back] == step.min()
    stops = [*back[1:], len(step)]
    further = [step[start:].max() > step[:start].max() for start in back]
    covers = [step[start:stop].max() >= step[:start].max() for start, stop in zip(back, stops, strict=True)]
    all_repeat = any(r and c and not f for r, c, f in zip(restarts, covers, further, strict=True))
    # A job that saves every step repeats one step per restart; rows of several ranks repeat nearly all.
    if at_once <= max(MAX_REPEATED_STEPS, len(np.unique(step)) // 10) and not all_repeat:
        return ""
    first: dict[int, float] = {}
    for each, value in zip(steps, values, strict=True):
        if not _same(first.setdefault(each, value), value):
            return f"step {each} has {first[each]:.6g} and {value:.6g}"
    return ""


def _series(steps: list[int], values: list[float]) -> Series:
    step, value = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if (step[1:] > step[:-1]).all():
        return Series(step, value)
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    last = np.append(step[1:] != step[:-1], True)
    return Series(step[last], value[last])
