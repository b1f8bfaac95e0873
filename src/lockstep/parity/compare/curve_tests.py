"""Tests whether run B differs from run A by more than repeats of one run differ, and computes the power of this test.

The test examines the difference of the curves: its drift, windows of steps, the end of the run, its trend, its scatter
and single steps. Without repeats, the test also examines whether the curves move in opposite directions. The formulas
and the measured error rates are in docs/verdict.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lockstep.parity.compare.align_curves import Pair, values_at
from lockstep.parity.compare.comparison import Finding, Power
from lockstep.parity.compare.logs.log_curves import Series
from lockstep.parity.compare.noise_model import (
    CAUTION,
    MIN_STEPS,
    MODERATION,
    SHARES,
    TINY,
    WANDER,
    Spread,
    Windows,
    as_normal,
    as_t,
    compressed,
    contrasts,
    joined,
    mostly_equal,
    positive,
    spread_of,
    trend_of,
    two_sided,
    typical_square,
    window_means,
    windows_for,
)

MAX_MISSING = 0.05
"""A repeat run is not used if it lacks more consecutive steps than this fraction of the common steps of A and B."""
MEMORY_OF_FEW = 5.5
"""The factor by which noise with a lag-1 autocorrelation of 0.9 raises the t statistic of a mean over up to seven
steps."""
LARGEST = 1e6
"""The maximum reported ratio of a statistic to its critical value. This ratio is also reported if the noise is exactly
0."""
SPIKE_SIZE = 9.5
"""The difference at a single step is significant only if it exceeds this multiple of the root mean square of the
differences at all other steps."""
SPIKE_CHANCE = 0.025
"""The difference at a single step is significant only if it is improbable by the estimated tail of all other steps: its
probability must be at most this value and at most 0.5 / (number of steps)."""
SPIKE_LINEAR = 3.0
OPPOSED_CHANCE = 0.005
"""The false-alarm probability of the test for opposed moves, which runs only without repeats. Without repeats, all
other statistics together have a false-alarm probability of 4.6 %."""
FEWER_MOVES = 1.5
"""The number of step-to-step moves is divided by this factor, because moves are correlated. Neighbouring moves share a
step, so their correlation is -1/2 if the noise is uncorrelated. With a correlation of -1/2, n moves have the
information of n / (1 + 2 / 4) independent moves (Bartlett 1935). If the noise is autocorrelated, n moves have the
information of more than n / 1.5 independent moves."""
SURE = NormalDist().inv_cdf(0.95)
LATE = 0.05
"""The reported power assumes that a late collapse affects this fraction of all steps, at the end of the run."""
DEEP = 10
"""The latest detectable step is reported for a collapse of this depth, in noise standard deviations."""
ROOM_ALONE = 1.35
"""A safety factor for runs without repeats. Without repeats, the noise is estimated from A and B, and an error in one
run increases this estimate."""
NO_NOISE = 1e-100
"""Noise below this value is treated as 0."""
MARGIN = 0.85
"""A safety factor for the recommended number of repeats and steps, because the noise is estimated from few runs."""
MAX_REPEATS = 8
MAX_TIMES_LONGER = 16


@dataclass(frozen=True)
class Examined:
    """The result of the statistical test. `repeats` is the number of usable repeat runs. `copies` is the number of
    repeats that are not used because they equal another run of their side. `spread` and `power` are None if there are
    too few steps."""

    steps: np.ndarray
    repeats: int
    findings: list[Finding]
    spread: Spread | None = None
    power: Power | None = None
    copies: int = 0

    def suffices(self, limit: float) -> Wanted | None:
        assert self.power is not None
        assert self.spread is not None
        return would_suffice(self.power, self.spread, len(self.steps), limit)


def examine(pair: Pair, a_repeats: Sequence[Series], b_repeats: Sequence[Series]) -> Examined:
    """Compares the runs of B with the runs of A, on the steps at which A, B and all usable repeats have finite
    values."""
    steps = pair.steps[pair.finite]
    if len(steps) < MIN_STEPS:
        return Examined(steps, 0, _of_few(steps, (pair.b - pair.a)[pair.finite]))
    of_a, of_b = (_covering(repeats, steps) for repeats in (a_repeats, b_repeats))
    a, b = np.stack([pair.a[pair.finite], *of_a]), np.stack([pair.b[pair.finite], *of_b])
    shared = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    if not _covers(shared):
        a, b, shared = a[:1], b[:1], np.ones(len(steps), dtype=bool)
    steps, a, b = steps[shared], a[:, shared], b[:, shared]
    given = len(a) + len(b)
    a, b = _distinct(a), _distinct(b)
    scores, spread = score(a, b)
    runs = (len(a), len(b))
    found = _window_findings(steps, b.mean(axis=0) - a.mean(axis=0), scores, spread, runs)
    if sum(runs) == 2:
        found += _opposed(steps, a[0], b[0])
    drift = float((b[:, None] - a).mean())
    return Examined(steps, sum(runs) - 2, found, spread, power_of(spread, steps, runs, drift), given - sum(runs))


def opposition(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns the correlation of two curves' step-to-step moves, and a ratio that exceeds 1 if the correlation is
    significantly below 0.

    Two runs of one recipe follow a common curve with independent noise, so the expected correlation of their moves is
    at least 0. The correlation is negative if the step counts are off by one, or if the data order differs.
    """
    x, y = (moves - moves.mean() for moves in (np.diff(a), np.diff(b)))
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    freedom = len(x) / FEWER_MOVES - 2
    if size == 0 or freedom <= 0:
        return 0.0, 0.0
    correlation = float((x * y).sum()) / size
    t = correlation * np.sqrt(freedom / max(1 - correlation**2, 1e-12))
    return correlation, float(as_normal(np.array(-t), np.array(freedom))) / NormalDist().inv_cdf(1 - OPPOSED_CHANCE)


