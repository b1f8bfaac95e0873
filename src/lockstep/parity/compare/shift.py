"""Steps that are counted otherwise: one side starts at 0 and the other at 1, or a resumed run counts on or anew."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lockstep.parity.compare.figures import align
from lockstep.parity.compare.intervals import Curve, match, usual_gap
from lockstep.parity.compare.log import Log, Series

FEWEST_STEPS = 8
"""With fewer steps in common curves agree by chance."""
CLEARLY = 2.0
"""How many times nearer the curves must lie than at any other shift, and than as they are."""
NEAREST = 4
"""The shifts with the smallest distances are looked at one by one."""
LONGEST = 2**22
"""Steps from the first to the last of a log: of longer ones no shift is looked for."""


@dataclass(frozen=True)
class Shift:
    """By how much B's steps are off, and the mean error in percent with and without it (None: no common step)."""

    by: int
    steps: int
    error_percent: float
    unshifted_percent: float | None


def moved(log: Log, by: int) -> Log:
    """The log with `by` added to all its steps."""
    if not by:
        return log
    planned = None if log.planned is None else log.planned + by
    return replace(log, metrics={name: _moved(series, by) for name, series in log.metrics.items()}, planned=planned)


def within(log: Log, first: int, last: int) -> Log:
    """The log from the step `first` to `last`, as if no more had been planned."""
    metrics = {name: _within(series, first, last) for name, series in log.metrics.items()}
    planned = None if log.planned is None else min(log.planned, last)
    return replace(
        log, metrics={name: series for name, series in metrics.items() if len(series.steps)}, planned=planned
    )


def _within(series: Series, first: int, last: int) -> Series:
    inside = (series.steps >= first) & (series.steps <= last)
    return Series(series.steps[inside], series.values[inside])


def better_shift(a: Curve, b: Curve) -> Shift | None:
    """The shift of B under which the curves agree clearly better than under any other; None where there is none."""
    needed = max(FEWEST_STEPS, min(_numbers(a.series), _numbers(b.series)) // 2)
    if _numbers(a.series) < needed or _numbers(b.series) < needed or _error(a, b)[0] == 0:
        return None
    found: dict[int, tuple[float, int]] = {}
    for by in _candidates(a.series, b.series, needed):
        error, steps = _error(a, replace(b, series=_moved(b.series, by)))
        if by == 0 or steps >= needed:
            found[by] = (error, steps)
    unshifted, steps = found.pop(0)
    if not found:
        return None
    best = min(found, key=lambda by: (found[by][0], abs(by)))
    others = [error for by, (error, _) in found.items() if by != best] + ([unshifted] if steps else [])
    if not others or any(not found[best][0] * CLEARLY < other for other in others):
        return None
    return Shift(best, found[best][1], 100 * found[best][0], 100 * unshifted if steps else None)


@dataclass(frozen=True)
class _Dense:
    """A curve with an entry for every step: 0 where there is no number, and where there is one."""

    first: int
    values: np.ndarray
    there: np.ndarray

    @staticmethod
    def of(series: Series, level: float) -> _Dense:
        finite = np.isfinite(series.values)
        positions = (series.steps - series.steps[0])[finite]
        values, there = (np.zeros(int(series.steps[-1] - series.steps[0]) + 1) for _ in range(2))
        values[positions], there[positions] = series.values[finite] - level, 1
        return _Dense(int(series.steps[0]), values, there)

    def averaged(self, steps: int) -> _Dense:
        """At each step the mean of so many steps up to it, where all of them are there."""
        sums, counts = (
            np.cumsum(one)[steps - 1 :] - np.concatenate([[0], np.cumsum(one)[:-steps]])
            for one in (self.values, self.there)
        )
        full = np.round(counts) == steps
        return _Dense(self.first + steps - 1, np.where(full, sums / steps, 0.0), full.astype(float))


def _candidates(a: Series, b: Series, needed: int) -> set[int]:
    """No shift, and those with the smallest distances and their neighbours: of the curves as they are and, where one is
    rarer, with the other averaged as it would be if the rarer one is of means."""
    if any(int(one.steps[-1] - one.steps[0]) >= LONGEST for one in (a, b)):
        return {0}
    level = float(a.values[np.isfinite(a.values)].mean())  # the closer to 0, the less is lost in the sums of squares
    in_a, in_b = _Dense.of(a, level), _Dense.of(b, level)
    found = _nearest(in_a, in_b, needed)
    gap_a, gap_b = int(usual_gap(a)), int(usual_gap(b))
    if gap_b == 1 < gap_a <= len(in_b.values):
        found += _nearest(in_a, in_b.averaged(gap_a), needed)
    elif gap_a == 1 < gap_b <= len(in_a.values):
        found += _nearest(in_a.averaged(gap_b), in_b, needed)
    return {0, *(by + near for by in found for near in (-1, 0, 1))}


def _nearest(a: _Dense, b: _Dense, needed: int) -> list[int]:
    """The shifts of B with the smallest mean squared distances over at least `needed` steps, from all that there are:
    the sums over common steps are correlations, which the Fourier transform gives for every shift at once."""
    size = 1 << (len(a.values) + len(b.values) - 1).bit_length()

    def correlated(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """At index s the sum of left[i + s] x right[i]; negative ones are at the end."""
        return np.fft.irfft(np.fft.rfft(left, size) * np.conj(np.fft.rfft(right, size)), size)

    positions = np.arange(-(len(b.values) - 1), len(a.values))
    common = np.round(correlated(a.there, b.there)[positions])
    squares = (
        correlated(a.values**2, b.there) + correlated(a.there, b.values**2) - 2 * correlated(a.values, b.values)
    )[positions]
    enough = common >= needed
    order = np.argsort(squares[enough] / common[enough], kind="stable")[:NEAREST]
    return [int(shift) + a.first - b.first for shift in positions[enough][order]]


def _error(a: Curve, b: Curve) -> tuple[float, int]:
    """The mean error over the steps at which both have a number, and how many those are."""
    matched = match([a], [b])
    pair = align(matched.a[0], matched.b[0])
    both = pair.finite
    return (float(np.abs(pair.a - pair.b)[both].mean()), int(both.sum())) if both.any() else (np.nan, 0)


def _numbers(series: Series) -> int:
    return int(np.isfinite(series.values).sum())


def _moved(series: Series, by: int) -> Series:
    return Series(series.steps + by, series.values)
