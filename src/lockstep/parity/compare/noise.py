"""The noise floor: how far repeats of one side lie apart, and whether the two sides lie further apart than that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np

from lockstep.parity.compare.comparison import Noise
from lockstep.parity.compare.figures import common_steps, values_at
from lockstep.parity.compare.log import Series

RESAMPLES = 2000
MOST_BLOCKS = 100
FEWEST_STEPS = 8
"""With fewer common steps there are not enough blocks to draw from."""


def noise_floor(a_runs: Sequence[Series], b_runs: Sequence[Series], seed: int = 0) -> Noise | None:
    """The mean error between runs of the same side, and the interval of how much further apart the sides are.

    Every run counts alike: the distance of the sides is that of a run of A to a run of B. None where no side has a
    repeat, or where all runs together have too few common steps at which all are numbers.
    """
    runs = [*a_runs, *b_runs]
    repeats = len(runs) - 2
    values = _on_common_steps(runs) if repeats > 0 else np.empty((0, 0))
    if values.shape[1] < FEWEST_STEPS:
        return None
    a_places, b_places = range(len(a_runs)), range(len(a_runs), len(runs))
    across = _distances(values, list(product(a_places, b_places)))
    within = _distances(values, [*combinations(a_places, 2), *combinations(b_places, 2)])
    low, high = np.percentile(excess_draws(across, within, seed), [2.5, 97.5])
    return Noise(repeats, 100 * float(within.mean()), 100 * float(low), 100 * float(high))


def excess_draws(across: np.ndarray, within: np.ndarray, seed: int) -> np.ndarray:
    """Bootstrap draws of the mean of `across` less the mean of `within`; a row is a pair of runs, a column a step.

    A draw takes circular blocks of steps, because neighbouring steps err alike, and one pair of either kind, because a
    run that errs may do so at every step: among few repeats, this is what an unlucky one looks like.
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
    """How many neighbouring steps are drawn together: the length that is best for the mean of a series with this
    lag-1 correlation (Politis & White 2004, circular blocks, an AR(1) plugged in), at least N^(1/3), at most N/4.
    Long series have 100 blocks at most: more would not narrow the interval, and take their time."""
    steps = len(excess)
    from_mean = excess - excess.mean()
    spread = float((from_mean**2).sum())
    lag = float((from_mean[1:] * from_mean[:-1]).sum()) / spread if spread > 0 else 0.0
    best = (1.5 * (2 * max(lag, 0.0) / (1 - lag**2)) ** 2 * steps) ** (1 / 3)
    return max(1, min(round(max(best, steps ** (1 / 3), steps / MOST_BLOCKS)), steps // 4))


def _on_common_steps(runs: Sequence[Series]) -> np.ndarray:
    """A row a run, a column for each step at which all of them have a number."""
    common = common_steps([run.steps for run in runs])
    values = np.stack([values_at(run, common) for run in runs])
    return values[:, np.isfinite(values).all(axis=0)]


def _distances(values: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.stack([np.abs(values[first] - values[second]) for first, second in pairs])


def _block_sums(rows: np.ndarray, block: int) -> np.ndarray:
    """The sum of `block` steps from each step on; the last steps go on with the first ones."""
    around = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.hstack([rows, rows[:, : block - 1]]), axis=1)], 1)
    return around[:, block:] - around[:, :-block]
