"""The statistics of one metric's runs, in the words of the metric: what was found at which steps, and the power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.parity.compare.comparison import Finding, Power
from lockstep.parity.compare.figures import Pair, values_at
from lockstep.parity.compare.log import Series
from lockstep.parity.compare.opposed import opposition
from lockstep.parity.compare.power import Wanted, bounds, plain, power_of, trend_bound, would_suffice
from lockstep.parity.compare.statistics import (
    FEWEST_STEPS,
    SeriesScores,
    Spread,
    as_normal,
    as_t,
    looks,
    score,
    two_sided,
)

MOST_MISSING = 0.05
"""A repeat that lacks more of the pair's steps than this in a row cannot say what noise does there."""
MEMORY_OF_FEW = 5.5
"""By how much a memory of 0.9 from step to step raises the t statistic of up to seven steps."""
LARGEST = 1e6
"""What is said of an excess over noise that is exactly 0."""


@dataclass(frozen=True)
class Examined:
    """`repeats` are those that could be used; `spread` and `power` are None with too few steps."""

    steps: np.ndarray
    repeats: int
    findings: list[Finding]
    spread: Spread | None = None
    power: Power | None = None

    def suffices(self, limit: float) -> Wanted | None:
        assert self.power is not None
        assert self.spread is not None
        return would_suffice(self.power, self.spread, len(self.steps), limit)


def examine(pair: Pair, a_repeats: Sequence[Series], b_repeats: Sequence[Series]) -> Examined:
    """B's runs against A's on the steps at which the pair, and every repeat that covers it, has numbers."""
    steps = pair.steps[pair.finite]
    if len(steps) < FEWEST_STEPS:
        return Examined(steps, 0, _of_few(steps, (pair.b - pair.a)[pair.finite]))
    of_a, of_b = (_covering(repeats, steps) for repeats in (a_repeats, b_repeats))
    a, b = np.stack([pair.a[pair.finite], *of_a]), np.stack([pair.b[pair.finite], *of_b])
    shared = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    if not _covers(shared):
        a, b, shared = a[:1], b[:1], np.ones(len(steps), dtype=bool)
    steps, a, b = steps[shared], a[:, shared], b[:, shared]
    scores, spread = score(a, b)
    runs = (len(a), len(b))
    found = _findings(steps, b.mean(axis=0) - a.mean(axis=0), scores, spread, runs)
    if sum(runs) == 2:
        found += _opposed(steps, a[0], b[0])
    drift = float((b[:, None] - a).mean())
    return Examined(steps, sum(runs) - 2, found, spread, power_of(spread, steps, runs, drift))


def _opposed(steps: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Finding]:
    """What is known of noise without a repeat: it does not make two runs move against each other."""
    correlation, excess = opposition(a, b)
    first, last = int(steps[0]), int(steps[-1])
    return [Finding("opposed", first, last, correlation, 0.0, min(excess, LARGEST))] if excess > 1 else []


def _covering(repeats: Sequence[Series], steps: np.ndarray) -> list[np.ndarray]:
    values = [values_at(repeat, steps) for repeat in repeats]
    return [each for each in values if _covers(np.isfinite(each))]


def _covers(there: np.ndarray) -> bool:
    """Enough steps, and no long stretch without."""
    edges = np.concatenate([[-1], np.flatnonzero(there), [len(there)]])
    longest = int(np.diff(edges).max()) - 1
    return int(there.sum()) >= FEWEST_STEPS and longest <= max(1, MOST_MISSING * len(there))


def _of_few(steps: np.ndarray, difference: np.ndarray) -> list[Finding]:
    """Of two to seven steps: a t test of their mean. Their memory cannot be seen, so a long one is assumed."""
    count = len(steps)
    if count < 2 or not difference.any():
        return []
    error = max(MEMORY_OF_FEW * float(difference.std(ddof=1)) / np.sqrt(count), 1e-150)
    mean, freedom, critical = float(difference.mean()), np.array(count - 1.0), two_sided(0.05)
    excess = min(abs(float(as_normal(np.array(mean / error), freedom))) / critical, LARGEST)
    noise = float(as_t(np.array(critical), freedom)) * error
    return [Finding("drift", int(steps[0]), int(steps[-1]), mean, noise, excess)] if excess > 1 else []


def _findings(
    steps: np.ndarray, difference: np.ndarray, scores: SeriesScores, spread: Spread, runs: tuple[int, int]
) -> list[Finding]:
    """The strongest look of each statistic that found something."""
    at = looks(len(steps))
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
            size, noise = float(difference[first:last].mean()), plain(bound[best])
        found.append(Finding(kind, int(steps[first]), int(steps[last - 1]), size, noise, float(excess[best])))  # type: ignore[arg-type]
    if (spike := float(scores.spike)) > 1:
        step = int(scores.spike_at)
        noise, size = plain(float(scores.spike_noise)), float(difference[step])
        found.append(Finding("spike", int(steps[step]), int(steps[step]), size, noise, min(spike, LARGEST)))
    if (scatter := float(scores.scatter)) > 1:
        times = float(scores.scattered)
        found.append(Finding("scatter", int(steps[0]), int(steps[-1]), times, 1.0, min(scatter, LARGEST)))
    return sorted(found, key=lambda each: -each.excess)


def _onset(difference: np.ndarray) -> int:
    """From where on the mean difference to the end is the most beyond noise: where the change most likely began."""
    from_here = np.cumsum(difference[::-1])[::-1]
    return int(np.argmax(np.abs(from_here) / np.sqrt(np.arange(len(difference), 0, -1))))


def _trend(difference: np.ndarray) -> float:
    """What the straight line through the difference adds from the first step to the last."""
    position = np.arange(len(difference)) - (len(difference) - 1) / 2
    return float((difference * position).sum() / (position**2).sum() * (len(difference) - 1))
