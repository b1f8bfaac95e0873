"""Aligns the curves of two runs: finds common steps, averages over logging intervals, and detects shifted step counts.

transformers' Trainer, frameworks built on it, and Megatron log the mean of all steps since the previous log. If one run
logs means over several steps and the other logs every step, the values of the other run are averaged over the same
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.parity.compare.logs.log_curves import Log, Series

MIN_DETECTION_POINTS = 5
"""Only in a curve with at least this many values, lockstep tests whether the values are means over several steps."""
CLEARLY = 2.0
"""Lockstep accepts an explanation of two curves (values are means, or steps are shifted) only if its error is this many
times smaller than that of the alternatives."""
MIN_SHIFT_STEPS = 8
"""A shift needs at least this many common steps, because with fewer steps curves may agree by chance."""
NEAREST_SHIFTS = 4
"""Only this many shifts, those with the smallest squared distances, are examined exactly."""
LONGEST_SHIFTED = 2**22
"""No shift is searched in logs that span more steps than this."""


@dataclass(frozen=True)
class Pair:
    """The values of two curves, A and B, on their common steps. Values may be NaN or infinite."""

    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """A mask of the steps at which the values of both curves are finite. The error metrics use only these steps."""
        return np.isfinite(self.a) & np.isfinite(self.b)

    @property
    def one_sided(self) -> np.ndarray:
        """A mask of the steps at which only one curve has a finite value. The curves count as different at these
        steps."""
        return np.isfinite(self.a) != np.isfinite(self.b)

    @property
    def left_out(self) -> int:
        """The number of steps at which neither curve has a finite value."""
        return len(self.steps) - int((self.finite | self.one_sided).sum())


def align(a: Series, b: Series) -> Pair:
    """Returns both curves on the steps that both logged."""
    steps = common_steps([a.steps, b.steps])
    return Pair(steps, values_at(a, steps), values_at(b, steps))


def common_steps(steps: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the intersection of all step arrays."""
    first, *others = steps
    # Usually all step arrays are equal, and the equality test is quicker than the intersection.
    for each in others:
        first = first if np.array_equal(first, each) else np.intersect1d(first, each, assume_unique=True)
    return first


def values_at(series: Series, steps: np.ndarray) -> np.ndarray:
    """Returns the curve's values at `steps`, with NaN for a missing step."""
    if np.array_equal(series.steps, steps):
        return series.values.astype(np.float64)
    values = np.full(len(steps), np.nan)
    _, here, there = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    values[here] = series.values[there]
    return values


