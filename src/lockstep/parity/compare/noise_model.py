"""A model of the noise between runs of the same kind, estimated from repeats or from the difference of two runs.

All functions accept leading axes (many comparisons at once) and work along the last axis, the steps. "Memory" is the
lag-1 autocorrelation of the noise; the short-memory model is AR(1). docs/compare.md contains the formulas.

Differences are compressed before they are averaged, so that heavy tails of the noise have little weight. Each pair of
runs is compressed separately: the difference of two runs of the same kind has a symmetric distribution for any noise,
so the mean of its compressed values is also 0. The difference between a run and a mean of runs would be skewed if the
noise is skewed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SHARES = {"drift": 0.025, "trend": 0.004, "end": 0.010, "window": 0.007, "scatter": 0.004}
"""The false-alarm probability of each statistic; together they have 5 %."""
END_PARTS = (0.025, 0.05, 0.1, 0.2, 0.4)
"""The tested ends of the run: the last steps, as fractions of all steps."""
MIN_STEPS = 8
"""Minimum number of common steps: with fewer, noise and drift cannot be separated."""
MAX_MEMORY = 0.97
MODERATION = 3.0
"""The weight of the short-memory estimate for long windows, in degrees of freedom, if there are few repeats."""
CAUTION = 1.5
"""Prior of the ratio of the variance of long windows to its short-memory estimate."""
WANDER = 0.18
"""Prior of the constant offset between runs, in noise standard deviations."""
CAUTION_ALONE = 25
"""Without a repeat, the short-memory estimate is multiplied by 1 + CAUTION_ALONE / N, because memory is uncertain."""
MEMORY_ALONE = 36
"""(MEMORY_ALONE / N)^4 is added to that factor, unless the estimated memory is below N / 50 - 0.45, because a long
memory looks short in a short run."""
MAX_UNSEEN = 25.0
"""The maximum of the term (MEMORY_ALONE / N)^4; a memory of 0.9 needs no more."""
WANDER_ALONE = 0.5
"""The assumed constant offset if there is no repeat."""
FREEDOM_ALONE = 10.0
LINEAR = 1.5
"""The compression is linear up to about this many standard deviations of a difference of two runs, and logarithmic
beyond."""
MAX_TAILS = 3.0
STAYS = 4
"""If the sides are equal at more than half of the steps, this many differences of one sign in a row are not noise."""
CUT_MOVES = 4.0
"""When the shape of the noise is estimated, moves are clipped at this multiple of the median move."""
TINY = 1e-300


@dataclass(frozen=True)
class Windows:
    """The tested windows: means over `length` steps from `start` on; the last entry is the trend over all steps."""

    kind: tuple[str, ...]
    start: np.ndarray
    length: np.ndarray
    critical: np.ndarray
    """The critical normal deviate of each window; the windows of a statistic share its probability of a false alarm."""
    lengths: np.ndarray
    which: np.ndarray
    """The index of each window's length among `lengths`."""


@dataclass(frozen=True)
class Spread:
    """The distribution of window means of each length under pure noise, in units of the scale."""

    scale: np.ndarray
    """(..., N): the size of the noise at each step, with mean 1."""
    variance: np.ndarray
    """(..., lengths): the variance of window means."""
    freedom: np.ndarray
    """(..., lengths): the degrees of freedom of the variance."""
    tails: np.ndarray
    """(..., lengths): excess kurtosis, which raises the critical deviates."""
    likely: np.ndarray
    """(..., lengths): the variance without safety margins."""
    trend: np.ndarray
    """(...): the variance of the trend."""
    trend_freedom: np.ndarray
    sd: np.ndarray
    """(...): the standard deviation of a single step of one run, from compressed differences."""
    raw_sd: np.ndarray
    """(...): the standard deviation of a single step of one run, from uncompressed differences."""
    level: np.ndarray
    """(...): the standard deviation of the difference of two runs at one step, without outliers."""
    gain: np.ndarray
    """(...): the factor by which the compression scales a small difference."""

    def raised(self, at: Windows) -> np.ndarray:
        """Returns (..., windows): the factor for the critical deviates."""
        return 1 + self.tails[..., at.which] * (at.critical**2 - 3).clip(0) / 24

    def uncompressed(self, mean: np.ndarray) -> np.ndarray:
        """Returns the constant difference whose compressed mean is `mean`; both in units of the scale."""
        linear = np.clip(LINEAR * self.level, TINY, 1e300)
        return linear * np.sinh(np.minimum(mean / linear, 100.0)) / self.gain


@dataclass(frozen=True)
class Compressed:
    """The difference of the sides and the residual curves of the repeats, from compressed differences."""

    difference: np.ndarray
    residuals: np.ndarray
    scale: np.ndarray
    level: np.ndarray
    gain: np.ndarray


