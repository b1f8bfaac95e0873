"""Steps that are counted otherwise: one side starts at 0 and the other at 1, or a resumed run counts on or anew."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lockstep.parity.compare.figures import align
from lockstep.parity.compare.intervals import Curve, match
from lockstep.parity.compare.log import Log, Series

FEWEST_STEPS = 8
"""With fewer steps in common curves agree by chance."""
CLEARLY = 2.0
"""How many times nearer the curves must lie than at any other shift, and than as they are."""
MOST_WORK = 20_000_000
"""Shifts times steps that are looked at: of runs of three thousand steps all that leave half of them in common."""
SLOWER = 10
"""How much more work a step is in a log that has not every one."""


@dataclass(frozen=True)
class Shift:
    """By how much B's steps are off, and the mean error in percent with and without it (None: no common step)."""

    by: int
    steps: int
    error_percent: float
    unshifted_percent: float | None


def moved(log: Log, by: int) -> Log:
    """The log with `by` added to all its steps."""
    return replace(log, metrics={name: _moved(series, by) for name, series in log.metrics.items()}) if by else log


def better_shift(a: Curve, b: Curve) -> Shift | None:
    """The shift of B under which the curves agree clearly better than under any other; None where there is none."""
    if _error(a, b)[0] == 0:
        return None
    found: dict[int, tuple[float, int]] = {}
    needed = max(FEWEST_STEPS, min(_numbers(a.series), _numbers(b.series)) // 2)
    for by in _candidates(a.series, b.series):
        error, steps = _error(a, replace(b, series=_moved(b.series, by)))
        if by == 0 or steps >= needed:
            found[by] = (error, steps)
    unshifted, steps = found.pop(0, (np.nan, 0))
    if not found:
        return None
    best = min(found, key=lambda by: (found[by][0], abs(by)))
    others = [error for by, (error, _) in found.items() if by != best] + ([unshifted] if steps else [])
    if not others or any(not found[best][0] * CLEARLY < other for other in others):
        return None
    return Shift(best, found[best][1], 100 * found[best][0], 100 * unshifted if steps else None)


def _candidates(a: Series, b: Series) -> list[int]:
    """Shifts from the smallest on, 0 among them; where not all can be tried, also those that put both ends together."""
    if not (len(a.steps) and len(b.steps)):
        return []
    low, high = int(a.steps[0] - b.steps[-1]), int(a.steps[-1] - b.steps[0])
    ends = {int(a.steps[0] - b.steps[0]), int(a.steps[-1] - b.steps[-1])}
    work = len(a.steps) + len(b.steps)
    most = MOST_WORK // (work if _every_step(a) and _every_step(b) else SLOWER * work) // 2
    near = range(max(low, -most), min(high, most) + 1)
    return sorted({0, *near, *(end + by for end in ends for by in (-1, 0, 1))}, key=lambda by: (abs(by), by))


def _error(a: Curve, b: Curve) -> tuple[float, int]:
    """The mean error over the steps at which both have a number, and how many those are."""
    if _every_step(a.series) and _every_step(b.series):
        first = max(a.series.steps[0], b.series.steps[0])
        last = min(a.series.steps[-1], b.series.steps[-1])
        left, right = (
            one.values[max(0, first - one.steps[0]) : max(0, last + 1 - one.steps[0])] for one in (a.series, b.series)
        )
    else:
        matched = match([a], [b])
        pair = align(matched.a[0], matched.b[0])
        left, right = pair.a, pair.b
    both = np.isfinite(left) & np.isfinite(right)
    return (float(np.abs(left[both] - right[both]).mean()), int(both.sum())) if both.any() else (np.nan, 0)


def _every_step(series: Series) -> bool:
    return len(series.steps) > 0 and int(series.steps[-1] - series.steps[0]) + 1 == len(series.steps)


def _numbers(series: Series) -> int:
    return int(np.isfinite(series.values).sum())


def _moved(series: Series, by: int) -> Series:
    return Series(series.steps + by, series.values)