# Means over logging intervals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One metric of one run. `mean` says whether each value is the mean of all steps since the previous value. None if
    unknown."""

    series: Series
    mean: bool | None = None


@dataclass(frozen=True)
class Matched:
    """The curves of A and B on comparable steps. `only_a` and `only_b` count the steps that only A or only B has.
    `averaged` says whether and how A or B was averaged."""

    a: list[Series]
    b: list[Series]
    only_a: int
    only_b: int
    averaged: str = ""

    @property
    def explanation(self) -> str:
        """Describes which of A and B was averaged and how many steps were left out. The description is empty if A and B
        logged the same steps."""
        steps = [
            f"{count:,} step{'s' if count != 1 else ''} that only {side} has"
            for count, side in ((self.only_a, "A"), (self.only_b, "B"))
            if count
        ]
        return "; ".join(part for part in (self.averaged, f"left out: {', '.join(steps)}" if steps else "") if part)


def match(a_runs: Sequence[Curve], b_runs: Sequence[Curve]) -> Matched:
    """Aligns the first runs of A and B, and treats their repeated runs in the same way. A is averaged only if B logs
    means over several steps and A has all these steps, and vice versa. Whether values are means is known from the log
    format or detected by `_detected_means`."""
    a, b = a_runs[0], b_runs[0]
    series_a, series_b = [run.series for run in a_runs], [run.series for run in b_runs]
    if np.array_equal(a.series.steps, b.series.steps):
        return Matched(series_a, series_b, 0, 0)
    gap_a, gap_b = usual_gap(a.series), usual_gap(b.series)
    rarer = "A" if gap_a > gap_b else "B"
    coarse, fine = (a, b) if rarer == "A" else (b, a)
    plain = align(series_a[0], series_b[0])
    only = (len(a.series.steps) - len(plain.steps), len(b.series.steps) - len(plain.steps))
    means = None if coarse.mean is False or gap_a == gap_b else averaged(coarse.series, fine)
    every, other = max(gap_a, gap_b), "B" if rarer == "A" else "A"
    if means is None or 2 * len(means.steps) < len(plain.steps):
        certain = coarse.mean and gap_a != gap_b and len(plain.steps)
        explanation = (
            f"{rarer}'s values are means of {every:g} steps, but {other} lacks some of these steps: not averaged"
        )
        return Matched(series_a, series_b, *only, explanation if certain else "")
    detected = "" if coarse.mean else _detected_means(coarse.series, fine.series, means)
    if detected is None:
        return Matched(series_a, series_b, *only)
    are = f"are means of {every:g} steps" if coarse.mean else f"look like means of {every:g} steps ({detected})"
    explanation = f"{rarer}'s values {are}: {other} is averaged over the same steps"
    unused = int((~_inside(fine.series.steps, coarse.series, means.steps)).sum())
    unmatched = len(coarse.series.steps) - len(means.steps)
    put = [[_averaged_run(run, coarse.series) for run in runs] for runs in (a_runs, b_runs)]
    only = (unmatched, unused) if rarer == "A" else (unused, unmatched)
    return Matched(put[0], put[1], *only, explanation)


def averaged(coarse: Series, fine: Curve) -> Series | None:
    """Averages `fine` over each logging interval of `coarse` in which `fine` has every step. Returns None if `fine`
    lacks steps of every interval.

    If the values of `fine` are means themselves, each value is weighted by the number of its steps.
    """
    starts, ends = intervals(coarse)
    cell_starts, cell_ends = intervals(fine.series) if fine.mean else (fine.series.steps - 1, fine.series.steps)
    lengths = cell_ends - cell_starts
    first, last = np.searchsorted(cell_ends, starts, "right"), np.searchsorted(cell_ends, ends, "right")
    upto = np.concatenate([[0], np.cumsum(lengths)])
    covered = (last > first) & (upto[last] - upto[first] == ends - starts)
    # A cell is the range of steps of one value of `fine`. Cells do not overlap. So cells cover an interval of `coarse`
    # if they start where it starts and have as many steps as the interval.
    covered[covered] = cell_starts[first[covered]] == starts[covered]
    if not covered.any():
        return None
    bounds = np.stack([first[covered], last[covered]], axis=1).ravel()
    with np.errstate(invalid="ignore"):
        # `reduceat` needs an index below the length, so a 0 is appended for an interval that ends at the last step.
        sums = np.add.reduceat(np.append(fine.series.values * lengths, 0.0), bounds)[::2]
    return Series(coarse.steps[covered], sums / (ends - starts)[covered])


def intervals(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps over which each value is a mean, as two arrays: the step before the interval and its last step.
    The first interval is as long as the second, but begins at the first step at the earliest."""
    ends = series.steps
    starts = np.concatenate([[0], ends[:-1]])
    if len(ends):
        starts[0] = max(0, ends[0] - (ends[1] - ends[0])) if len(ends) > 1 else 0
    return starts, ends


def _averaged_run(run: Curve, coarse: Series) -> Series:
    """Averages the run over the logging intervals of `coarse`. A run that logs at the same steps as `coarse` already
    consists of means, so it is returned unchanged."""
    if np.array_equal(run.series.steps, coarse.steps):
        return run.series
    return averaged(coarse, run) or run.series


