"""Reads metrics.jsonl incrementally, stores one curve per metric, and downsamples the curves for the screen."""

from __future__ import annotations

import math
import os
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Any, BinaryIO

from lockstep.serve.viewer_log import line_at, parsed

FIRST_SECONDS, READ_SECONDS = 0.1, 0.4
"""The time limits in seconds for reading the log in one request. The limit of the first request is shorter, so that the
page soon shows a curve."""


@dataclass
class MetricCurve:
    """The steps and values of a metric. Steps with NaN or infinite values are stored separately."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    odd_steps: array[int] = field(default_factory=lambda: array("q"))
    odd_values: list[str] = field(default_factory=list)


class Curves:
    """All curves of a run. The file metrics.jsonl may grow. A run that resumes from a checkpoint truncates the file."""

    def __init__(self, opened: Callable[[], BinaryIO]):
        self._open = opened
        self._lock = Lock()
        self._reset()

    def _reset(self) -> None:
        self.curves: dict[str, MetricCurve] = {}
        self.damaged = 0
        self.last_step: int | None = None
        self._inode, self._offset, self._size = 0, 0, 0
        self._last_line = (0, b"")

    @property
    def read_share(self) -> float:
        return 1.0 if self._offset >= self._size else self._offset / self._size

    @property
    def version(self) -> str:
        """A version string, which changes when the curves change."""
        return f"{self._inode}-{self._offset}"

    def read_more(self, seconds: float | None = None) -> None:
        """Reads lines until the end of the file or the time limit, but at least one line."""
        with self._lock, self._open() as file:
            usual = READ_SECONDS if self._offset else FIRST_SECONDS
            deadline = time.monotonic() + (usual if seconds is None else seconds)
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset or not self._is_same_log(file):
                self._reset()
                self._inode = facts.st_ino
            self._size = facts.st_size
            while (line := line_at(file, self._offset)) is not None:
                self._take(parsed(line.content))
                self._offset = line.end
                self._last_line = (line.start, (line.content or b"")[:256])
                if time.monotonic() > deadline:
                    return
            # A later call reads the last line if it is still incomplete.
            self._size = self._offset

    def _is_same_log(self, file: BinaryIO) -> bool:
        """Returns whether the last line that was read is still in the file. A size check is not enough, because a
        replaced file may already be longer."""
        start, content = self._last_line
        file.seek(start)
        return file.read(len(content)) == content

    def _take(self, line: dict[str, Any] | None) -> None:
        step, data = (line or {}).get("step"), (line or {}).get("data")
        if not isinstance(step, int) or not isinstance(data, dict) or not -(2**53) < step < 2**53:
            self.damaged += 1
            return
        if self.last_step is not None and step <= self.last_step:
            self.damaged += 1
            return
        self.last_step = step
        curves, finite = self.curves, math.isfinite
        for name, logged in data.items():
            if type(logged) is float:  # most values are floats and need no conversion
                value = logged
            else:
                try:
                    value = float(logged)
                except (TypeError, ValueError, OverflowError):
                    continue
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = MetricCurve()
            if finite(value):
                curve.steps.append(step)
                curve.values.append(value)
            else:
                curve.odd_steps.append(step)
                curve.odd_values.append(str(value))

    def names(self) -> list[str]:
        with self._lock:
            return list(self.curves)

    def range(self) -> tuple[int, int] | None:
        """Returns the smallest and the largest step of all curves."""
        with self._lock:
            ends = [(c.steps[0], c.steps[-1]) for c in self.curves.values() if c.steps]
            ends += [(c.odd_steps[0], c.odd_steps[-1]) for c in self.curves.values() if c.odd_steps]
            return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def shown(self, name: str, domain: tuple[int, int], buckets: int, half: int) -> dict[str, Any] | None:
        """Returns the points of a curve between two steps. If there are too many points, returns the first, lowest,
        highest and last point of each bucket. If `half` is not 0, also returns the moving average over `half` points
        before and after each point."""
        with self._lock:
            curve = self.curves.get(name)
            if curve is None:
                return None
            points = downsampled(curve.steps, curve.values, domain, buckets)
            odd = _within(curve.odd_steps, domain)
            shown: dict[str, Any] = {
                "steps": [curve.steps[i] for i in points],
                "values": [curve.values[i] for i in points],
                "odd": {
                    "count": len(odd),
                    "first": [[curve.odd_steps[i], curve.odd_values[i]] for i in odd[:buckets]],
                },
            }
            if half:
                mean = smoothed(curve.values, half)
                points = downsampled(curve.steps, mean, domain, buckets)
                shown["mean"] = {
                    "steps": [curve.steps[i] for i in points],
                    "values": [_finite(mean[i]) for i in points],
                }
            return shown


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _within(steps: Sequence[int], domain: tuple[int, int]) -> range:
    """Returns the indices of the steps from `domain[0]` to `domain[1]`."""
    return range(bisect_left(steps, domain[0]), bisect_right(steps, domain[1]))


def downsampled(steps: Sequence[int], values: Sequence[float], domain: tuple[int, int], buckets: int) -> list[int]:
    """Returns the indices of the points to draw. One point before and one point after the range are included, so that
    lines reach the edges of the plot. The lowest and the highest point of each bucket are always included."""
    places = _within(steps, domain)
    before, after = range(max(0, places.start - 1), places.start), range(places.stop, min(len(steps), places.stop + 1))
    if len(places) <= 4 * buckets:
        return [*before, *places, *after]
    chosen: list[int] = []
    first, last = domain
    at = places.start
    for bucket in range(1, buckets + 1):
        edge = first + (last + 1 - first) * bucket / buckets
        end = places.stop if bucket == buckets else bisect_left(steps, edge, at, places.stop)
        if end > at:
            part = values[at:end]
            chosen += sorted({at, at + part.index(min(part)), at + part.index(max(part)), end - 1})
        at = end
    return [*before, *chosen, *after]


def smoothed(values: Sequence[float], half: int) -> array[float]:
    """Returns the moving average over `half` points before and after each point. Near the ends of the curve, the
    average covers fewer points. The report of a comparison smooths curves in the same way."""
    sums = array("d", accumulate(values, initial=0.0))
    count = len(values)
    mean = array("d", bytes(8 * count))
    for i in range(count):
        reach = min(half, i, count - 1 - i)
        mean[i] = (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)
    return mean
