"""Do two sides differ by more than repeats of one side do? Drift, every window, the end, the trend and the scatter.

All functions take leading axes (many comparisons at once) and work along the last one, the steps. The formulas are in
docs/compare.md, and so is the table of how often this is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SHARES = {"drift": 0.020, "trend": 0.005, "end": 0.010, "window": 0.010, "scatter": 0.005}
"""The chance of a false alarm that each statistic may spend; together 5 %."""
END_PARTS = (0.025, 0.05, 0.1, 0.2, 0.4)
"""The ends of the run that are looked at, as parts of it."""
FEWEST_STEPS = 8
"""With fewer common steps there is no telling noise from drift."""
MOST_MEMORY = 0.97
MODERATION = 3.0
"""Degrees of freedom that the short-memory value counts for beside what few repeats show of long windows."""
CAUTION = 1.5
"""How much larger than the short-memory value the variance of long windows is taken to be before repeats show it."""
WANDER = 0.18
"""The same for runs that lie apart from beginning to end: so many noise standard deviations, before repeats show it."""
CAUTION_ALONE = 25
"""Without a repeat: short-memory values count for 1 + so many / N of themselves, because memory is hard to see."""
WANDER_ALONE = 0.5
"""Without a repeat it stays an assumption, and is larger."""
FREEDOM_ALONE = 10.0


@dataclass(frozen=True)
class Looks:
    """Where is looked at: window means over `length` steps from `start` on, then the trend over the whole run."""

    kind: tuple[str, ...]
    start: np.ndarray
    length: np.ndarray
    critical: np.ndarray
    """The normal deviate that each must exceed; the looks of one statistic share its chance of a false alarm."""
    lengths: np.ndarray
    which: np.ndarray
    """The index of each window's length among `lengths`."""


@dataclass(frozen=True)
class Spread:
    """What means over windows of each length do by noise alone, in units of the scale."""

    scale: np.ndarray
    """(..., N): the shape of the noise over the run, 1 in the mean."""
    variance: np.ndarray
    """(..., lengths)"""
    freedom: np.ndarray
    """(..., lengths)"""
    likely: np.ndarray
    """(..., lengths): the variance without what caution adds to it."""
    trend: np.ndarray
    """(...): the variance of the trend."""
    trend_freedom: np.ndarray
    sd: np.ndarray
    """(...): of a single step of one run."""


@dataclass(frozen=True)
class SeriesScores:
    deviates: np.ndarray
    """(..., looks): as normal deviates, signed."""
    excess: np.ndarray
    """(..., looks): the size of the deviate over the critical one; above 1 is a finding."""
    scatter: np.ndarray
    """(...): the same for how much the steps scatter; 0 without repeats."""
    scattered: np.ndarray
    """(...): how many times as much."""

    @property
    def found(self) -> np.ndarray:
        return (self.excess.max(axis=-1) > 1) | (self.scatter > 1)


