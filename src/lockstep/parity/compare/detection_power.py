"""The power of a comparison: the differences it finds with 95 % probability, and what would increase it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lockstep.parity.compare.comparison import Power
from lockstep.parity.compare.noise_model import (
    CAUTION,
    MODERATION,
    WANDER,
    Looks,
    Spread,
    as_t,
    looks,
    window_means,
)

SURE = NormalDist().inv_cdf(0.95)
LATE = 0.05
"""The fraction of the run that a late collapse takes."""
DEEP = 10
"""The depth, in noise standard deviations, of the collapse whose latest detectable step is reported."""
ROOM_ALONE = 1.35
"""A margin without repeats: a fault makes the estimated noise of the pair larger."""
NO_NOISE = 1e-100
"""Smaller values mean no noise."""
MARGIN = 0.85
"""A margin for recommendations: the noise is estimated from few runs."""
MAX_REPEATS = 8
MAX_TIMES_LONGER = 16


def power_of(spread: Spread, steps: np.ndarray, runs: tuple[int, int], drift: float = 0.0) -> Power:
    """The power from the noise of one comparison. `runs`: the numbers of runs of A and B; `drift`: the mean of b -
    a."""
    at = looks(len(steps))
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
    """The size, or exactly 0 if there is no noise."""
    return float(size) if size > NO_NOISE else 0.0


def bounds(spread: Spread, runs: tuple[int, int]) -> np.ndarray:
    """The smallest mean of b - a over each window that is a finding."""
    at = looks(spread.scale.shape[-1])
    return _in_metric(spread, at, runs, _critical(spread, at))


def trend_bound(spread: Spread, runs: tuple[int, int]) -> float:
    """The smallest change of a straight line, from the first step to the last, that is a finding."""
    count = spread.scale.shape[-1]
    at = looks(count)
    critical = (at.critical * spread.raised(at))[-1:]
    size = as_t(critical, spread.trend_freedom) * np.sqrt(spread.trend) / spread.gain
    length = np.sqrt((count**2 - 1) * count / 12)
    return float(size[0]) * float(np.sqrt(1 / runs[0] + 1 / runs[1])) * (count - 1) / length


def _uncertain(spread: Spread, at: Looks, runs: tuple[int, int]) -> float:
    """The one-sided 95 % error of the mean of b - a."""
    all_steps = at.kind.index("drift")
    means = as_t(np.array(SURE), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])
    return float(_in_metric(spread, at, runs, means)[all_steps])


def _critical(spread: Spread, at: Looks) -> np.ndarray:
    """The smallest mean of each window that is a finding, in the noise of one run at scale 1."""
    return as_t(at.critical * spread.raised(at), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])


def _in_metric(spread: Spread, at: Looks, runs: tuple[int, int], means: np.ndarray) -> np.ndarray:
    """Window means as differences of the sides, in the units of the metric."""
    difference = spread.uncompressed(means * np.sqrt(1 / runs[0] + 1 / runs[1]))
    return difference / window_means(1 / spread.scale, at.start, at.length)


def _collapses(need: np.ndarray, length: np.ndarray, steps: int) -> np.ndarray:
    """The smallest detectable collapse over the last 1, 2, ... steps. A longer examined end contains only part of
    it."""
    lasting = np.arange(1, steps + 1)[:, None]
    return (need * np.maximum(1, length / lasting)).min(axis=1)


@dataclass(frozen=True)
class Wanted:
    repeats: int
    steps: int


def would_suffice(power: Power, spread: Spread, steps: int, limit: float) -> Wanted | None:
    """The number of repeats of one side and of steps that would exclude a drift of `limit` if there is none; None if
    even many would not. It uses the estimated noise."""
    at = looks(steps)
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
