"""Simulated curves: rewards and losses with AR(1) noise, and faults of a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.parity.compare.align_curves import Pair
from lockstep.parity.compare.curve_errors import figures
from lockstep.parity.compare.curve_tests import Examined, examine
from lockstep.parity.compare.logs.log_curves import Series
from lockstep.parity.compare.verdict import Judgement, bar_of, judge

SD = 0.06
Fault = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the noise of runs (..., N) and the curve to what was logged."""


def reward(steps: int) -> np.ndarray:
    return 0.2 + 0.6 / (1 + np.exp(-(np.arange(steps) / steps - 0.5) * 8))


def loss(steps: int) -> np.ndarray:
    return 0.4 + 2.0 * np.exp(-2 * np.arange(steps) / steps)


def remembering(draw: np.random.Generator, shape: tuple[int, ...], memory: float, wander: float = 0.0) -> np.ndarray:
    """AR(1) noise of standard deviation 1 along the last axis, and a separate level for each run."""
    noise = draw.normal(size=shape) * np.sqrt(1 - memory**2)
    noise[..., 0] /= np.sqrt(1 - memory**2)
    for step in range(1, shape[-1]):
        noise[..., step] += memory * noise[..., step - 1]
    return noise + wander * draw.normal(size=(*shape[:-1], 1))


def _outliers(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.normal(size=shape) * np.where(draw.random(shape) < 0.02, 7, 1)


def _skewed(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (draw.lognormal(size=shape) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


FAMILIES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "AR(0.5)": lambda draw, shape: remembering(draw, shape, 0.5),
    "AR(0.9)": lambda draw, shape: remembering(draw, shape, 0.9),
    "t(3)": lambda draw, shape: draw.standard_t(3, size=shape) / np.sqrt(3),
    "2 % of 7 sd": _outliers,
    "lognormal": _skewed,
    "quarters": lambda draw, shape: draw.binomial(4, 0.5, size=shape) / 4,
    "rare quarters": lambda draw, shape: draw.binomial(4, 0.02, size=shape) / 4,
}
"""Noise of single steps: normal, with a memory, with heavy tails, skewed, and rewards of four responses."""


def clean(noise: np.ndarray, curve: np.ndarray) -> np.ndarray:
    return curve + noise


def biased(noise: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """By one noise standard deviation, from beginning to end."""
    return curve + noise + SD


def collapsed(noise: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """By ten noise standard deviations, over the last 5 % of the steps."""
    last = int(np.ceil(0.05 * len(curve)))
    return curve + noise - np.where(np.arange(len(curve)) >= len(curve) - last, 10 * SD, 0)


def stopped(noise: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Learns nothing more from half of the run on."""
    half = len(curve) // 2
    return np.where(np.arange(len(curve)) < half, curve, curve[half]) + noise


def runs(
    draw: np.random.Generator,
    trials: int,
    curve: np.ndarray,
    repeats: tuple[int, int],
    memory: float,
    wander: float = 0.0,
    fault: Fault = clean,
) -> tuple[np.ndarray, np.ndarray]:
    """(trials, runs, N) of A and of B. Noise falls to half of what it was, as that of a run that converges."""
    steps = len(curve)
    size = SD * (1 - 0.5 * np.arange(steps) / steps)
    a, b = (size * remembering(draw, (trials, 1 + more, steps), memory, wander) for more in repeats)
    return clean(a, curve), fault(b, curve)


def judged(a: np.ndarray, b: np.ndarray, kind: str = "reward") -> tuple[Judgement, Examined]:
    """The first runs of both sides against each other, the others being repeats."""
    steps = np.arange(1, a.shape[-1] + 1)
    pair = Pair(steps, a[0], b[0])
    bar = bar_of(kind, pair, None)  # type: ignore[arg-type]
    examined = examine(pair, *([Series(steps, run) for run in side[1:]] for side in (a, b)))
    return judge(bar, pair, figures(pair, bar.tolerance(pair.a)), examined), examined
