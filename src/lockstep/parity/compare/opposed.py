"""Whether two curves move against each other, which no noise around one curve explains.

Without repeats nobody knows how large noise is, but this is known of it: what two honest runs of one recipe add to
their common curve is independent. The moves of A from step to step are then those of the common curve and of its own
noise, those of B of the same curve and of other noise, and their correlation is that of the common part: 0 at least.
Curves whose counts of steps are off by one, or whose data came in another order, move against each other.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from lockstep.parity.compare.statistics import as_normal

CHANCE = 0.005
"""Of an alarm where nothing is wrong; the other statistics share 4.5 %."""
FEWER = 1.5
"""Neighbouring moves share a step: those of noise without memory have a correlation of -1/2, so that n of them tell as
much of a correlation as n / (1 + 2 / 4) that are independent (Bartlett 1935). Noise with memory comes nearer to n."""


def opposition(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The correlation of the moves of two curves, and how far below 0 it is in units of what noise may do (1: just)."""
    x, y = (moves - moves.mean() for moves in (np.diff(a), np.diff(b)))
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    freedom = len(x) / FEWER - 2
    if size == 0 or freedom <= 0:
        return 0.0, 0.0
    correlation = float((x * y).sum()) / size
    t = correlation * np.sqrt(freedom / max(1 - correlation**2, 1e-12))
    return correlation, float(as_normal(np.array(-t), np.array(freedom))) / NormalDist().inv_cdf(1 - CHANCE)
