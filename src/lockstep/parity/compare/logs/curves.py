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


class Points:
    """The points of each metric in the order of the log. A step comes twice where a run was continued."""

    def __init__(self) -> None:
        self._points: dict[str, tuple[list[int], list[float]]] = {}

    def __bool__(self) -> bool:
        return bool(self._points)

    @property
    def names(self) -> list[str]:
        return list(self._points)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            found = self._points.get(name)
            if found is None:
                found = self._points[name] = ([], [])
            found[0].append(step)
            found[1].append(value)

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


def _series(steps: list[int], values: list[float]) -> Series:
    step, value = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    if (step[1:] > step[:-1]).all():
        return Series(step, value)
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    last = np.append(step[1:] != step[:-1], True)
    return Series(step[last], value[last])
