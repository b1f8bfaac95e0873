"""Do two sides differ by more than repeats of one side do? Drift, windows, the end, the trend, the scatter, one step.

All functions take leading axes (many comparisons at once) and work along the last one, the steps. The formulas are in
docs/compare.md, and so is the table of how often this is wrong.

Differences are compressed before they are averaged, so that no distribution of noise has heavy tails. They are
compressed pair of runs by pair of runs: the difference of two runs of one kind is symmetric whatever their noise is, so
that its compressed mean is 0 too. That of a run less a mean of runs is skewed where the noise is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SHARES = {"drift": 0.025, "trend": 0.004, "end": 0.010, "window": 0.007, "scatter": 0.004}
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
MEMORY_ALONE = 36
"""And for (so many / N)^4 more, unless the memory that is seen is below N / 50 - 0.45: a long memory looks short in a
short run."""
MOST_UNSEEN = 25.0
"""A memory of 0.9 makes no more of a mean."""
WANDER_ALONE = 0.5
"""Without a repeat it stays an assumption, and is larger."""
FREEDOM_ALONE = 10.0
LINEAR = 1.5
"""A difference of two runs counts as it is up to about so many of its standard deviations, and by its logarithm
beyond."""
SPIKE_SIZE = 9.5
"""A single step is a finding only beyond so many root mean squares of all others (20 sd of one run are 14)."""
SPIKE_CHANCE = 0.025
"""And only if the tail of the others reaches it with no more than this chance, nor than half of one by their number."""
SPIKE_LINEAR = 3.0
MOST_TAILS = 3.0
STAYS = 4
"""Steps in a row on one side that are no noise, where the sides are equal at most steps."""
CUT_MOVES = 4.0
"""Larger moves than so many usual ones do not count for more in the shape of the noise."""
TINY = 1e-300


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
    tails: np.ndarray
    """(..., lengths): by how much tails that are heavier than those of a normal distribution raise what is critical."""
    likely: np.ndarray
    """(..., lengths): the variance without what caution adds to it."""
    trend: np.ndarray
    """(...): the variance of the trend."""
    trend_freedom: np.ndarray
    sd: np.ndarray
    """(...): of a single step of one run, compressed."""
    raw_sd: np.ndarray
    """(...): the same as it is."""
    level: np.ndarray
    """(...): the standard deviation of the difference of two runs at one step, of which outliers are no part."""
    gain: np.ndarray
    """(...): how much of a small difference is left by the compression."""

    def raised(self, at: Looks) -> np.ndarray:
        """(..., looks): the factor of their critical deviates."""
        return 1 + self.tails[..., at.which] * (at.critical**2 - 3).clip(0) / 24

    def uncompressed(self, mean: np.ndarray) -> np.ndarray:
        """The difference, alike at each step, whose compressed mean is this; both in units of the scale."""
        linear = np.clip(LINEAR * self.level, TINY, 1e300)
        return linear * np.sinh(np.minimum(mean / linear, 100.0)) / self.gain


@dataclass(frozen=True)
class Compressed:
    """What `contrasts` gives, of compressed differences."""

    difference: np.ndarray
    residuals: np.ndarray
    scale: np.ndarray
    level: np.ndarray
    gain: np.ndarray


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
    spike: np.ndarray
    """(...): the same for the single step that differs most; its index is `spike_at`."""
    spike_at: np.ndarray
    spike_noise: np.ndarray
    """(...): how large the difference of the sides at that step may be."""

    @property
    def found(self) -> np.ndarray:
        return (self.excess.max(axis=-1) > 1) | (self.scatter > 1) | (self.spike > 1)


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


def compressed(a: np.ndarray, b: np.ndarray) -> Compressed:
    """The contrasts of both sides, of differences of single runs that are compressed by an inverse hyperbolic sine.
    Without a repeat they stay as they are: a single difference is symmetric, and what is critical for it is cautious
    enough."""
    plain, noise = contrasts(a, b)
    scale = shape_of_noise(np.concatenate([noise, plain[..., None, :]], axis=-2))
    if not noise.shape[-2]:
        one = np.ones(plain.shape[:-1])
        return Compressed(plain, noise, scale, np.full(one.shape, np.inf), one)
    across = (b[..., :, None, :] - a[..., None, :, :]).reshape(*a.shape[:-2], -1, a.shape[-1])
    inside = [*_within(a), *_within(b)]
    known = np.concatenate(inside, axis=-2)
    level = typical_size(_joined(known / scale[..., None, :]))
    level = np.where(level > 0, level, typical_size(_joined(across / scale[..., None, :])))
    linear = np.maximum(LINEAR * level[..., None] * scale, TINY)[..., None, :]

    def mean(pairs: np.ndarray) -> np.ndarray:
        return (linear * np.arcsinh(pairs / linear)).mean(axis=-2)

    difference = mean(across) / np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2])
    residuals = np.stack([mean(each) / np.sqrt(1 + 1 / each.shape[-2]) for each in inside], axis=-2)
    gain = (1 / np.sqrt(1 + (known / linear) ** 2)).mean(axis=(-1, -2))
    return Compressed(difference, residuals, scale, level, gain)


def _within(runs: np.ndarray) -> list[np.ndarray]:
    """Of each run after the first: its differences from all runs before it."""
    return [runs[..., k : k + 1, :] - runs[..., :k, :] for k in range(1, runs.shape[-2])]


def _joined(curves: np.ndarray) -> np.ndarray:
    return curves.reshape(*curves.shape[:-2], -1)


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


def score(a: np.ndarray, b: np.ndarray) -> tuple[SeriesScores, Spread]:
    """How far each look at the difference of the sides (..., runs, N) lies from what repeats do."""
    at = looks(a.shape[-1])
    of = compressed(a, b)
    spread = spread_of(of)
    scaled = of.difference / of.scale
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
    scatter = _scatter(scaled, of.residuals / of.scale[..., None, :])
    critical = at.critical * spread.raised(at)
    return SeriesScores(deviates, np.abs(deviates) / critical, *scatter, *_spike(a, b, of.scale)), spread


def spread_of(of: Compressed) -> Spread:
    """From repeats where there are some and most steps differ; else from what is seen inside the difference."""
    at = looks(of.difference.shape[-1])
    alone = _alone(of, at)
    if of.residuals.shape[-2] == 0:
        return alone
    among, equal = _among_repeats(of, at), mostly_equal(of.difference)
    mixed = {}
    for each in fields(Spread):
        one, other = getattr(alone, each.name), getattr(among, each.name)
        mixed[each.name] = np.where(equal.reshape(equal.shape + (1,) * (one.ndim - equal.ndim)), one, other)
    return Spread(**mixed)


def mostly_equal(difference: np.ndarray) -> np.ndarray:
    """Whether the sides have the same value at most steps, as rewards of few responses do. Their noise is rare: it is
    not seen in the size of a usual difference, nor in a few repeats."""
    return (difference == 0).mean(axis=-1) > 0.5


def _among_repeats(of: Compressed, at: Looks) -> Spread:
    """Short windows: what those of the repeats do. Long ones, of which there are few: moderated by what the windows of
    an eighth of the run make one expect of them if noise has a short memory."""
    noise = of.residuals / of.scale[..., None, :]
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
        scale=of.scale,
        variance=_positive(np.where(long, moderated, own + wander[..., None] * MODERATION / (rows + MODERATION))),
        freedom=np.where(long, freedom + MODERATION, freedom),
        tails=np.stack([_tails(noise, int(length)) for length in at.lengths], axis=-1),
        likely=np.where(long, (freedom * own + MODERATION * short) / (freedom + MODERATION), own),
        trend=_positive((rows * trends + MODERATION * expected_trend) / (rows + MODERATION)),
        trend_freedom=np.full(trends.shape, rows + MODERATION),
        sd=np.sqrt(square),
        raw_sd=np.sqrt(square) / of.gain,
        level=of.level,
        gain=of.gain,
    )


def _alone(of: Compressed, at: Looks) -> Spread:
    """Without a repeat: the noise from step to step is known, and taken to have a short memory; how far runs wander
    from each other is not, and is assumed."""
    noise = of.difference / of.scale
    variance, memory = _variogram(noise)
    equal = mostly_equal(noise)
    rare = _rare(np.concatenate([noise[..., None, :], of.residuals / of.scale[..., None, :]], axis=-2))
    variance, memory = np.where(equal, rare, variance), np.where(equal, 0.0, memory)
    lasting = variance * (1 + memory) / (1 - memory)
    short = variance[..., None] * _of_window(memory[..., None], at.lengths)
    steps = noise.shape[-1]
    unseen = min((MEMORY_ALONE / steps) ** 4, MOST_UNSEEN) * np.clip(10 * (memory + 0.45 - steps / 50), 0, 1)
    caution = (1 + CAUTION_ALONE / steps + unseen)[..., None]
    wander = WANDER_ALONE**2 * variance * (1 + unseen)
    return Spread(
        scale=of.scale,
        variance=_positive(caution * short + wander[..., None]),
        freedom=np.full((*variance.shape, len(at.lengths)), FREEDOM_ALONE),
        tails=np.zeros((*variance.shape, len(at.lengths))),
        likely=short,
        trend=_positive(caution[..., 0] * lasting + wander * steps / 12),
        trend_freedom=np.full(variance.shape, FREEDOM_ALONE),
        sd=np.sqrt(variance),
        raw_sd=np.sqrt(variance) / of.gain,
        level=of.level,
        gain=of.gain,
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
    sizes = np.abs(np.diff(curves, axis=-1))
    usual = np.median(sizes, axis=(-1, -2), keepdims=True)
    moves = np.where(usual > 0, np.minimum(sizes, CUT_MOVES * usual), sizes).mean(axis=-2)
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


def _tails(noise: np.ndarray, length: int) -> np.ndarray:
    """The excess kurtosis of window means, at least 0: Cornish and Fisher's correction of quantiles takes it."""
    starts = np.array(_starts(noise.shape[-1], length))
    means = window_means(noise, starts, np.full(len(starts), length))
    square = (means**2).mean(axis=(-1, -2))
    return np.clip((means**4).mean(axis=(-1, -2)) / _positive(square**2) - 3, 0, MOST_TAILS)


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
    """Variance and memory of an AR(1) from its moves over 1 and over k steps, of which a jump touches k."""
    lag = max(2, min(8, noise.shape[-1] // 8))
    one, more = (_typical_square(noise[..., step:] - noise[..., :-step]) for step in (1, lag))
    ratios = (1 - _GRID**lag) / (1 - _GRID)
    memory = np.interp(more / _positive(one), ratios, _GRID)
    return one / (2 * (1 - memory)), memory


def _rare(curves: np.ndarray) -> np.ndarray:
    """The variance of curves that are 0 at most steps, without stretches in which they stay on one side: noise comes
    and goes, a departure stays."""
    sign = np.sign(curves)
    count = curves.shape[-1] - STAYS + 1
    stays = np.logical_and.reduce([sign[..., k : k + count] == sign[..., :count] for k in range(STAYS)])
    stays &= sign[..., :count] != 0
    kept = np.ones(curves.shape, dtype=bool)
    for k in range(STAYS):
        kept[..., k : k + count] &= ~stays
    dust = (1e-9 * np.abs(curves).max(axis=(-1, -2))) ** 2  # what sums leave of numbers that cancel
    return np.maximum((curves**2 * kept).mean(axis=(-1, -2)), dust)


def _typical_square(moves: np.ndarray) -> np.ndarray:
    """The mean square of normal numbers from their mean size, the largest quarter cut to the third quartile."""
    size = np.abs(moves)
    cut = np.minimum(size, np.quantile(size, 0.75, axis=-1, keepdims=True))
    return (cut.mean(axis=-1) / _CUT_MEAN) ** 2


def typical_size(values: np.ndarray) -> np.ndarray:
    """The standard deviation that normal numbers without outliers would have; where most are 0, that of all."""
    square = _typical_square(values)
    return np.sqrt(np.where(square > 0, square, (values**2).mean(axis=-1)))


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
    excess = np.where(mostly_equal(difference), 0.0, excess)
    return excess, np.exp(np.minimum(gap.mean(axis=-1) / 2, 100))


def _spike(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Is one step too far off? Of heavy-tailed noise one always is, so the tail is taken from all other steps: above
    the k-th largest, sizes that are compressed as logarithms are fall off exponentially (Hill 1975), and the gap below
    the largest has k (chance^(-1/k) - 1) times their mean excess with that chance (Renyi 1953)."""
    difference, residuals = contrasts(a, b)
    equal = mostly_equal(difference)
    scale = np.where(equal[..., None], 1.0, scale)  # few steps differ: there is no shape to see
    sizes = np.abs(difference / scale)
    at = sizes.argmax(axis=-1)
    largest = sizes.max(axis=-1)
    others = sizes.copy()
    np.put_along_axis(others, at[..., None], 0.0, axis=-1)
    others = np.concatenate([others, _joined(np.abs(residuals / scale[..., None, :]))], axis=-1)
    count = others.shape[-1] - 1
    usual = np.maximum(np.sqrt((others**2).sum(axis=-1) / count), TINY)
    k = min(max(8, count // 10), 40, count - 1)
    top = -np.partition(-others, k, axis=-1)[..., : k + 1] / usual[..., None]
    tail = np.arcsinh(top / SPIKE_LINEAR)
    excess = tail[..., :k].mean(axis=-1) - tail[..., k]
    gap = excess * k * (min(SPIKE_CHANCE, 0.5 / count) ** (-1 / k) - 1)
    bound = np.maximum(SPIKE_SIZE, SPIKE_LINEAR * np.sinh(np.minimum(tail.max(axis=-1) + gap, 100))) * usual
    own = _own_moves(a, at)
    bound = np.where(equal, np.where(own > 0, np.maximum(bound, SPIKE_SIZE * own), np.inf), bound)
    unit = np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2]) * np.take_along_axis(scale, at[..., None], -1)[..., 0]
    with np.errstate(over="ignore"):
        return largest / np.maximum(bound, TINY), at, bound * unit


def _own_moves(runs: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The noise of the curves themselves from their moves, but for the step `at`; 0 where most steps have none."""
    moves = np.abs(np.diff(runs, axis=-1))
    step = np.arange(moves.shape[-1])
    near = (step == at[..., None]) | (step == at[..., None] - 1)
    sizes = np.where(near[..., None, :], 0.0, moves)
    return np.where((sizes > 0).mean(axis=(-1, -2)) > 0.5, np.sqrt(_typical_square(_joined(sizes)) / 2), 0.0)


def _positive(values: np.ndarray) -> np.ndarray:
    """Never 0, so that identical runs divide by something."""
    return np.maximum(values, TINY)