@lru_cache(maxsize=64)
def windows_for(steps: int) -> Windows:
    """Returns windows of N/64 steps (at least 4) and of doubled lengths, overlapping by half, with one at the end; then
    the ends of the run, all steps, and the trend."""
    lengths = [max(4, round(steps / 64))]
    while lengths[-1] * 2 <= steps / 2:
        lengths.append(lengths[-1] * 2)
    windows = [("window", start, length) for length in lengths for start in window_starts(steps, length)]
    ends = sorted({max(2, round(part * steps)) for part in END_PARTS})
    rest = [*(("end", steps - length, length) for length in ends), ("drift", 0, steps), ("trend", 0, steps)]
    every = [*windows, *rest]
    shares = [
        SHARES["window"] / len(lengths) / len(window_starts(steps, length))
        if kind == "window"
        else SHARES[kind] / (len(ends) if kind == "end" else 1)
        for kind, _, length in every
    ]
    sizes = np.array([length for _, _, length in every])
    distinct, which = np.unique(sizes, return_inverse=True)
    return Windows(
        kind=tuple(kind for kind, _, _ in every),
        start=np.array([start for _, start, _ in every]),
        length=sizes,
        critical=np.array([two_sided(share) for share in shares]),
        lengths=distinct,
        which=which,
    )


