"""A model of the noise between runs of the same set-up, estimated from repeats or from the difference of two runs.

All functions work along the last axis, which is the steps. The functions accept leading axes, so that many comparisons
can be computed at once. "Memory" is the lag-1 autocorrelation of the noise; the short-memory model is AR(1). The
formulas are in docs/verdict.md.

Differences between runs are compressed by an inverse hyperbolic sine before they are averaged, so that outliers have
little weight. The difference of each pair of runs is compressed separately. The difference of two runs of the same
set-up has a symmetric distribution for any noise, so the mean of its compressed values is also 0. The difference
between a run and a mean of several runs would have a skewed distribution if the noise is skewed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SHARES = {"drift": 0.025, "trend": 0.004, "end": 0.010, "window": 0.007, "scatter": 0.004}
"""The false-alarm probability of each statistic. The probabilities add up to 5 %."""
END_PARTS = (0.025, 0.05, 0.1, 0.2, 0.4)
"""The statistic "end" tests the last steps of the run. The tested lengths are these fractions of all steps."""
MIN_STEPS = 8
"""The minimum number of common steps for the test. With fewer steps, noise and drift cannot be separated."""
MAX_MEMORY = 0.97
MODERATION = 3.0
"""The weight, in degrees of freedom, of the AR(1) estimate of the variance of long windows. The weight of the AR(1)
estimate matters only if there are few repeats."""
CAUTION = 1.5
"""The assumed ratio of the true variance of long windows to the estimate of the short-memory (AR(1)) model."""
WANDER = 0.18
"""The assumed standard deviation of the constant offset between runs, in standard deviations of the noise."""
CAUTION_ALONE = 25
"""Without a repeat, the AR(1) variance estimate is multiplied by 1 + CAUTION_ALONE / N, because the autocorrelation is
uncertain. N is the number of steps."""
MEMORY_ALONE = 36
"""Without a repeat, (MEMORY_ALONE / N)^4 is added to the factor 1 + CAUTION_ALONE / N, because a short run
underestimates a high autocorrelation. The added term is 0 if the estimated autocorrelation is below N / 50 - 0.45."""
MAX_UNSEEN = 25.0
"""The maximum of the term (MEMORY_ALONE / N)^4, which suffices for an autocorrelation of 0.9."""
WANDER_ALONE = 0.5
"""The assumed standard deviation of the constant offset between runs if there is no repeat, in noise standard
deviations."""
FREEDOM_ALONE = 10.0
LINEAR = 1.5
"""The compression is linear for differences up to about this many standard deviations of the difference of two runs.
The compression is logarithmic for larger differences."""
MAX_TAILS = 3.0
STAYS = 4
"""If A and B are equal at more than half of the steps, this many consecutive differences of one sign are not treated as
noise."""
CUT_MOVES = 4.0
"""For the estimate of the noise at each step, step-to-step moves are clipped at this multiple of the median move."""
TINY = 1e-300


@dataclass(frozen=True)
class Windows:
    """The tested windows of steps. The test uses the mean difference over `length` steps from `start` on. The last
    entry is the trend over all steps."""

    kind: tuple[str, ...]
    start: np.ndarray
    length: np.ndarray
    critical: np.ndarray
    """The critical normal deviate of each window. The false-alarm probability of a statistic is divided among its
    windows."""
    lengths: np.ndarray
    which: np.ndarray
    """The index in `lengths` of each window's length."""


