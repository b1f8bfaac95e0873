"""Points of a log as they are read, and the curves that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.parity.compare.log import Series

# How JSON files spell the numbers that JSON does not have.
UNREAL = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}
LARGEST_STEP = 2**62
MOST_AT_ONCE = 2
"""So many steps may come twice in a row: of runs that were continued at the step that they had just logged."""


class Points:
    """The points of each metric in the order of the log. A step comes twice where a run was continued. `source` says
    who wrote a point, where several may have: a rank."""

    def __init__(self) -> None:
        self._points: dict[str, tuple[list[int], list[float]]] = {}
        self._sources: dict[str, dict[int, tuple[str, float]]] = {}
        self._differing: dict[str, str] = {}
        self.planned: int | None = None
        """The last step of the run as it was planned, where the log tells it."""

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
        other, known = self._sources.setdefault(name, {}).setdefault(step, (source, value))
        if other != source and not _same(known, value):
            told = f"step {step} has {known:.6g} ({other}) and {value:.6g} ({source})"
            self._differing.setdefault(name, told)

    def ambiguity(self, name: str) -> str:
        """In words, a step with two values that no continued run explains; "" where there is none."""
        return self._differing.get(name) or _unexplained(*self._points[name])

    def series(self) -> dict[str, Series]:
        """Each metric with its steps going up; of a step that is there twice, the last one."""
        return {name: _series(steps, values) for name, (steps, values) in self._points.items()}


def numbers(row: Mapping[str, Any], without: frozenset[str] = frozenset(), prefix: str = "") -> Mapping[str, float]:
    """The numbers of a JSON object; inner objects give `outer/inner`. Texts, lists and truth values are no metrics."""
    if without and not without.isdisjoint(row):
        row = {name: value for name, value in row.items() if name not in without}
    if not prefix and set(map(type, row.values())) == {float}:
        return row  # nearly every row of a long log
    found: dict[str, float] = {}
    for name, value in row.items():
        kind = type(value)
        if kind is float:
            found[prefix + name] = value
        elif kind is int:
            found[prefix + name] = _float(value)
        elif kind is str and value in UNREAL:
            found[prefix + name] = UNREAL[value]
        elif kind is dict:
            found.update(numbers(value, prefix=f"{prefix}{name}/"))
    return found


def whole(value: Any) -> int | None:
    """A step as a whole number, or None when it is none."""
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


def _unexplained(steps: list[int], values: list[float]) -> str:
    """A continued run goes back to a step after its first one and trains on from there, or begins anew and gets
    further than before. Rows of several ranks or runs in one file do neither: each step comes again at once, or all
    steps come again."""
    step = np.asarray(steps, dtype=np.int64)
    back = np.flatnonzero(step[1:] <= step[:-1]) + 1
    if not len(back):
        return ""
    at_once = int((step[back] == step[back - 1]).sum())
    again = step[back] == step.min()
    stops = [*back[1:], len(step)]
    further = [step[start:].max() > step[:start].max() for start in back]
    covers = [step[start:stop].max() >= step[:start].max() for start, stop in zip(back, stops, strict=True)]
    whole_again = any(a and c and not f for a, c, f in zip(again, covers, further, strict=True))
    # A job that saves every step repeats one at each restart; rows of several ranks repeat nearly all.
    if at_once <= max(MOST_AT_ONCE, len(np.unique(step)) // 10) and not whole_again:
        return ""
    known: dict[int, float] = {}
    for each, value in zip(steps, values, strict=True):
        if not _same(known.setdefault(each, value), value):
            return f"step {each} has {known[each]:.6g} and {value:.6g}"
    return ""


def _series(steps: list[int], values: list[float]) -> Series:
    step, value = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if (step[1:] > step[:-1]).all():
        return Series(step, value)
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    last = np.append(step[1:] != step[:-1], True)
    return Series(step[last], value[last])
