"""How far two curves lie apart: every figure of a comparison, over the steps that both have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.parity.compare.comparison import Figures
from lockstep.parity.compare.log import Series

LONGEST_WINDOW = 9


@dataclass(frozen=True)
class Pair:
    """Two curves on their common steps. Values may be NaN or infinite."""

    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """Where both are numbers: the steps that the figures are made of."""
        return np.isfinite(self.a) & np.isfinite(self.b)

    @property
    def one_sided(self) -> np.ndarray:
        """Where only one of them is a number: there they part, however close they are elsewhere."""
        return np.isfinite(self.a) != np.isfinite(self.b)

    @property
    def left_out(self) -> int:
        """Steps at which neither is a number."""
        return len(self.steps) - int((self.finite | self.one_sided).sum())


def align(a: Series, b: Series) -> Pair:
    """Both curves on the steps that both logged."""
    steps = common_steps([a.steps, b.steps])
    return Pair(steps, values_at(a, steps), values_at(b, steps))


def common_steps(steps: Sequence[np.ndarray]) -> np.ndarray:
    """The steps that are in all of them."""
    first, *others = steps
    # Nearly always they are all the same, which is quicker to see than to work out.
    for each in others:
        first = first if np.array_equal(first, each) else np.intersect1d(first, each, assume_unique=True)
    return first


def values_at(series: Series, steps: np.ndarray) -> np.ndarray:
    """The values at `steps`, NaN where there is none."""
    if np.array_equal(series.steps, steps):
        return series.values.astype(np.float64)
    values = np.full(len(steps), np.nan)
    _, here, there = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    values[here] = series.values[there]
    return values


def figures(pair: Pair, tolerance: np.ndarray | float | None) -> Figures:
    """All figures of two curves with at least one common step; `tolerance` is the distance, at each step, that counts
    as apart (None: no bar, so nothing is said of parting). Without a step at which both are numbers they are NaN."""
    finite = pair.finite
    a, b = pair.a[finite], pair.b[finite]
    distance, size = np.abs(a - b), np.abs(a)
    nonzero = size > 0
    worst = int(np.argmax(distance)) if finite.any() else None
    return Figures(
        steps=int(finite.sum()),
        first=int(pair.steps[0]),
        last=int(pair.steps[-1]),
        mean_error_percent=100 * _mean(distance),
        relative_error_percent=100 * _mean(distance[nonzero] / size[nonzero]) if nonzero.any() else None,
        scaled_error_percent=100 * float(distance.sum() / size.sum()) if nonzero.any() else None,
        worst=float("nan") if worst is None else float(distance[worst]),
        worst_step=int(pair.steps[0] if worst is None else pair.steps[finite][worst]),
        drift=_mean(b - a),
        correlation=correlation(a, b) if finite.any() else None,
        parted_at=None if tolerance is None else parted_at(pair, tolerance),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's; None where a curve is flat and there is none."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    from_mean_a, from_mean_b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((from_mean_a**2).sum() * (from_mean_b**2).sum()))
    return float((from_mean_a * from_mean_b).sum()) / spread if spread > 0 else None


def parted_at(pair: Pair, tolerance: np.ndarray | float) -> int | None:
    """The first step from which on, to the end, most steps of a window around each lie apart by more than `tolerance`.

    A vote in a window (the sign of the running median of distance less tolerance), so that one step near the end
    neither makes nor hides a parting; what began less than half a window before the end is not yet one. Steps without
    a number on one side are apart; those without any are not asked. Curves that lie now above, now below each other by
    so much have not parted: the mean of their difference over the stretch must be more than `tolerance` too.
    """
    asked = pair.finite | pair.one_sided
    allowed = np.broadcast_to(np.asarray(tolerance, dtype=np.float64), pair.steps.shape)[asked]
    with np.errstate(invalid="ignore"):
        difference = pair.b[asked] - pair.a[asked]
        parted = ~(np.abs(difference) <= allowed)
    window = window_of(len(parted))
    half = window // 2
    # Mirrored at the ends: the outermost step has one vote there as everywhere, not those of the missing ones too.
    votes = np.convolve(np.pad(parted.astype(np.int64), half, mode="reflect"), np.ones(window, dtype=np.int64), "valid")
    together = np.flatnonzero(votes <= half)
    start = int(together[-1]) + 1 if len(together) else 0
    if start >= len(parted) - half or abs(difference[start:].mean()) <= allowed[start:].mean():
        return None
    return int(pair.steps[asked][start])


def window_of(steps: int) -> int:
    """A tenth of the steps, odd, between 3 and 9; a curve of one or two steps has no spikes to look past."""
    return 1 if steps < 3 else min(LONGEST_WINDOW, max(3, (steps // 10) | 1))