@dataclass(frozen=True)
class Spread:
    """The distribution of the means over windows of each length if there is only noise. All values are in units of
    `scale`."""

    scale: np.ndarray
    """(..., N): the relative size of the noise at each step. Its mean is 1."""
    variance: np.ndarray
    """(..., lengths): the variance of window means."""
    freedom: np.ndarray
    """(..., lengths): the degrees of freedom of the variance."""
    tails: np.ndarray
    """(..., lengths): excess kurtosis, which raises the critical deviates."""
    likely: np.ndarray
    """(..., lengths): the variance of window means without safety factors."""
    trend: np.ndarray
    """(...): the variance of the trend statistic under pure noise."""
    trend_freedom: np.ndarray
    sd: np.ndarray
    """(...): the standard deviation of one run's noise at a single step, estimated from compressed differences."""
    raw_sd: np.ndarray
    """(...): the standard deviation of one run's noise at a single step, without the compression."""
    level: np.ndarray
    """(...): the standard deviation of the difference of two runs at one step, without outliers."""
    gain: np.ndarray
    """(...): the factor by which the compression scales a small difference."""

    def raised(self, at: Windows) -> np.ndarray:
        """Returns the factor (..., windows) by which heavy tails raise the critical deviates."""
        return 1 + self.tails[..., at.which] * (at.critical**2 - 3).clip(0) / 24

    def uncompressed(self, mean: np.ndarray) -> np.ndarray:
        """Returns the constant difference whose compressed value has the mean `mean`. The argument `mean` and the
        result are in units of `scale`."""
        linear = np.clip(LINEAR * self.level, TINY, 1e300)
        return linear * np.sinh(np.minimum(mean / linear, 100.0)) / self.gain


@dataclass(frozen=True)
class Compressed:
    """The difference of A and B and the residual curves of the repeats, both computed from compressed differences."""

    difference: np.ndarray
    residuals: np.ndarray
    scale: np.ndarray
    level: np.ndarray
    gain: np.ndarray


@lru_cache(maxsize=64)
def windows_for(steps: int) -> Windows:
    """Returns the tested windows of a run of N = `steps` steps. The shortest windows have N/64 steps (at least 4), and
    each further length is twice the previous one. Windows overlap by half, and one window of each length ends at the
    last step. After the overlapping windows, the result contains windows at the end of the run, a window of all steps,
    and the trend."""
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
    """Returns the normal deviate that is exceeded in either direction with probability `chance`."""
    return -NormalDist().inv_cdf(chance / 2)