def _detected_means(coarse: Series, fine: Series, means: Series) -> str | None:
    """Tests whether the values of `coarse` are means of several steps of `fine`. If the values are means, returns a
    text with the errors of `coarse` compared with means of `fine` and with single steps; otherwise returns None."""
    pairs = [align(coarse, other) for other in (means, fine)]
    steps = np.intersect1d(pairs[0].steps[pairs[0].finite], pairs[1].steps[pairs[1].finite])
    if len(steps) < MIN_DETECTION_POINTS:
        return None
    errors = [float(np.abs(pair.a - pair.b)[np.isin(pair.steps, steps)].mean()) for pair in pairs]
    if errors[0] * CLEARLY > errors[1] or errors[1] == 0:
        return None
    of_means, of_steps = (f"{100 * error:.3g} %" for error in errors)
    return f"the mean error is {of_means} compared with such means, and {of_steps} compared with single steps"


def _inside(steps: np.ndarray, coarse: Series, covered: np.ndarray) -> np.ndarray:
    """Returns for each step whether it belongs to a logging interval of `coarse` whose last step is in `covered`."""
    starts, ends = intervals(coarse)
    index = np.searchsorted(ends, steps, "left")
    inside = index < len(ends)
    index = np.minimum(index, len(ends) - 1)
    return inside & (steps > starts[index]) & np.isin(ends[index], covered)


def incomplete(a: Series, b: Series, planned: Sequence[int | None]) -> str:
    """Describes the planned steps for which A or B has no finite value: at the end, at the start and in between.
    Returns an empty string if no step is missing. If a run logs every ten steps, the nine steps in between are not
    missing."""
    last = max([*(step for step in planned if step is not None), *(int(each.steps[-1]) for each in (a, b))])
    # Step 0 is ignored, because some frameworks log an evaluation as step 0 before the first update.
    first = min((int(each.steps[each.steps > 0][0]) for each in (a, b) if (each.steps > 0).any()), default=0)
    parts = [f"{side} {gap}" for side, series in (("A", a), ("B", b)) for gap in _missing(series, first, last)]
    return ", ".join(parts)


def _missing(series: Series, first: int, last: int) -> Iterator[str]:
    steps, gap = series.steps[np.isfinite(series.values)], usual_gap(series)
    if not len(steps):
        yield "has no number at any step"
        return
    if last - steps[-1] >= gap:
        yield f"ends at step {steps[-1]:,} of {last:,}"
    if steps[0] - first >= gap:
        yield f"begins at step {steps[0]:,}, the other at {first:,}"
    between = np.maximum(np.rint(np.diff(steps) / gap) - 1, 0)
    if count := int(between.sum()):
        where = steps[int(np.argmax(between > 0))]
        yield f"lacks {count:,} step{'s' if count != 1 else ''} after step {where:,}"


def usual_gap(series: Series) -> float:
    """Returns the median number of steps between two values of the curve. If the curve has a single value, returns the
    step of that value."""
    steps = series.steps
    if not len(steps):
        return 1.0
    return float(np.median(np.diff(steps))) if len(steps) > 1 else float(max(1, steps[0]))


# Shifted step counts: one run starts at 0 and the other at 1, or a resumed run restarts its count -------------------


@dataclass(frozen=True)
class Shift:
    """A shift of B's steps (`by`), and the mean error in percent with and without the shift. The error without shift is
    None if there is no common step."""

    by: int
    steps: int
    error_percent: float
    unshifted_percent: float | None


def shift_steps(log: Log, by: int) -> Log:
    """Returns the log with `by` added to all its steps."""
    if not by:
        return log
    planned = None if log.planned is None else log.planned + by
    return replace(log, metrics={name: _shifted(series, by) for name, series in log.metrics.items()}, planned=planned)


def select_steps(log: Log, first: int, last: int) -> Log:
    """Returns a copy of the log with only the steps from `first` to `last`. The planned number of steps in the copy is
    at most `last`."""
    metrics = {name: _selected(series, first, last) for name, series in log.metrics.items()}
    planned = None if log.planned is None else min(log.planned, last)
    return replace(
        log, metrics={name: series for name, series in metrics.items() if len(series.steps)}, planned=planned
    )


def _selected(series: Series, first: int, last: int) -> Series:
    inside = (series.steps >= first) & (series.steps <= last)
    return Series(series.steps[inside], series.values[inside])


