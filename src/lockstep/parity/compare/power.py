"""What a comparison would have found with 95 %, had it been there; and what would suffice where that is too little."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lockstep.parity.compare.comparison import Power
from lockstep.parity.compare.statistics import (
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
"""The part of the run that a late collapse takes."""
DEEP = 10
"""Noise standard deviations of the collapse whose latest step is told."""
ROOM_ALONE = 1.35
"""Without repeats: a fault makes the noise inside the pair look larger than it is without."""
NOTHING = 1e-100
"""What is smaller comes from no noise at all."""
CLEARLY = 0.85
"""What is said to suffice has some room: the noise was seen in few runs."""
MOST_REPEATS = 8
MOST_TIMES_LONGER = 16


def power_of(spread: Spread, steps: np.ndarray, runs: tuple[int, int], drift: float = 0.0) -> Power:
    """From what noise does in one comparison; `runs` are those of A and of B, `drift` is the mean of b - a."""
    at = looks(len(steps))
    need = _in_metric(spread, at, runs, _critical(spread, at) + SURE * np.sqrt(spread.likely[at.which]))
    if sum(runs) == 2:
        need = need * ROOM_ALONE
    kinds = np.array(at.kind)
    late = max(1, int(np.ceil(LATE * len(steps))))
    ends = kinds == "end"
    sizes = _collapses(need[ends], at.length[ends], len(steps))
    sd = float(spread.raw_sd * np.sqrt((spread.scale**2).mean()))
    seen = np.flatnonzero(sizes <= max(DEEP * sd, NOTHING))
    return Power(
        repeats=sum(runs) - 2,
        noise_sd=plain(sd),
        drift=plain(need[kinds == "drift"][0]),
        collapse=plain(sizes[late - 1]),
        collapse_steps=late,
        latest_step=int(steps[len(steps) - 1 - seen[0]]) if len(seen) else None,
        drift_within=plain(abs(drift) + _uncertain(spread, at, runs)),
    )


def plain(size: float) -> float:
    """0 where there is no noise at all."""
    return float(size) if size > NOTHING else 0.0


def bounds(spread: Spread, runs: tuple[int, int]) -> np.ndarray:
    """How large a mean of b - a over each window must be to be a finding."""
    at = looks(spread.scale.shape[-1])
    return _in_metric(spread, at, runs, _critical(spread, at))


def trend_bound(spread: Spread, runs: tuple[int, int]) -> float:
    """How much a straight line must add from the first step to the last to be a finding."""
    count = spread.scale.shape[-1]
    at = looks(count)
    critical = (at.critical * spread.raised(at))[-1:]
    size = as_t(critical, spread.trend_freedom) * np.sqrt(spread.trend) / spread.gain
    length = np.sqrt((count**2 - 1) * count / 12)
    return float(size[0]) * float(np.sqrt(1 / runs[0] + 1 / runs[1])) * (count - 1) / length


def _uncertain(spread: Spread, at: Looks, runs: tuple[int, int]) -> float:
    """How far the mean of b - a may lie from its truth, to either side with 5 %."""
    whole = at.kind.index("drift")
    means = as_t(np.array(SURE), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])
    return float(_in_metric(spread, at, runs, means)[whole])


def _critical(spread: Spread, at: Looks) -> np.ndarray:
    """Of each look: how large a window mean must be to be a finding, in the noise of one run at scale 1."""
    return as_t(at.critical * spread.raised(at), spread.freedom[at.which]) * np.sqrt(spread.variance[at.which])


def _in_metric(spread: Spread, at: Looks, runs: tuple[int, int], means: np.ndarray) -> np.ndarray:
    """Such window means as differences of the sides, in the units of the metric."""
    difference = spread.uncompressed(means * np.sqrt(1 / runs[0] + 1 / runs[1]))
    return difference / window_means(1 / spread.scale, at.start, at.length)


def _collapses(need: np.ndarray, length: np.ndarray, steps: int) -> np.ndarray:
    """By the number of last steps that it takes, 1 to all: how deep a collapse some end of the run would show. An end
    that is longer shows only its part."""
    lasting = np.arange(1, steps + 1)[:, None]
    return (need * np.maximum(1, length / lasting)).min(axis=1)


@dataclass(frozen=True)
class Wanted:
    repeats: int
    steps: int


def would_suffice(power: Power, spread: Spread, steps: int, limit: float) -> Wanted | None:
    """How many repeats of one side, and runs of how many steps, would exclude a drift of `limit` where there is none;
    None where not even many would. Taken from the noise as it was seen."""
    at = looks(steps)
    index = int(np.flatnonzero(at.lengths == steps)[0])
    likely, sd = float(spread.likely[index]), float(spread.sd)
    for times in (1, 2, 4, 8, MOST_TIMES_LONGER):
        for repeats in range(max(power.repeats, 1), MOST_REPEATS + 1):
            mean = likely / times
            moderated = (repeats * mean + MODERATION * (CAUTION * mean + WANDER**2 * sd**2)) / (repeats + MODERATION)
            crit = as_t(np.array(SURE), np.array(repeats + MODERATION))
            size = float(crit) * np.sqrt(moderated) + SURE * np.sqrt(mean)
            drift = size * np.sqrt(1 + 1 / (repeats + 1)) * power.noise_sd / sd
            if drift <= CLEARLY * limit and (repeats > power.repeats or times > 1):
                return Wanted(repeats, steps * times)
    return None
