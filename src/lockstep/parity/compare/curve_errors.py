"""Computes errors, drift, correlation and divergence step of two metric curves, and the errors between repeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np

from lockstep.parity.compare.align_curves import Pair, common_steps, values_at
from lockstep.parity.compare.comparison import Figures, Noise
from lockstep.parity.compare.logs.log_curves import Series

LONGEST_WINDOW = 9
RESAMPLES = 2000
MAX_BLOCKS = 100
MIN_NOISE_STEPS = 8
"""The minimum number of common steps for a noise estimate. With fewer steps the bootstrap has too few blocks."""


def figures(pair: Pair, tolerance: np.ndarray | float | None) -> Figures:
    """Computes all error metrics of two curves with at least one common step. The errors are NaN if there is no step at
    which both curves are finite. `tolerance` is the allowed distance of the curves at each step. If `tolerance` is
    None, no divergence step is computed."""
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
        parted_at=None if tolerance is None else divergence_step(pair, tolerance),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns Pearson's correlation of two curves, or None if a curve is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    from_mean_a, from_mean_b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((from_mean_a**2).sum() * (from_mean_b**2).sum()))
    return float((from_mean_a * from_mean_b).sum()) / spread if spread > 0 else None


def divergence_step(pair: Pair, tolerance: np.ndarray | float) -> int | None:
    """Returns the first step from which on the curves differ by more than `tolerance` until the end of the run. From
    the returned step on, the curves must differ by more than `tolerance` at the majority of the steps in a window
    around each step.

    The majority vote in a window (the sign of the running median of distance minus tolerance) prevents a single step
    near the end from causing or hiding a divergence. A divergence that starts in the last `window // 2` steps is
    ignored. A step at which only one curve is finite exceeds the tolerance. A step at which neither curve is finite is
    ignored. Curves that cross do not diverge: the mean difference from the returned step to the end must also exceed
    `tolerance`.
    """
    voting = pair.finite | pair.one_sided
    allowed = np.broadcast_to(np.asarray(tolerance, dtype=np.float64), pair.steps.shape)[voting]
    with np.errstate(invalid="ignore"):
        difference = pair.b[voting] - pair.a[voting]
        exceeds = ~(np.abs(difference) <= allowed)
    window = window_length(len(exceeds))
    half = window // 2
    # The series is mirrored at both ends, so that windows at the ends contain no missing steps.
    padded = np.pad(exceeds.astype(np.int64), half, mode="reflect")
    votes = np.convolve(padded, np.ones(window, dtype=np.int64), "valid")
    together = np.flatnonzero(votes <= half)
    start = int(together[-1]) + 1 if len(together) else 0
    if start >= len(exceeds) - half or abs(difference[start:].mean()) <= allowed[start:].mean():
        return None
    return int(pair.steps[voting][start])


def window_length(steps: int) -> int:
    """Returns the length of the voting window: an odd number near a tenth of the steps, between 3 and 9. The window has
    1 step if the curve has one or two steps."""
    return 1 if steps < 3 else min(LONGEST_WINDOW, max(3, (steps // 10) | 1))


# Errors between repeats ----------------------------------------------------------------------------------------------


def noise_floor(a_runs: Sequence[Series], b_runs: Sequence[Series], seed: int = 0) -> Noise | None:
    """Returns the mean error between repeats of the same side, and an interval for the additional error between A and
    B.

    All runs have the same weight. Returns None if neither side has a repeat, or if the runs have too few common steps
    with finite values.
    """
    runs = [*a_runs, *b_runs]
    repeats = len(runs) - 2
    values = _on_common_steps(runs) if repeats > 0 else np.empty((0, 0))
    if values.shape[1] < MIN_NOISE_STEPS:
        return None
    a_places, b_places = range(len(a_runs)), range(len(a_runs), len(runs))
    across = _distances(values, list(product(a_places, b_places)))
    within = _distances(values, [*combinations(a_places, 2), *combinations(b_places, 2)])
    low, high = np.percentile(excess_draws(across, within, seed), [2.5, 97.5])
    return Noise(repeats, 100 * float(within.mean()), 100 * float(low), 100 * float(high))


def excess_draws(across: np.ndarray, within: np.ndarray, seed: int) -> np.ndarray:
    """Returns bootstrap samples of mean(`across`) - mean(`within`). `across` has the errors between A and B, `within`
    the errors between repeats. `across` and `within` have one row per pair of runs and one column per step.

    Each bootstrap sample consists of circular blocks of steps, because errors of neighbouring steps are correlated.
    Each bootstrap sample uses one random row of `across` and one of `within`, because a single run may deviate at every
    step.
    """
    steps = across.shape[1]
    block = block_length(across.mean(axis=0) - within.mean(axis=0))
    blocks = -(-steps // block)
    draw = np.random.default_rng(seed)
    starts = draw.integers(steps, size=(RESAMPLES, blocks))
    sides = _block_sums(across, block)[draw.integers(len(across), size=(RESAMPLES, 1)), starts]
    repeats = _block_sums(within, block)[draw.integers(len(within), size=(RESAMPLES, 1)), starts]
    return (sides - repeats).sum(axis=1) / (blocks * block)


def block_length(excess: np.ndarray) -> int:
    """Returns the block length of the circular block bootstrap, between N^(1/3) and N/4. This block length is optimal
    for the mean of an AR(1) series with the lag-1 correlation of `excess` (Politis & White 2004). The bootstrap uses at
    most 100 blocks, because more blocks take time and do not narrow the interval."""
    steps = len(excess)
    from_mean = excess - excess.mean()
    spread = float((from_mean**2).sum())
    lag = float((from_mean[1:] * from_mean[:-1]).sum()) / spread if spread > 0 else 0.0
    best = (1.5 * (2 * max(lag, 0.0) / (1 - lag**2)) ** 2 * steps) ** (1 / 3)
    return max(1, min(round(max(best, steps ** (1 / 3), steps / MAX_BLOCKS)), steps // 4))


def _on_common_steps(runs: Sequence[Series]) -> np.ndarray:
    """Returns a matrix of values with one row per run and one column per step at which all runs are finite."""
    common = common_steps([run.steps for run in runs])
    values = np.stack([values_at(run, common) for run in runs])
    return values[:, np.isfinite(values).all(axis=0)]


def _distances(values: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.stack([np.abs(values[first] - values[second]) for first, second in pairs])


def _block_sums(rows: np.ndarray, block: int) -> np.ndarray:
    """Returns, for each start step, the sum over `block` steps. Blocks at the end wrap around to the first steps."""
    around = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.hstack([rows, rows[:, : block - 1]]), axis=1)], 1)
    return around[:, block:] - around[:, :-block]
