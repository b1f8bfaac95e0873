"""The noise floor: its parts by hand, and its error rate on simulated runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.parity.compare.curve_errors import MIN_NOISE_STEPS, block_length, excess_draws, noise_floor
from lockstep.parity.compare.logs.log_curves import Series

SD = 0.05
TRIALS = 200


def series(values: np.ndarray) -> Series:
    return Series(np.arange(1, len(values) + 1), values)


def autoregressive(draw: np.random.Generator, steps: int, memory: float) -> np.ndarray:
    """Noise of standard deviation 1 that remembers `memory` of the step before."""
    shocks = draw.normal(size=steps) * np.sqrt(1 - memory**2)
    noise = np.empty(steps)
    last = draw.normal()
    for step in range(steps):
        last = noise[step] = memory * last + shocks[step]
    return noise


def rate_of_alarms(repeats: int, steps: int, shift: float, noise: Callable[[np.random.Generator], np.ndarray]) -> float:
    """Share of trials in which a run `shift` noise deviations off is called further away than repeats are."""
    curve = np.exp(-np.arange(steps) / steps)
    alarms = 0
    for trial in range(TRIALS):
        draw = np.random.default_rng(trial)
        of_a = [series(curve + SD * noise(draw)) for _ in range(repeats + 1)]
        b = series(curve + SD * (noise(draw) + shift))
        floor = noise_floor(of_a, [b])
        assert floor is not None
        alarms += floor.excess_low > 0
    return alarms / TRIALS


@pytest.mark.daily
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_repeat_is_seldom_called_different(memory: float, repeats: int) -> None:
    assert rate_of_alarms(repeats, 150, 0.0, lambda draw: autoregressive(draw, 150, memory)) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_a_shift_of_three_deviations_is_found(memory: float) -> None:
    assert rate_of_alarms(1, 150, 3.0, lambda draw: autoregressive(draw, 150, memory)) >= 0.99


@pytest.mark.slow
def test_runs_that_are_off_from_end_to_end_need_more_repeats() -> None:
    """Runs that are off by a constant each: blocks of steps cannot see that, only repeats can. Over many trials a false
    alarm comes in 29 % with one repeat, in 6 % with three."""

    def constant(draw: np.random.Generator) -> np.ndarray:
        return draw.normal() + 0.3 * draw.normal(size=60)

    assert rate_of_alarms(1, 60, 0.0, constant) > 0.15
    assert rate_of_alarms(3, 60, 0.0, constant) < 0.10


def test_mean_error_between_repeats_by_hand() -> None:
    # Constant runs at 0, 1 and 4: pairs lie 1, 4 and 3 apart, 8/3 in the mean. B at 10 lies 10, 9 and 6 away.
    runs = [series(np.full(20, level)) for level in (0.0, 1.0, 4.0)]
    floor = noise_floor(runs, [series(np.full(20, 10.0))])
    assert floor is not None
    assert floor.repeats == 2
    assert floor.mean_error_percent == pytest.approx(800 / 3)
    # A draw takes one distance of each kind, whatever the steps: from 6 - 4 to 10 - 1.
    assert (floor.excess_low, floor.excess_high) == (pytest.approx(200), pytest.approx(900))


def test_repeats_of_both_sides_count() -> None:
    levels = {"a": (0.0, 1.0), "b": (5.0, 8.0)}
    a, b = ([series(np.full(20, level)) for level in levels[side]] for side in "ab")
    floor = noise_floor(a, b)
    assert floor is not None
    assert (floor.repeats, floor.mean_error_percent) == (2, pytest.approx(200))  # (1 + 3) / 2
    assert (floor.excess_low, floor.excess_high) == (pytest.approx(100), pytest.approx(700))  # 4 - 3, 8 - 1


def test_draws_are_means_over_blocks() -> None:
    """Two halves at 0 and 1, blocks of 10 of 40 steps: every draw is a mean of 4 blocks, and their mean is 0.5."""
    across = np.repeat([[0.0, 1.0]], 20, axis=1).reshape(1, 40)
    draws = excess_draws(across, np.zeros((1, 40)), seed=0)
    assert block_length(across[0]) == 10
    assert draws.mean() == pytest.approx(0.5, abs=0.02)
    assert np.allclose(draws * 40, np.round(draws * 40))
    assert (draws.min(), draws.max()) == (0.0, 1.0)
    # A sixteenth of the draws takes four blocks of one kind; single steps would never do so.
    assert np.array_equal(draws, excess_draws(across, np.zeros((1, 40)), seed=0))


def test_blocks_are_long_for_correlated_errors() -> None:
    draw = np.random.default_rng(0)
    white = block_length(draw.normal(size=1000))
    slow = block_length(autoregressive(draw, 1000, 0.9))
    # (1.5 (2 x 0.9 / (1 - 0.81))^2 x 1000)^(1/3) = 51; its correlation is estimated, hence the room.
    assert white == 10
    assert 38 <= slow <= 65
    assert block_length(np.arange(40.0)) == 10
    assert block_length(np.ones(64)) == 4
    assert block_length(draw.normal(size=10_000)) == 100


def test_no_floor_without_repeats_or_steps() -> None:
    one = series(np.arange(50.0))
    assert noise_floor([one], [one]) is None
    short = series(np.arange(float(MIN_NOISE_STEPS - 1)))
    assert noise_floor([one, short], [one]) is None
    gap = np.arange(50.0)
    gap[7:] = np.nan
    assert noise_floor([one, series(gap)], [one]) is None
    assert noise_floor([one, series(np.arange(float(MIN_NOISE_STEPS)))], [one]) is not None