def contrasts(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From the runs of both sides (..., runs, N): the difference of the sides, and one curve for every run above one a
    side. Without a difference all of them are noise of one kind, that of a single run."""
    difference = (b.mean(axis=-2) - a.mean(axis=-2)) / np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2])
    residuals = np.concatenate([_helmert(a), _helmert(b)], axis=-2)
    # Runs that are the same to the last bit have no noise, not that of these sums.
    rounding = 8 * np.finfo(np.float64).eps * np.abs(a).max(axis=(-1, -2), keepdims=True)
    return difference, np.where(np.abs(residuals) > rounding, residuals, 0.0)


def _helmert(runs: np.ndarray) -> np.ndarray:
    """Run k less the mean of those before it, scaled to the variance of a run; they are orthogonal."""
    count = runs.shape[-2]
    weights = np.zeros((count - 1, count))
    for row in range(1, count):
        weights[row - 1, :row], weights[row - 1, row] = -1 / row, 1
        weights[row - 1] /= np.sqrt(1 + 1 / row)
    return weights @ runs


@lru_cache(maxsize=64)
def looks(steps: int) -> Looks:
    """Windows of N/64 steps (4 at least) and doubled lengths, overlapping by half, one of them at the end; the ends of
    the run; the whole run; its trend."""
    lengths = [max(4, round(steps / 64))]
    while lengths[-1] * 2 <= steps / 2:
        lengths.append(lengths[-1] * 2)
    windows = [("window", start, length) for length in lengths for start in _starts(steps, length)]
    ends = sorted({max(2, round(part * steps)) for part in END_PARTS})
    rest = [*(("end", steps - length, length) for length in ends), ("drift", 0, steps), ("trend", 0, steps)]
    every = [*windows, *rest]
    shares = [
        SHARES["window"] / len(lengths) / len(_starts(steps, length))
        if kind == "window"
        else SHARES[kind] / (len(ends) if kind == "end" else 1)
        for kind, _, length in every
    ]
    sizes = np.array([length for _, _, length in every])
    distinct, which = np.unique(sizes, return_inverse=True)
    return Looks(
        kind=tuple(kind for kind, _, _ in every),
        start=np.array([start for _, start, _ in every]),
        length=sizes,
        critical=np.array([two_sided(share) for share in shares]),
        lengths=distinct,
        which=which,
    )


def _starts(steps: int, length: int) -> list[int]:
    return sorted({*range(0, steps - length + 1, max(1, length // 2)), steps - length})


def two_sided(chance: float) -> float:
    """The normal deviate that is exceeded on either side with this chance."""
    return -NormalDist().inv_cdf(chance / 2)


def as_normal(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """The normal deviate as seldom as this t (Wallace 1959)."""
    size = np.sqrt(freedom * np.log1p(t**2 / freedom))
    return np.sign(t) * size * (8 * freedom + 1) / (8 * freedom + 3)


def as_t(deviate: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """The inverse of `as_normal`, for positive deviates."""
    size = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return np.sqrt(freedom * np.expm1(size**2 / freedom))


def score(difference: np.ndarray, residuals: np.ndarray) -> tuple[SeriesScores, Spread]:
    """How far each look at the difference (..., N) lies from what the residuals (..., q, N) do."""
    at = looks(difference.shape[-1])
    spread = spread_of(difference, residuals)
    scaled = difference / spread.scale
    windows, trend = window_means(scaled, at.start[:-1], at.length[:-1]), trend_of(scaled)
    t = np.concatenate(
        [
            windows / np.sqrt(spread.variance[..., at.which[:-1]]),
            (trend / np.sqrt(spread.trend))[..., None],
        ],
        axis=-1,
    )
    freedom = np.concatenate([spread.freedom[..., at.which[:-1]], spread.trend_freedom[..., None]], axis=-1)
    deviates = as_normal(t, freedom)
    scatter = _scatter(scaled, residuals / spread.scale[..., None, :])
    return SeriesScores(deviates, np.abs(deviates) / at.critical, *scatter), spread


def spread_of(difference: np.ndarray, residuals: np.ndarray) -> Spread:
    at = looks(difference.shape[-1])
    scale = shape_of_noise(np.concatenate([residuals, difference[..., None, :]], axis=-2))
    if residuals.shape[-2] == 0:
        return _alone(difference / scale, scale, at)
    return _among_repeats(residuals / scale[..., None, :], scale, at)


def _among_repeats(noise: np.ndarray, scale: np.ndarray, at: Looks) -> Spread:
    """Short windows: what those of the repeats do. Long ones, of which there are few: moderated by what the windows of
    an eighth of the run make one expect of them if noise has a short memory."""
    rows, steps = noise.shape[-2:]
    base = max(int(at.lengths[at.lengths <= max(steps / 8, at.lengths[0])][-1]), 2)
    own = _positive(np.stack([_mean_square(noise, int(length)) for length in at.lengths], axis=-1))
    neighbours = np.stack([_neighbours(noise, int(length)) for length in at.lengths], axis=-1)
    passing = rows * steps / at.lengths * (1 - neighbours**2) / (1 + neighbours**2)
    lasts = np.minimum(own[..., -1:] / own, 1)
    passes = (1 - lasts) ** 2 / np.maximum(passing, rows)
    long = at.lengths > base
    freedom = 1 / (lasts**2 / np.where(long, rows, rows + MODERATION) + passes)
    memory = _memory(noise)
    lasting = _own_at(own, at, base) * base * _to_infinity(memory, base)
    square = (noise**2).mean(axis=(-1, -2))
    wander = WANDER**2 * square
    short = lasting[..., None] / at.lengths
    expected = CAUTION * short + wander[..., None]
    moderated = (freedom * own + MODERATION * expected) / (freedom + MODERATION)
    trends = (trend_of(noise) ** 2).mean(axis=-1)
    expected_trend = CAUTION * lasting + wander * steps / 12
    return Spread(
        scale=scale,
        variance=_positive(np.where(long, moderated, own + wander[..., None] * MODERATION / (rows + MODERATION))),
        freedom=np.where(long, freedom + MODERATION, freedom),
        likely=np.where(long, (freedom * own + MODERATION * short) / (freedom + MODERATION), own),
        trend=_positive((rows * trends + MODERATION * expected_trend) / (rows + MODERATION)),
        trend_freedom=np.full(trends.shape, rows + MODERATION),
        sd=np.sqrt(square),
    )


def _alone(noise: np.ndarray, scale: np.ndarray, at: Looks) -> Spread:
    """Without a repeat: the noise from step to step is known, and taken to have a short memory; how far runs wander
    from each other is not, and is assumed."""
    variance, memory = _variogram(noise)
    lasting = variance * (1 + memory) / (1 - memory)
    short = variance[..., None] * _of_window(memory[..., None], at.lengths)
    wander = WANDER_ALONE**2 * variance
    steps = noise.shape[-1]
    caution = 1 + CAUTION_ALONE / steps
    return Spread(
        scale=scale,
        variance=_positive(caution * short + wander[..., None]),
        freedom=np.full((*variance.shape, len(at.lengths)), FREEDOM_ALONE),
        likely=short,
        trend=_positive(caution * lasting + wander * steps / 12),
        trend_freedom=np.full(variance.shape, FREEDOM_ALONE),
        sd=np.sqrt(variance),
    )


def window_means(curves: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    sums = np.concatenate([np.zeros((*curves.shape[:-1], 1)), np.cumsum(curves, axis=-1)], axis=-1)
    return (sums[..., start + length] - sums[..., start]) / length


def trend_of(curves: np.ndarray) -> np.ndarray:
    """The curve along a straight line of mean 0 and size 1."""
    line = np.arange(curves.shape[-1]) - (curves.shape[-1] - 1) / 2
    return curves @ (line / np.sqrt((line**2).sum()))


def shape_of_noise(curves: np.ndarray) -> np.ndarray:
    """How large noise is at each step, 1 in the mean: from the sizes of moves up and down (a drift or one jump hardly
    count there) in the quarter of the run around it, drawn to the mean where these are few."""
    rows, steps = curves.shape[-2:]
    moves = np.abs(np.diff(curves, axis=-1)).mean(axis=-2)
    half = max(4, steps // 8)
    index = np.arange(steps)
    low, high = np.maximum(index - half, 0), np.minimum(index + half, steps - 1)
    near = window_means(moves, low, high - low)
    mean = moves.mean(axis=-1, keepdims=True)
    weight = rows * (high - low)
    drawn = (weight * near + 40 * mean) / (weight + 40)
    size = drawn.mean(axis=-1, keepdims=True)
    return np.where(size > 0, drawn / np.where(size > 0, size, 1), 1.0)


def _mean_square(noise: np.ndarray, length: int) -> np.ndarray:
    starts = np.array(_starts(noise.shape[-1], length))
    return (window_means(noise, starts, np.full(len(starts), length)) ** 2).mean(axis=(-1, -2))


def _neighbours(noise: np.ndarray, length: int) -> np.ndarray:
    """The correlation of neighbouring windows, at least 0."""
    starts = np.arange(0, noise.shape[-1] - length + 1, length)
    means = window_means(noise, starts, np.full(len(starts), length))
    if len(starts) < 3:
        return np.zeros(noise.shape[:-2])
    square = (means**2).mean(axis=(-1, -2))
    products = (means[..., 1:] * means[..., :-1]).mean(axis=(-1, -2))
    return np.clip(products / _positive(square), 0, MOST_MEMORY)


def _own_at(own: np.ndarray, at: Looks, length: int) -> np.ndarray:
    return own[..., int(np.searchsorted(at.lengths, length))]


def _memory(noise: np.ndarray) -> np.ndarray:
    """The lag-1 correlation, with its bias in short curves taken off, at least 0."""
    products = (noise[..., 1:] * noise[..., :-1]).sum(axis=(-1, -2))
    squares = (noise**2).sum(axis=(-1, -2))
    count = noise.shape[-1] * noise.shape[-2]
    return np.clip(products / _positive(squares) * (1 + 3 / count), 0, MOST_MEMORY)


def _of_window(memory: np.ndarray, length: np.ndarray | int) -> np.ndarray:
    """The variance of a mean of so many steps of an AR(1) of variance 1."""
    lasting = (1 + memory) / (1 - memory)
    return (lasting - 2 * memory * (1 - memory**length) / ((1 - memory) ** 2 * length)) / length


def _to_infinity(memory: np.ndarray, length: int) -> np.ndarray:
    """How much more the steps of an endless window add up to than those of one of this length."""
    return (1 + memory) / (1 - memory) / (length * _of_window(memory, length))


_QUARTILE = NormalDist().inv_cdf(0.875)
_CUT_MEAN = 2 * (NormalDist().pdf(0) - NormalDist().pdf(_QUARTILE)) + 0.25 * _QUARTILE
"""The mean size of a normal number, where the largest quarter is cut."""
_GRID = np.linspace(0, MOST_MEMORY, 98)


def _variogram(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance and memory of an AR(1) from its moves over 1 and over k steps, of which a jump touches k.

    Curves that are equal at most steps have typical moves of 0. Then noise is what goes away and comes straight back,
    without a memory; a jump does not come back.
    """
    lag = max(2, min(8, noise.shape[-1] // 8))
    one, more = (_typical_square(noise[..., step:] - noise[..., :-step]) for step in (1, lag))
    moves = np.diff(noise, axis=-1)
    back = 2 * np.maximum(-moves[..., 1:] * moves[..., :-1], 0).mean(axis=-1)
    dust = (1e-9 * np.abs(noise).max(axis=-1)) ** 2  # what sums leave of numbers that cancel
    equal = one <= dust
    one, more = np.where(equal, np.maximum(back, dust), one), np.where(equal, np.maximum(back, dust), more)
    ratios = (1 - _GRID**lag) / (1 - _GRID)
    memory = np.interp(more / _positive(one), ratios, _GRID)
    return one / (2 * (1 - memory)), memory


def _typical_square(moves: np.ndarray) -> np.ndarray:
    """The mean square of normal numbers from their mean size, the largest quarter cut to the third quartile."""
    size = np.abs(moves)
    cut = np.minimum(size, np.quantile(size, 0.75, axis=-1, keepdims=True))
    return (cut.mean(axis=-1) / _CUT_MEAN) ** 2


def _scatter(difference: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Do the steps of the difference scatter more than those of the repeats? A t test on the logarithms of mean squared
    moves in up to 16 blocks of the run, which asks nothing of the distribution of single steps."""
    rows, steps = noise.shape[-2:]
    blocks = min(16, (steps - 1) // 6)
    if rows == 0 or blocks < 4:
        return np.zeros(difference.shape[:-1]), np.ones(difference.shape[:-1])
    length = (steps - 1) // blocks

    def logs(curves: np.ndarray) -> np.ndarray:
        moves = np.diff(curves, axis=-1)[..., : blocks * length] ** 2
        return np.log(_positive(moves.reshape(*moves.shape[:-1], blocks, length).mean(axis=-1)))

    gap = logs(difference) - logs(noise).mean(axis=-2)
    error = np.sqrt(_positive(gap.var(axis=-1, ddof=1) / blocks))
    t = gap.mean(axis=-1) / error
    freedom = np.full(t.shape, float(blocks - 1))
    excess = np.maximum(as_normal(t, freedom), 0) / two_sided(2 * SHARES["scatter"])
    return excess, np.exp(np.minimum(gap.mean(axis=-1) / 2, 100))


def _positive(values: np.ndarray) -> np.ndarray:
    """Never 0, so that identical runs divide by something."""
    return np.maximum(values, 1e-300)
