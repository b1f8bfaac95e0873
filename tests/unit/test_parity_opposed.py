"""Curves that move in opposite directions are out of step without a repeat; noise is not."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.parity.compare.curve_tests import opposition
from parity_curves import judged, loss, reward, runs

# A loss that falls in steps up and down, as data of unlike difficulty makes it; B counts from zero.
ZIGZAG = np.array([2.5, 1.75, 2.25, 1.5, 1.875, 1.25, 1.625, 1.0, 1.375, 0.75])


def test_the_correlation_by_hand() -> None:
    """Moves of A: 1, -1, 1, -1; of B: -1, 1, -1, 1 and once 2: the means are 0 and 1/4."""
    a, b = np.array([0.0, 1, 0, 1, 0]), np.array([0.0, -1, 0, -1, 1])
    x, y = np.array([1.0, -1, 1, -1]), np.array([-1.0, 1, -1, 2]) - 0.25
    correlation, _ = opposition(a, b)
    assert correlation == pytest.approx(float((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum())))
    assert opposition(np.ones(20), np.arange(20.0)) == (0.0, 0.0)
    same, excess = opposition(ZIGZAG, ZIGZAG)
    assert same == pytest.approx(1)
    assert excess < 0


def test_nine_steps_that_are_55_percent_apart_are_out_of_step() -> None:
    judgement, examined = judged(ZIGZAG[None, :-1], ZIGZAG[None, 1:], "loss")
    assert float(np.abs(np.diff(ZIGZAG)).mean()) == pytest.approx(0.55, abs=0.02)
    assert judgement.verdict == "out of step"
    assert "move in opposite directions (correlation -1)" in judgement.explanation
    assert [found.statistic for found in examined.findings] == ["opposed"]


def test_the_same_error_by_noise_is_still_unknown() -> None:
    """Independent zigzags of the same size around one curve: repeats may well do that."""
    draw = np.random.default_rng(0)
    a, b = (np.linspace(2.2, 1.0, 9) + 0.35 * draw.normal(size=9) for _ in range(2))
    assert judged(a[None], b[None], "loss")[0].verdict == "cannot tell"


@pytest.mark.daily
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [8, 20, 60, 300])
def test_noise_is_no_opposition(steps: int, memory: float) -> None:
    """At 0.5 %, of 1,000 clean pairs more than 16 in a thousand times: with 0.9 %, as measured, more than 20."""
    flat = np.zeros(steps)
    for curve in (reward(steps), loss(steps), flat):
        a, b = runs(np.random.default_rng(steps), 1000, curve, (0, 0), memory, 0.3)
        alarms = sum(opposition(one[0], other[0])[1] > 1 for one, other in zip(a, b, strict=True))
        assert alarms <= 20, (steps, memory)


def test_a_count_that_is_off_by_one_is_found() -> None:
    draw = np.random.default_rng(1)
    found = [opposition(row[:-1], row[1:])[1] > 1 for row in draw.normal(size=(500, 101))]
    assert np.mean(found) >= 0.95