def _opposed(steps: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Finding]:
    """Returns a list with one `Finding` if the curves significantly move in opposite directions, else an empty list.
    The test for opposed moves needs no repeats, because noise does not make curves move in opposite directions."""
    correlation, excess = opposition(a, b)
    first, last = int(steps[0]), int(steps[-1])
    return [Finding("opposed", first, last, correlation, 0.0, min(excess, LARGEST))] if excess > 1 else []


def _covering(repeats: Sequence[Series], steps: np.ndarray) -> list[np.ndarray]:
    values = [values_at(repeat, steps) for repeat in repeats]
    return [each for each in values if _covers(np.isfinite(each))]


def _distinct(runs: np.ndarray) -> np.ndarray:
    """Returns the runs without those that equal an earlier run at all steps. Such a copy comes from a deterministic
    set-up. It contains no information on the noise: the copies share the rounding errors of their side, which the other
    side does not have."""
    kept: list[int] = []
    for index, run in enumerate(runs):
        if not any(np.array_equal(run, runs[other]) for other in kept):
            kept.append(index)
    return runs[kept]


def _covers(there: np.ndarray) -> bool:
    """Returns whether enough entries of `there` are True and no gap between them is too long."""
    edges = np.concatenate([[-1], np.flatnonzero(there), [len(there)]])
    longest = int(np.diff(edges).max()) - 1
    return int(there.sum()) >= MIN_STEPS and longest <= max(1, MAX_MISSING * len(there))


def _of_few(steps: np.ndarray, difference: np.ndarray) -> list[Finding]:
    """Runs a t test of the mean difference over two to seven steps. The test assumes a high autocorrelation of the
    noise, because so few steps do not allow an estimate."""
    count = len(steps)
    if count < 2 or not difference.any():
        return []
    error = max(MEMORY_OF_FEW * float(difference.std(ddof=1)) / np.sqrt(count), 1e-150)
    mean, freedom, critical = float(difference.mean()), np.array(count - 1.0), two_sided(0.05)
    excess = min(abs(float(as_normal(np.array(mean / error), freedom))) / critical, LARGEST)
    noise = float(as_t(np.array(critical), freedom)) * error
    return [Finding("drift", int(steps[0]), int(steps[-1]), mean, noise, excess)] if excess > 1 else []


