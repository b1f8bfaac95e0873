"""Logs of every step beside logs of means: what one side tells as the mean of ten steps, the other is averaged to.

transformers' Trainer, and what is built on it, logs the mean of all steps since the log before; so does Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.parity.compare.figures import align
from lockstep.parity.compare.log import Series

FEWEST_DETECTED = 5
"""With fewer values than this it cannot be seen whether they are means."""
CLEARLY = 2.0
"""How many times nearer to the means than to the single steps values must lie to be taken for means."""


@dataclass(frozen=True)
class Curve:
    """A metric of one run. `mean`: whether its values are means since the step logged before; None: nobody tells."""

    series: Series
    mean: bool | None = None


@dataclass(frozen=True)
class Matched:
    """The curves of both sides on steps that mean the same, how many steps only one side has, and what was done."""

    a: list[Series]
    b: list[Series]
    only_a: int
    only_b: int
    averaged: str = ""

    @property
    def explanation(self) -> str:
        """All that there is to say; "" where both sides logged the same steps."""
        steps = [
            f"{count:,} step{'s' if count != 1 else ''} that only {side} has"
            for count, side in ((self.only_a, "A"), (self.only_b, "B"))
            if count
        ]
        return "; ".join(part for part in (self.averaged, f"left out: {', '.join(steps)}" if steps else "") if part)


def match(a_runs: Sequence[Curve], b_runs: Sequence[Curve]) -> Matched:
    """The first of each side decides; repeats follow them. Nothing is averaged unless one side is known to log means,
    or is seen to, and the other has the steps that they are made of."""
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
        known = coarse.mean and gap_a != gap_b and len(plain.steps)
        explanation = (
            f"{rarer}'s values are means of {every:g} steps, of which {other} has not all: compared as they are"
        )
        return Matched(series_a, series_b, *only, explanation if known else "")
    seen = "" if coarse.mean else _detected(coarse.series, fine.series, means)
    if seen is None:
        return Matched(series_a, series_b, *only)
    are = f"are means of {every:g} steps" if coarse.mean else f"look like means of {every:g} steps ({seen})"
    explanation = f"{rarer}'s values {are}: {other} is averaged over the same steps"
    unused = int((~_within(fine.series.steps, coarse.series, means.steps)).sum())
    unmatched = len(coarse.series.steps) - len(means.steps)
    put = [[_put_on(run, coarse.series) for run in runs] for runs in (a_runs, b_runs)]
    only = (unmatched, unused) if rarer == "A" else (unused, unmatched)
    return Matched(put[0], put[1], *only, explanation)


def averaged(coarse: Series, fine: Curve) -> Series | None:
    """The means of `fine` over the intervals of `coarse`, at those that it has all steps of; None where there are none.

    Where `fine` is of means itself, each counts for as many steps as it is made of.
    """
    starts, ends = intervals(coarse)
    cell_starts, cell_ends = intervals(fine.series) if fine.mean else (fine.series.steps - 1, fine.series.steps)
    lengths = cell_ends - cell_starts
    first, last = np.searchsorted(cell_ends, starts, "right"), np.searchsorted(cell_ends, ends, "right")
    upto = np.concatenate([[0], np.cumsum(lengths)])
    covered = (last > first) & (upto[last] - upto[first] == ends - starts)
    # Cells do not overlap: with as many steps as the interval has, they are the interval if the first begins with it.
    covered[covered] = cell_starts[first[covered]] == starts[covered]
    if not covered.any():
        return None
    bounds = np.stack([first[covered], last[covered]], axis=1).ravel()
    with np.errstate(invalid="ignore"):
        # The 0 behind the last lets an interval end there.
        sums = np.add.reduceat(np.append(fine.series.values * lengths, 0.0), bounds)[::2]
    return Series(coarse.steps[covered], sums / (ends - starts)[covered])


def intervals(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """The steps that each value is the mean of, from behind the first number to the second. The first value's interval
    is as long as the second's, unless that would be before the first step: then the run began with it."""
    ends = series.steps
    starts = np.concatenate([[0], ends[:-1]])
    if len(ends):
        starts[0] = max(0, ends[0] - (ends[1] - ends[0])) if len(ends) > 1 else 0
    return starts, ends


def _put_on(run: Curve, coarse: Series) -> Series:
    """A run that logs at the same steps is of means as well; any other is averaged to them."""
    if np.array_equal(run.series.steps, coarse.steps):
        return run.series
    return averaged(coarse, run) or run.series


def _detected(coarse: Series, fine: Series, means: Series) -> str | None:
    """In words how it is seen that `coarse` is of means; None where it is not."""
    pairs = [align(coarse, other) for other in (means, fine)]
    steps = np.intersect1d(pairs[0].steps[pairs[0].finite], pairs[1].steps[pairs[1].finite])
    if len(steps) < FEWEST_DETECTED:
        return None
    errors = [float(np.abs(pair.a - pair.b)[np.isin(pair.steps, steps)].mean()) for pair in pairs]
    if errors[0] * CLEARLY > errors[1] or errors[1] == 0:
        return None
    return f"mean error {100 * errors[0]:.3g} % against them, {100 * errors[1]:.3g} % against single steps"


def _within(steps: np.ndarray, coarse: Series, covered: np.ndarray) -> np.ndarray:
    """Whether each step is a part of a mean that was compared."""
    starts, ends = intervals(coarse)
    index = np.searchsorted(ends, steps, "left")
    inside = index < len(ends)
    index = np.minimum(index, len(ends) - 1)
    return inside & (steps > starts[index]) & np.isin(ends[index], covered)


def incomplete(a: Series, b: Series, planned: Sequence[int | None]) -> str:
    """In words, which planned steps a side has no number at: the last ones, the first ones, and those in between; ""
    where there are none. A side that logs every ten steps lacks none of the nine."""
    last = max([*(step for step in planned if step is not None), *(int(each.steps[-1]) for each in (a, b))])
    # Step 0 is no update: some log what the model does before the first one.
    first = min((int(each.steps[each.steps > 0][0]) for each in (a, b) if (each.steps > 0).any()), default=0)
    parts = [f"{side} {told}" for side, series in (("A", a), ("B", b)) for told in _lacking(series, first, last)]
    return ", ".join(parts)


def _lacking(series: Series, first: int, last: int) -> Iterator[str]:
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
    """How many steps lie between two values, usually; of a single one all steps before it."""
    steps = series.steps
    if not len(steps):
        return 1.0
    return float(np.median(np.diff(steps))) if len(steps) > 1 else float(max(1, steps[0]))
