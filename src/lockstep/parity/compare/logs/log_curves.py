"""The contents of a training log: metric curves, the set-up of the run, and the points that a reader collects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The texts that JSON logs contain for NaN and infinity, because JSON itself has no such numbers.
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
"""A resumed run may log this many steps a second time directly after the first time. The interrupted run had logged the
step but had not saved a checkpoint of it."""


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
    """The first lines of samples.jsonl that contain training samples."""
    earlier: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The recipes that the run used before it was resumed, keyed by the last step trained with each recipe. `recipe` is
    the newest recipe."""

    @property
    def planned(self) -> int | None:
        """The last step according to the recipe, or None if the recipe sets epochs instead of steps or allows early
        stopping."""
        run = self.recipe.get("run", {})
        return None if run.get("early_stopping") else run.get("steps")

    def recipe_at(self, step: int) -> dict[str, Any]:
        """Returns the recipe with which this step was trained."""
        return next((self.earlier[last] for last in sorted(self.earlier) if step <= last), self.recipe)


@dataclass(frozen=True)
class Log:
    """The curves of a log, keyed by lockstep's metric names. `written` maps lockstep's metric names to the names in the
    log."""

    source: str
    kind: str
    metrics: dict[str, Series]
    written: dict[str, str]
    evidence: Evidence | None = None
    means: frozenset[str] | None = None
    """The metrics whose values are means over the steps since the previous logged value. The value is None if the
    format does not specify which metrics are means."""
    planned: int | None = None
    """The last planned step, or None if the log does not contain it."""
    ambiguous: dict[str, str] = field(default_factory=dict)
    """The metrics that have several values for one step although the run was not resumed at this step, each with a text
    that describes such a step."""

    def is_mean(self, metric: str) -> bool | None:
        return None if self.means is None else metric in self.means


class Points:
    """The points (step and value) of each metric in the order of the file. A resumed run logs some steps twice.
    `source` names the rank that logged a point, or is empty if the log does not name ranks."""

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
        """Returns a description of a step with two values that a resumed run does not explain, or "" if there is no
        such step."""
        return self._differing.get(name) or _unexplained_repeat(*self._points[name])

    def series(self) -> dict[str, Series]:
        """Returns the curve of each metric, sorted by step. If a step was logged several times, its last value is
        used."""
        return {name: _series(steps, values) for name, (steps, values) in self._points.items()}


def numbers(row: Mapping[str, Any], without: frozenset[str] = frozenset(), prefix: str = "") -> Mapping[str, float]:
    """Returns the numbers in a JSON object. A number in a nested object gets the name `outer/inner`. Other values are
    skipped."""
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
    """Returns a step as an integer, or None if the value is not a whole number."""
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
    """Returns a description of a repeated step that a resumed run does not explain, or "" if there is none. A resumed
    run goes back to an earlier step and continues, or it restarts and then runs beyond the last step that was logged
    before the restart. If several ranks or runs write to one file, each step appears several times in a row, or all
    steps are repeated."""
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
    # A job that saves every step repeats one step per restart. A file with rows of several ranks repeats nearly all
    # steps.
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