def better_shift(a: Curve, b: Curve) -> Shift | None:
    """Returns the shift of B's steps with which the curves agree clearly better than with any other shift. Returns None
    if no shift is clearly better."""
    needed = max(MIN_SHIFT_STEPS, min(_finite_count(a.series), _finite_count(b.series)) // 2)
    if _finite_count(a.series) < needed or _finite_count(b.series) < needed or _mean_error(a, b)[0] == 0:
        return None
    found: dict[int, tuple[float, int]] = {}
    for by in _candidate_shifts(a.series, b.series, needed):
        error, steps = _mean_error(a, replace(b, series=_shifted(b.series, by)))
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
    """A curve with one array entry per step. `values` is 0 at a missing step. `there` is 1 where there is a value, else
    0."""

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
        """Returns a curve of moving averages: each value is the mean of the last `steps` steps, if none of these is
        missing."""
        sums, counts = (
            np.cumsum(one)[steps - 1 :] - np.concatenate([[0], np.cumsum(one)[:-steps]])
            for one in (self.values, self.there)
        )
        full = np.round(counts) == steps
        return _Dense(self.first + steps - 1, np.where(full, sums / steps, 0.0), full.astype(float))


def _candidate_shifts(a: Series, b: Series, needed: int) -> set[int]:
    """Returns the shifts to examine: 0, the shifts with the smallest distances, and their neighbours. If one curve logs
    fewer steps, shifts of the averaged other curve are included, because the sparse curve may consist of means."""
    if any(int(one.steps[-1] - one.steps[0]) >= LONGEST_SHIFTED for one in (a, b)):
        return {0}
    level = float(a.values[np.isfinite(a.values)].mean())  # subtracted from all values for precise sums of squares
    in_a, in_b = _Dense.of(a, level), _Dense.of(b, level)
    found = _nearest_shifts(in_a, in_b, needed)
    gap_a, gap_b = int(usual_gap(a)), int(usual_gap(b))
    if gap_b == 1 < gap_a <= len(in_b.values):
        found += _nearest_shifts(in_a, in_b.averaged(gap_a), needed)
    elif gap_a == 1 < gap_b <= len(in_a.values):
        found += _nearest_shifts(in_a.averaged(gap_b), in_b, needed)
    return {0, *(by + near for by in found for near in (-1, 0, 1))}


def _nearest_shifts(a: _Dense, b: _Dense, needed: int) -> list[int]:
    """Returns the shifts of B's steps with the smallest mean squared distance between the curves. A shift needs at
    least `needed` common steps. The sums over common steps are cross-correlations, which an FFT computes for all shifts
    at once."""
    size = 1 << (len(a.values) + len(b.values) - 1).bit_length()

    def correlated(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns the cross-correlation: at index s the sum over i of left[i + s] x right[i]. The entries for negative
        s are at the end."""
        return np.fft.irfft(np.fft.rfft(left, size) * np.conj(np.fft.rfft(right, size)), size)

    positions = np.arange(-(len(b.values) - 1), len(a.values))
    common = np.round(correlated(a.there, b.there)[positions])
    squares = (
        correlated(a.values**2, b.there) + correlated(a.there, b.values**2) - 2 * correlated(a.values, b.values)
    )[positions]
    enough = common >= needed
    order = np.argsort(squares[enough] / common[enough], kind="stable")[:NEAREST_SHIFTS]
    return [int(shift) + a.first - b.first for shift in positions[enough][order]]


def _mean_error(a: Curve, b: Curve) -> tuple[float, int]:
    """Returns the mean absolute error over the steps at which both curves are finite, and the number of these steps."""
    matched = match([a], [b])
    pair = align(matched.a[0], matched.b[0])
    both = pair.finite
    return (float(np.abs(pair.a - pair.b)[both].mean()), int(both.sum())) if both.any() else (np.nan, 0)


def _finite_count(series: Series) -> int:
    return int(np.isfinite(series.values).sum())


def _shifted(series: Series, by: int) -> Series:
    return Series(series.steps + by, series.values)