def _window_findings(
    steps: np.ndarray, difference: np.ndarray, scores: SeriesScores, spread: Spread, runs: tuple[int, int]
) -> list[Finding]:
    """Returns the most significant difference of each statistic."""
    at = windows_for(len(steps))
    kinds, bound = np.array(at.kind), bounds(spread, runs)
    excess = np.minimum(np.nan_to_num(scores.excess, posinf=LARGEST), LARGEST)
    found: list[Finding] = []
    for kind in dict.fromkeys(at.kind):
        indices = np.flatnonzero(kinds == kind)
        best = int(indices[np.argmax(excess[indices])])
        if excess[best] <= 1:
            continue
        first, last = int(at.start[best]), int(at.start[best] + at.length[best])
        if kind == "trend":
            size, noise = _trend(difference), trend_bound(spread, runs)
        else:
            if last == len(steps) and kind != "drift":
                first = _onset(difference / spread.scale)
            size, noise = float(difference[first:last].mean()), nonzero(bound[best])
        found.append(Finding(kind, int(steps[first]), int(steps[last - 1]), size, noise, float(excess[best])))  # type: ignore[arg-type]
    if (spike := float(scores.spike)) > 1:
        step = int(scores.spike_at)
        noise, size = nonzero(float(scores.spike_noise)), float(difference[step])
        found.append(Finding("spike", int(steps[step]), int(steps[step]), size, noise, min(spike, LARGEST)))
    if (scatter := float(scores.scatter)) > 1:
        times = float(scores.scattered)
        found.append(Finding("scatter", int(steps[0]), int(steps[-1]), times, 1.0, min(scatter, LARGEST)))
    return sorted(found, key=lambda each: -each.excess)


def _onset(difference: np.ndarray) -> int:
    """Returns the index of the step at which the difference most likely began. From the returned step to the end, the
    mean difference exceeds the noise by the largest factor."""
    from_here = np.cumsum(difference[::-1])[::-1]
    return int(np.argmax(np.abs(from_here) / np.sqrt(np.arange(len(difference), 0, -1))))


def _trend(difference: np.ndarray) -> float:
    """Fits a regression line to the difference of two curves. Returns the change of the line from the first step to the
    last."""
    position = np.arange(len(difference)) - (len(difference) - 1) / 2
    return float((difference * position).sum() / (position**2).sum() * (len(difference) - 1))


# The statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeriesScores:
    deviates: np.ndarray
    """(..., windows): signed normal deviates of the window means."""
    excess: np.ndarray
    """(..., windows): the absolute deviate divided by the critical deviate. A deviate with a ratio above 1 is
    significant."""
    scatter: np.ndarray
    """(...): the test statistic of the step-to-step scatter divided by its critical value. The ratio is 0 without
    repeats."""
    scattered: np.ndarray
    """(...): the step-to-step scatter of the difference of A and B divided by that of repeats."""
    spike: np.ndarray
    """(...): the difference at the step that differs most (index `spike_at`), divided by its critical value."""
    spike_at: np.ndarray
    spike_noise: np.ndarray
    """(...): the largest difference at step `spike_at` that noise explains."""

    @property
    def found(self) -> np.ndarray:
        return (self.excess.max(axis=-1) > 1) | (self.scatter > 1) | (self.spike > 1)


def score(a: np.ndarray, b: np.ndarray) -> tuple[SeriesScores, Spread]:
    """Computes by how much the difference of A and B exceeds the noise in each window of steps. The inputs have the
    shape (..., runs, N)."""
    at = windows_for(a.shape[-1])
    of = compressed(a, b)
    spread = spread_of(of)
    scaled = of.difference / of.scale
    windows, trend = window_means(scaled, at.start[:-1], at.length[:-1]), trend_of(scaled)
    t = np.concatenate(
        [windows / np.sqrt(spread.variance[..., at.which[:-1]]), (trend / np.sqrt(spread.trend))[..., None]], axis=-1
    )
    freedom = np.concatenate([spread.freedom[..., at.which[:-1]], spread.trend_freedom[..., None]], axis=-1)
    deviates = as_normal(t, freedom)
    scatter = _scatter(scaled, of.residuals / of.scale[..., None, :])
    critical = at.critical * spread.raised(at)
    return SeriesScores(deviates, np.abs(deviates) / critical, *scatter, *_spike(a, b, of.scale)), spread