def as_normal(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Returns the normal deviate that has the same tail probability as the t statistic `t` (Wallace 1959)."""
    size = np.sqrt(freedom * np.log1p(t**2 / freedom))
    return np.sign(t) * size * (8 * freedom + 1) / (8 * freedom + 3)


def as_t(deviate: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Computes the inverse of `as_normal`, for positive deviates."""
    size = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return np.sqrt(freedom * np.expm1(size**2 / freedom))


def contrasts(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean difference of B and A and one residual curve per repeat. The inputs have the shape (..., runs,
    N). If B and A do not differ, all returned curves have the noise of a single run."""
    difference = (b.mean(axis=-2) - a.mean(axis=-2)) / np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2])
    residuals = np.concatenate([_helmert(a), _helmert(b)], axis=-2)
    # Bit-identical runs have no noise, so rounding errors of the residuals are set to 0.
    rounding = 8 * np.finfo(np.float64).eps * np.abs(a).max(axis=(-1, -2), keepdims=True)
    return difference, np.where(np.abs(residuals) > rounding, residuals, 0.0)


def _helmert(runs: np.ndarray) -> np.ndarray:
    """Returns a row for each run after the first: the run minus the mean of the runs before it, scaled to the variance
    of one run. The rows are orthogonal contrasts."""
    count = runs.shape[-2]
    weights = np.zeros((count - 1, count))
    for row in range(1, count):
        weights[row - 1, :row], weights[row - 1, row] = -1 / row, 1
        weights[row - 1] /= np.sqrt(1 + 1 / row)
    return weights @ runs


def compressed(a: np.ndarray, b: np.ndarray) -> Compressed:
    """Returns the same rows as `contrasts`, but computed from compressed differences. The difference of each pair of
    runs is compressed by an inverse hyperbolic sine. Without a repeat there is no compression, because the critical
    values for this case are already conservative."""
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
    """Returns, for each run after the first, the differences of this run from all runs before it."""
    return [runs[..., k : k + 1, :] - runs[..., :k, :] for k in range(1, runs.shape[-2])]


def joined(curves: np.ndarray) -> np.ndarray:
    return curves.reshape(*curves.shape[:-2], -1)


def spread_of(of: Compressed) -> Spread:
    """Estimates the noise from the repeats. If there are no repeats, or if A and B are equal at most steps, the noise
    is estimated from the difference of A and B."""
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
    """Returns whether A and B are equal at more than half of the steps. For example, mean rewards over few responses
    are often equal in A and B. If most differences are 0, the median difference and a few repeats do not show the size
    of the noise."""
    return (difference == 0).mean(axis=-1) > 0.5


def _among_repeats(of: Compressed, at: Windows) -> Spread:
    """Estimates the noise from repeats. The variance of short windows is the variance among repeats. A run has few long
    windows, so their variance is averaged with an AR(1) extrapolation from windows of an eighth of the run."""
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
    """Estimates the noise from the difference of A and B alone. The estimate is AR(1) noise from step-to-step moves,
    plus an assumed constant offset between runs."""
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
    """Returns the projection of each curve on a straight line with mean 0 and norm 1."""
    line = np.arange(curves.shape[-1]) - (curves.shape[-1] - 1) / 2
    return curves @ (line / np.sqrt((line**2).sum()))


def shape_of_noise(curves: np.ndarray) -> np.ndarray:
    """Estimates the relative size of the noise at each step, with mean 1. The estimate uses the step-to-step moves in
    the surrounding quarter of the run, because a drift or a single jump hardly changes them. With few moves the
    estimate is shrunk to the mean."""
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
    """Returns the correlation of the means of neighbouring windows, clipped to at least 0."""
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
    """Returns the lag-1 autocorrelation of the noise, corrected for its bias in short curves and clipped to at least
    0."""
    products = (noise[..., 1:] * noise[..., :-1]).sum(axis=(-1, -2))
    squares = (noise**2).sum(axis=(-1, -2))
    count = noise.shape[-1] * noise.shape[-2]
    return np.clip(products / positive(squares) * (1 + 3 / count), 0, MAX_MEMORY)


def _of_window(memory: np.ndarray, length: np.ndarray | int) -> np.ndarray:
    """Returns the variance of a mean over `length` steps of an AR(1) process of variance 1."""
    lasting = (1 + memory) / (1 - memory)
    return (lasting - 2 * memory * (1 - memory**length) / ((1 - memory) ** 2 * length)) / length


def _to_infinity(memory: np.ndarray, length: int) -> np.ndarray:
    """Returns the long-run variance of an AR(1) process divided by `length` times the variance of a mean over `length`
    steps."""
    return (1 + memory) / (1 - memory) / (length * _of_window(memory, length))


_QUARTILE = NormalDist().inv_cdf(0.875)
_CUT_MEAN = 2 * (NormalDist().pdf(0) - NormalDist().pdf(_QUARTILE)) + 0.25 * _QUARTILE
"""The mean absolute value of a standard normal variable whose largest quarter of absolute values is clipped."""
_GRID = np.linspace(0, MAX_MEMORY, 98)


def _variogram(noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the variance and the lag-1 autocorrelation of an AR(1) process from its moves over 1 step and over k
    steps. A single jump affects at most k moves."""
    lag = max(2, min(8, noise.shape[-1] // 8))
    one, more = (typical_square(noise[..., step:] - noise[..., :-step]) for step in (1, lag))
    ratios = (1 - _GRID**lag) / (1 - _GRID)
    memory = np.interp(more / positive(one), ratios, _GRID)
    return one / (2 * (1 - memory)), memory


def _rare(curves: np.ndarray) -> np.ndarray:
    """Returns the variance of curves that are mostly 0. Sequences of STAYS or more consecutive steps with one sign are
    skipped, because only a real difference keeps its sign."""
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
    """Estimates the mean square of normally distributed values from their mean absolute value, clipped at the third
    quartile."""
    size = np.abs(moves)
    cut = np.minimum(size, np.quantile(size, 0.75, axis=-1, keepdims=True))
    return (cut.mean(axis=-1) / _CUT_MEAN) ** 2


def typical_size(values: np.ndarray) -> np.ndarray:
    """Estimates the standard deviation of normally distributed values without the influence of outliers. If most values
    are 0, the estimate is the root mean square of all values."""
    square = typical_square(values)
    return np.sqrt(np.where(square > 0, square, (values**2).mean(axis=-1)))


def positive(values: np.ndarray) -> np.ndarray:
    """Raises the values to at least TINY, so that identical runs do not cause a division by 0."""
    return np.maximum(values, TINY)