def window_starts(steps: int, length: int) -> list[int]:
    return sorted({*range(0, steps - length + 1, max(1, length // 2)), steps - length})


def two_sided(chance: float) -> float:
    """Returns the normal deviate that is exceeded in either direction with this probability."""
    return -NormalDist().inv_cdf(chance / 2)


def as_normal(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Returns the normal deviate with the same tail probability as this t (Wallace 1959)."""
    size = np.sqrt(freedom * np.log1p(t**2 / freedom))
    return np.sign(t) * size * (8 * freedom + 1) / (8 * freedom + 3)


def as_t(deviate: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Computes the inverse of `as_normal`, for positive deviates."""
    size = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return np.sqrt(freedom * np.expm1(size**2 / freedom))


def contrasts(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the difference of the sides (..., runs, N) and one residual curve per repeat. Without a real difference
    all of them have the noise of a single run."""
    difference = (b.mean(axis=-2) - a.mean(axis=-2)) / np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2])
    residuals = np.concatenate([_helmert(a), _helmert(b)], axis=-2)
    # Bit-identical runs have no noise, so the rounding of these sums is removed.
    rounding = 8 * np.finfo(np.float64).eps * np.abs(a).max(axis=(-1, -2), keepdims=True)
    return difference, np.where(np.abs(residuals) > rounding, residuals, 0.0)


def _helmert(runs: np.ndarray) -> np.ndarray:
    """Returns run k minus the mean of the runs before it, scaled to the variance of one run, as orthogonal rows."""
    count = runs.shape[-2]
    weights = np.zeros((count - 1, count))
    for row in range(1, count):
        weights[row - 1, :row], weights[row - 1, row] = -1 / row, 1
        weights[row - 1] /= np.sqrt(1 + 1 / row)
    return weights @ runs


def compressed(a: np.ndarray, b: np.ndarray) -> Compressed:
    """Returns compressed `contrasts`. Differences of single runs are compressed by an inverse hyperbolic sine.
    Without a repeat there is no compression: a single difference is symmetric, and its critical value is cautious
    enough."""
    plain, noise = contrasts(a, b)
    scale = shape_of_noise(np.concatenate([noise, plain[..., None, :]], axis=-2))
    if not noise.shape[-2]:
        one = np.ones(plain.shape[:-1])
        return Compressed(plain, noise, scale, np.full(one.shape, np.inf), one)
    across = (b[..., :, None, :] - a[..., None, :, :]).reshape(*a.shape[:-2], -1, a.shape[-1])
    inside = [*_within(a), *_within(b)]
    repeat_pairs = np.concatenate(inside, axis=-2)
    level = typical_size(joined(repeat_pairs / scale[..., None, :]))
    level = np.where(level > 0, level, typical_size(joined(across / scale[..., None, :])))
    linear = np.maximum(LINEAR * level[..., None] * scale, TINY)[..., None, :]

    def mean(pairs: np.ndarray) -> np.ndarray:
        return (linear * np.arcsinh(pairs / linear)).mean(axis=-2)

    difference = mean(across) / np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2])
    residuals = np.stack([mean(each) / np.sqrt(1 + 1 / each.shape[-2]) for each in inside], axis=-2)
    gain = (1 / np.sqrt(1 + (repeat_pairs / linear) ** 2)).mean(axis=(-1, -2))
    return Compressed(difference, residuals, scale, level, gain)


def _within(runs: np.ndarray) -> list[np.ndarray]:
    """Returns for each run after the first its differences from all runs before it."""
    return [runs[..., k : k + 1, :] - runs[..., :k, :] for k in range(1, runs.shape[-2])]


def joined(curves: np.ndarray) -> np.ndarray:
    return curves.reshape(*curves.shape[:-2], -1)


def spread_of(of: Compressed) -> Spread:
    """Estimates the spread from the repeats, or from the difference if there are none or the sides are mostly equal."""
    at = windows_for(of.difference.shape[-1])
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
    """Returns whether the sides are equal at more than half of the steps, like rewards of few responses. Noise is rare
    there, so neither the median difference nor a few repeats reveal it."""
    return (difference == 0).mean(axis=-1) > 0.5


def _among_repeats(of: Compressed, at: Windows) -> Spread:
    """Estimates short windows by the variance among repeats. Long windows, of which there are few, are moderated by an
    extrapolation from windows of an eighth of the run, which assumes a short memory."""
    noise = of.residuals / of.scale[..., None, :]
    rows, steps = noise.shape[-2:]
    base = max(int(at.lengths[at.lengths <= max(steps / 8, at.lengths[0])][-1]), 2)
    observed = positive(np.stack([_mean_square(noise, int(length)) for length in at.lengths], axis=-1))
    neighbours = np.stack([_neighbours(noise, int(length)) for length in at.lengths], axis=-1)
    passing = rows * steps / at.lengths * (1 - neighbours**2) / (1 + neighbours**2)
    lasts = np.minimum(observed[..., -1:] / observed, 1)
    passes = (1 - lasts) ** 2 / np.maximum(passing, rows)
    long = at.lengths > base
    freedom = 1 / (lasts**2 / np.where(long, rows, rows + MODERATION) + passes)
    memory = _memory(noise)
    lasting = _observed_at(observed, at, base) * base * _to_infinity(memory, base)
    square = (noise**2).mean(axis=(-1, -2))
    wander = WANDER**2 * square
    short = lasting[..., None] / at.lengths
    expected = CAUTION * short + wander[..., None]
    moderated = (freedom * observed + MODERATION * expected) / (freedom + MODERATION)
    trends = (trend_of(noise) ** 2).mean(axis=-1)
    expected_trend = CAUTION * lasting + wander * steps / 12
    return Spread(
        scale=of.scale,
        variance=positive(np.where(long, moderated, observed + wander[..., None] * MODERATION / (rows + MODERATION))),
        freedom=np.where(long, freedom + MODERATION, freedom),
        tails=np.stack([_tails(noise, int(length)) for length in at.lengths], axis=-1),
        likely=np.where(long, (freedom * observed + MODERATION * short) / (freedom + MODERATION), observed),
        trend=positive((rows * trends + MODERATION * expected_trend) / (rows + MODERATION)),
        trend_freedom=np.full(trends.shape, rows + MODERATION),
        sd=np.sqrt(square),
        raw_sd=np.sqrt(square) / of.gain,
        level=of.level,
        gain=of.gain,
    )


def _alone(of: Compressed, at: Windows) -> Spread:
    """Estimates the spread without a repeat: the noise from step to step with a short memory, plus an assumed constant
    offset between runs."""
    noise = of.difference / of.scale
    variance, memory = _variogram(noise)
    equal = mostly_equal(noise)
    rare = _rare(np.concatenate([noise[..., None, :], of.residuals / of.scale[..., None, :]], axis=-2))
    variance, memory = np.where(equal, rare, variance), np.where(equal, 0.0, memory)
    lasting = variance * (1 + memory) / (1 - memory)
    short = variance[..., None] * _of_window(memory[..., None], at.lengths)
    steps = noise.shape[-1]
    unseen = min((MEMORY_ALONE / steps) ** 4, MAX_UNSEEN) * np.clip(10 * (memory + 0.45 - steps / 50), 0, 1)
    caution = (1 + CAUTION_ALONE / steps + unseen)[..., None]
    wander = WANDER_ALONE**2 * variance * (1 + unseen)
    return Spread(
        scale=of.scale,
        variance=positive(caution * short + wander[..., None]),
        freedom=np.full((*variance.shape, len(at.lengths)), FREEDOM_ALONE),
        tails=np.zeros((*variance.shape, len(at.lengths))),
        likely=short,
        trend=positive(caution[..., 0] * lasting + wander * steps / 12),
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
    """Projects the curves on a straight line with mean 0 and norm 1."""
    line = np.arange(curves.shape[-1]) - (curves.shape[-1] - 1) / 2
    return curves @ (line / np.sqrt((line**2).sum()))


def shape_of_noise(curves: np.ndarray) -> np.ndarray:
    """Estimates the size of the noise at each step, with mean 1, from the step-to-step moves in the surrounding quarter
    of the run (a drift or a single jump hardly changes them). With few moves it is shrunk to the mean."""
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
    starts = np.array(window_starts(noise.shape[-1], length))
    return (window_means(noise, starts, np.full(len(starts), length)) ** 2).mean(axis=(-1, -2))


def _tails(noise: np.ndarray, length: int) -> np.ndarray:
    """Returns the excess kurtosis of window means, at least 0, for the Cornish-Fisher correction of quantiles."""
    starts = np.array(window_starts(noise.shape[-1], length))
    means = window_means(noise, starts, np.full(len(starts), length))
    square = (means**2).mean(axis=(-1, -2))
    return np.clip((means**4).mean(axis=(-1, -2)) / positive(square**2) - 3, 0, MAX_TAILS)


def _neighbours(noise: np.ndarray, length: int) -> np.ndarray:
    """Returns the correlation of neighbouring windows, at least 0."""
    starts = np.arange(0, noise.shape[-1] - length + 1, length)
    means = window_means(noise, starts, np.full(len(starts), length))
    if len(starts) < 3:
        return np.zeros(noise.shape[:-2])
    square = (means**2).mean(axis=(-1, -2))
    products = (means[..., 1:] * means[..., :-1]).mean(axis=(-1, -2))
    return np.clip(products / positive(square), 0, MAX_MEMORY)


def _observed_at(observed: np.ndarray, at: Windows, length: int) -> np.ndarray:
    return observed[..., int(np.searchsorted(at.lengths, length))]


def _memory(noise: np.ndarray) -> np.ndarray:
    """Returns the lag-1 correlation, corrected for its bias in short curves, at least 0."""
    products = (noise[..., 1:] * noise[..., :-1]).sum(axis=(-1, -2))
    squares = (noise**2).sum(axis=(-1, -2))
    count = noise.shape[-1] * noise.shape[-2]
    return np.clip(products / positive(squares) * (1 + 3 / count), 0, MAX_MEMORY)


def _of_window(memory: np.ndarray, length: np.ndarray | int) -> np.ndarray:
    """Returns the variance of a mean over `length` steps of an AR(1) process of variance 1."""
    lasting = (1 + memory) / (1 - memory)
    return (lasting - 2 * memory * (1 - memory**length) / ((1 - memory) ** 2 * length)) / length


def _to_infinity(memory: np.ndarray, length: int) -> np.ndarray:
    """Returns the long-run variance divided by that of a window of this length."""
    return (1 + memory) / (1 - memory) / (length * _of_window(memory, length))


_QUARTILE = NormalDist().inv_cdf(0.875)
_CUT_MEAN = 2 * (NormalDist().pdf(0) - NormalDist().pdf(_QUARTILE)) + 0.25 * _QUARTILE
"""The mean absolute value of a standard normal number, with the largest quarter clipped."""
_GRID = np.linspace(0, MAX_MEMORY, 98)


def _variogram(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimates variance and memory of an AR(1) process from its moves over 1 and k steps; a jump affects k moves."""
    lag = max(2, min(8, noise.shape[-1] // 8))
    one, more = (typical_square(noise[..., step:] - noise[..., :-step]) for step in (1, lag))
    ratios = (1 - _GRID**lag) / (1 - _GRID)
    memory = np.interp(more / positive(one), ratios, _GRID)
    return one / (2 * (1 - memory)), memory


def _rare(curves: np.ndarray) -> np.ndarray:
    """Returns the variance of curves that are mostly 0. Long spans with one sign are left out, because noise comes and
    goes and a real difference stays."""
    sign = np.sign(curves)
    count = curves.shape[-1] - STAYS + 1
    stays = np.logical_and.reduce([sign[..., k : k + count] == sign[..., :count] for k in range(STAYS)])
    stays &= sign[..., :count] != 0
    kept = np.ones(curves.shape, dtype=bool)
    for k in range(STAYS):
        kept[..., k : k + count] &= ~stays
    dust = (1e-9 * np.abs(curves).max(axis=(-1, -2))) ** 2  # rounding errors of sums that cancel
    return np.maximum((curves**2 * kept).mean(axis=(-1, -2)), dust)


def typical_square(moves: np.ndarray) -> np.ndarray:
    """Estimates the mean square of normal numbers from their mean absolute value clipped at the third quartile."""
    size = np.abs(moves)
    cut = np.minimum(size, np.quantile(size, 0.75, axis=-1, keepdims=True))
    return (cut.mean(axis=-1) / _CUT_MEAN) ** 2


def typical_size(values: np.ndarray) -> np.ndarray:
    """Estimates the standard deviation of normal numbers without outliers, or of all numbers if most are 0."""
    square = typical_square(values)
    return np.sqrt(np.where(square > 0, square, (values**2).mean(axis=-1)))


def positive(values: np.ndarray) -> np.ndarray:
    """Raises the values to at least TINY, so that identical runs do not cause a division by 0."""
    return np.maximum(values, TINY)