def _scatter(difference: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tests whether the difference of A and B scatters more from step to step than the repeats do. The test is a t test
    on the logarithms of mean squared moves in up to 16 blocks of the run. The test assumes nothing about the
    distribution of single steps."""
    rows, steps = noise.shape[-2:]
    blocks = min(16, (steps - 1) // 6)
    if rows == 0 or blocks < 4:
        return np.zeros(difference.shape[:-1]), np.ones(difference.shape[:-1])
    length = (steps - 1) // blocks

    def logs(curves: np.ndarray) -> np.ndarray:
        moves = np.diff(curves, axis=-1)[..., : blocks * length] ** 2
        return np.log(positive(moves.reshape(*moves.shape[:-1], blocks, length).mean(axis=-1)))

    gap = logs(difference) - logs(noise).mean(axis=-2)
    error = np.sqrt(positive(gap.var(axis=-1, ddof=1) / blocks))
    t = gap.mean(axis=-1) / error
    freedom = np.full(t.shape, float(blocks - 1))
    excess = np.maximum(as_normal(t, freedom), 0) / two_sided(2 * SHARES["scatter"])
    excess = np.where(mostly_equal(difference), 0.0, excess)
    return excess, np.exp(np.minimum(gap.mean(axis=-1) / 2, 100))


def _spike(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tests whether the difference at one step is too large to be noise. Heavy-tailed noise always has outliers, so the
    tail of the noise is estimated from all other steps. Above the k-th largest value, log-compressed values decay
    exponentially (Hill 1975). With probability p, the largest value exceeds the second largest by more than the mean
    excess of the k largest values times k * (p^(-1/k) - 1) (Renyi 1953)."""
    difference, residuals = contrasts(a, b)
    equal = mostly_equal(difference)
    scale = np.where(equal[..., None], 1.0, scale)  # few steps differ, so the noise per step is unknown
    sizes = np.abs(difference / scale)
    at = sizes.argmax(axis=-1)
    largest = sizes.max(axis=-1)
    others = sizes.copy()
    np.put_along_axis(others, at[..., None], 0.0, axis=-1)
    others = np.concatenate([others, joined(np.abs(residuals / scale[..., None, :]))], axis=-1)
    count = others.shape[-1] - 1
    usual = np.maximum(np.sqrt((others**2).sum(axis=-1) / count), TINY)
    k = min(max(8, count // 10), 40, count - 1)
    top = -np.partition(-others, k, axis=-1)[..., : k + 1] / usual[..., None]
    tail = np.arcsinh(top / SPIKE_LINEAR)
    excess = tail[..., :k].mean(axis=-1) - tail[..., k]
    gap = excess * k * (min(SPIKE_CHANCE, 0.5 / count) ** (-1 / k) - 1)
    bound = np.maximum(SPIKE_SIZE, SPIKE_LINEAR * np.sinh(np.minimum(tail.max(axis=-1) + gap, 100))) * usual
    moved = _move_noise(a, at)
    bound = np.where(equal, np.where(moved > 0, np.maximum(bound, SPIKE_SIZE * moved), np.inf), bound)
    unit = np.sqrt(1 / a.shape[-2] + 1 / b.shape[-2]) * np.take_along_axis(scale, at[..., None], -1)[..., 0]
    with np.errstate(over="ignore"):
        return largest / np.maximum(bound, TINY), at, bound * unit


def _move_noise(runs: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Estimates the noise of the curves from their step-to-step moves, without the step `at`. Returns 0 if most moves
    are 0."""
    moves = np.abs(np.diff(runs, axis=-1))
    step = np.arange(moves.shape[-1])
    near = (step == at[..., None]) | (step == at[..., None] - 1)
    sizes = np.where(near[..., None, :], 0.0, moves)
    return np.where((sizes > 0).mean(axis=(-1, -2)) > 0.5, np.sqrt(typical_square(joined(sizes)) / 2), 0.0)


# Power of the test: which differences it finds with 95 % probability, and how many repeats would increase it
# ---------------------------


def power_of(spread: Spread, steps: np.ndarray, runs: tuple[int, int], drift: float = 0.0) -> Power:
    """Computes the power of the test from the noise of one comparison. `runs` is the number of runs of A and of B.
    `drift` is the mean of b - a."""
    at = windows_for(len(steps))
    need = _in_metric(spread, at, runs, _critical(spread, at) + SURE * np.sqrt(spread.likely[at.which]))
    if sum(runs) == 2:
        need = need * ROOM_ALONE
    kinds = np.array(at.kind)
    late = max(1, int(np.ceil(LATE * len(steps))))
    ends = kinds == "end"
    sizes = _collapses(need[ends], at.length[ends], len(steps))
    sd = float(spread.raw_sd * np.sqrt((spread.scale**2).mean()))
    seen = np.flatnonzero(sizes <= max(DEEP * sd, NO_NOISE))
    return Power(
        repeats=sum(runs) - 2,
        noise_sd=nonzero(sd),
        drift=nonzero(need[kinds == "drift"][0]),
        collapse=nonzero(sizes[late - 1]),
        collapse_steps=late,
        latest_step=int(steps[len(steps) - 1 - seen[0]]) if len(seen) else None,
        drift_within=nonzero(abs(drift) + _uncertain(spread, at, runs)),
    )


def nonzero(size: float) -> float:
    """Returns `size`, or exactly 0 if `size` is at most NO_NOISE."""
    return float(size) if size > NO_NOISE else 0.0


def bounds(spread: Spread, runs: tuple[int, int]) -> np.ndarray:
    """Returns for each window of steps the smallest mean of b - a that is significant."""
    at = windows_for(spread.scale.shape[-1])
    return _in_metric(spread, at, runs, _critical(spread, at))


def trend_bound(spread: Spread, runs: tuple[int, int]) -> float:
    """Returns the smallest significant linear trend of b - a, as its change from the first step to the last."""
    count = spread.scale.shape[-1]
    at = windows_for(count)
    critical = (at.critical * spread.raised(at))[-1:]
    size = as_t(critical, spread.trend_freedom) * np.sqrt(spread.trend) / spread.gain
    length = np.sqrt((count**2 - 1) * count / 12)
    return float(size[0]) * float(np.sqrt(1 / runs[0] + 1 / runs[1])) * (count - 1) / length


def _uncertain(spread: Spread, at: Windows, runs: tuple[int, int]) -> float:
    """Returns the one-sided 95 % error bound of the mean of b - a over all steps."""
    all_steps = at.kind.index("drift")
    means = as_t(np.array(SURE), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])
    return float(_in_metric(spread, at, runs, means)[all_steps])


def _critical(spread: Spread, at: Windows) -> np.ndarray:
    """Returns for each window of steps the smallest significant mean of the scaled and compressed difference."""
    return as_t(at.critical * spread.raised(at), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])


def _in_metric(spread: Spread, at: Windows, runs: tuple[int, int], means: np.ndarray) -> np.ndarray:
    """Converts scaled window means to differences of A and B in the units of the metric."""
    difference = spread.uncompressed(means * np.sqrt(1 / runs[0] + 1 / runs[1]))
    return difference / window_means(1 / spread.scale, at.start, at.length)


def _collapses(need: np.ndarray, length: np.ndarray, steps: int) -> np.ndarray:
    """Returns the smallest detectable drop over the last 1, 2, ... steps. A drop may be shorter than the tested window
    at the end of the run."""
    lasting = np.arange(1, steps + 1)[:, None]
    return (need * np.maximum(1, length / lasting)).min(axis=1)


@dataclass(frozen=True)
class Wanted:
    repeats: int
    steps: int


def would_suffice(power: Power, spread: Spread, steps: int, limit: float) -> Wanted | None:
    """Returns how many repeats and steps would exclude a drift of `limit` if A and B do not differ. Returns None if
    even the largest tried numbers of repeats and steps would not exclude this drift. The computation uses the estimated
    noise."""
    at = windows_for(steps)
    index = int(np.flatnonzero(at.lengths == steps)[0])
    likely, sd = float(spread.likely[index]), float(spread.sd)
    for times in (1, 2, 4, 8, MAX_TIMES_LONGER):
        for repeats in range(max(power.repeats, 1), MAX_REPEATS + 1):
            mean = likely / times
            moderated = (repeats * mean + MODERATION * (CAUTION * mean + WANDER**2 * sd**2)) / (repeats + MODERATION)
            crit = as_t(np.array(SURE), np.array(repeats + MODERATION))
            size = float(crit) * np.sqrt(moderated) + SURE * np.sqrt(mean)
            drift = size * np.sqrt(1 + 1 / (repeats + 1)) * power.noise_sd / sd
            if drift <= MARGIN * limit and (repeats > power.repeats or times > 1):
                return Wanted(repeats, steps * times)
    return None
