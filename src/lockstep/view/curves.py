"""The curves of metrics.jsonl: read on from where the last reader stopped, kept as columns, thinned for the screen."""

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

from lockstep.view.lines import line_at, parsed

FIRST_SECONDS, READ_SECONDS = 0.1, 0.4
"""How long a request reads on before it answers with what there is: the first one less, so that there is a curve."""


@dataclass
class MetricCurve:
    """A metric: the steps at which it is a number, and those at which it was logged and is none."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    odd_steps: array[int] = field(default_factory=lambda: array("q"))
    odd_values: list[str] = field(default_factory=list)


class Curves:
    """All curves of a run. The file may grow, and may be cut back by a run that goes back to a checkpoint."""

    def __init__(self, opened: Callable[[], BinaryIO]):
        self._open = opened
        self._lock = Lock()
        self._forget()

    def _forget(self) -> None:
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
        """Another one whenever there is more to show."""
        return f"{self._inode}-{self._offset}"

    def read_on(self, seconds: float | None = None) -> None:
        """Takes in lines until the end of the file, or until the time is up; at least one."""
        with self._lock, self._open() as file:
            usual = READ_SECONDS if self._offset else FIRST_SECONDS
            deadline = time.monotonic() + (usual if seconds is None else seconds)
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset or not self._goes_on(file):
                self._forget()
                self._inode = facts.st_ino
            self._size = facts.st_size
            while (line := line_at(file, self._offset)) is not None:
                self._take(parsed(line.content))
                self._offset = line.end
                self._last_line = (line.start, (line.content or b"")[:256])
                if time.monotonic() > deadline:
                    return
            # A line that is being written is for the next time.
            self._size = self._offset

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether what was read last is still there: a file may have been written anew and have grown past it."""
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
        for name, told in data.items():
            if type(told) is float:  # nearly all of them, and there may be millions
                value = told
            else:
                try:
                    value = float(told)
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
        """The first and the last step of any curve."""
        with self._lock:
            ends = [(c.steps[0], c.steps[-1]) for c in self.curves.values() if c.steps]
            ends += [(c.odd_steps[0], c.odd_steps[-1]) for c in self.curves.values() if c.odd_steps]
            return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def shown(self, name: str, domain: tuple[int, int], buckets: int, half: int) -> dict[str, Any] | None:
        """A curve between two steps as the page draws it: every point while there is room, else the first, lowest,
        highest and last of each bucket. With `half` also its centred mean over so many points to each side."""
        with self._lock:
            curve = self.curves.get(name)
            if curve is None:
                return None
            points = thinned(curve.steps, curve.values, domain, buckets)
            odd = _within(curve.odd_steps, domain)
            told: dict[str, Any] = {
                "steps": [curve.steps[i] for i in points],
                "values": [curve.values[i] for i in points],
                "odd": {
                    "count": len(odd),
                    "first": [[curve.odd_steps[i], curve.odd_values[i]] for i in odd[:buckets]],
                },
            }
            if half:
                mean = smoothed(curve.values, half)
                points = thinned(curve.steps, mean, domain, buckets)
                told["mean"] = {"steps": [curve.steps[i] for i in points], "values": [_finite(mean[i]) for i in points]}
            return told


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _within(steps: Sequence[int], domain: tuple[int, int]) -> range:
    """The places of the steps that are shown."""
    return range(bisect_left(steps, domain[0]), bisect_right(steps, domain[1]))


def thinned(steps: Sequence[int], values: Sequence[float], domain: tuple[int, int], buckets: int) -> list[int]:
    """Places of the points to draw, and one beyond each edge, so that lines run out of the picture. Never without the
    lowest and the highest of any bucket."""
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
    """The mean over `half` points to each side, fewer at the ends, as the page of a comparison smooths."""
    sums = array("d", accumulate(values, initial=0.0))
    count = len(values)
    mean = array("d", bytes(8 * count))
    for i in range(count):
        reach = min(half, i, count - 1 - i)
        mean[i] = (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)
    return mean
