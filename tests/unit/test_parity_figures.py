"""Figures of two curves against numbers worked out by hand, and against a plain loop."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from lockstep.parity.compare.align_curves import Pair, align, common_steps, values_at
from lockstep.parity.compare.curve_errors import divergence_step, figures, window_length
from lockstep.parity.compare.logs.log_curves import Series

NAN = float("nan")


def series(values: list[float], first: int = 1) -> Series:
    return Series(np.arange(first, first + len(values)), np.array(values, dtype=float))


def pair(a: list[float], b: list[float]) -> Pair:
    return align(series(a), series(b))


def test_every_figure_of_five_steps_by_hand() -> None:
    # |a - b|      0.1   0.1   0.0   0.2   0.15       sum 0.55
    # |a|          2.0   1.0   0.5   0.0   0.5        sum 4.0
    # |a - b|/|a|  0.05  0.10  0.00   -    0.30       sum 0.45 over 4 steps
    # b - a       +0.1  -0.1   0.0  +0.2  +0.15       sum 0.35
    a, b = [2.0, 1.0, 0.5, 0.0, -0.5], [2.1, 0.9, 0.5, 0.2, -0.35]
    got = figures(pair(a, b), tolerance=0.12)
    assert (got.steps, got.first, got.last) == (5, 1, 5)
    assert got.mean_error_percent == pytest.approx(11.0)
    assert got.relative_error_percent == pytest.approx(11.25)
    assert got.scaled_error_percent == pytest.approx(13.75)
    assert (got.worst, got.worst_step) == (pytest.approx(0.2), 4)
    assert got.drift == pytest.approx(0.07)
    # From the means 0.6 and 0.67: a 1.4 0.4 -0.1 -0.6 -1.1, b 1.43 0.23 -0.17 -0.47 -1.02.
    # Products 2.002 + 0.092 + 0.017 + 0.282 + 1.122 = 3.515; squares 3.70 and 3.388.
    assert got.correlation == pytest.approx(3.515 / math.sqrt(3.70 * 3.388))
    # Apart by more than 0.12 at steps 4 and 5, which is to the end.
    assert got.parted_at == 4


def test_the_same_numbers_as_a_plain_loop() -> None:
    draw = random.Random(3)
    a = [draw.uniform(-1, 3) for _ in range(57)]
    b = [value + draw.gauss(0.02, 0.1) for value in a]
    got = figures(pair(a, b), tolerance=None)
    error = relative = size = signed = 0.0
    for mine, other in zip(a, b, strict=True):
        error += abs(mine - other)
        relative += abs(mine - other) / abs(mine)
        size += abs(mine)
        signed += other - mine
    assert got.mean_error_percent == pytest.approx(error / 57 * 100)
    assert got.relative_error_percent == pytest.approx(relative / 57 * 100)
    assert got.scaled_error_percent == pytest.approx(error / size * 100)
    assert got.drift == pytest.approx(signed / 57)
    assert got.parted_at is None


def test_only_common_steps_count() -> None:
    a = Series(np.array([1, 2, 4, 8]), np.array([1.0, 2.0, 4.0, 8.0]))
    b = Series(np.array([2, 3, 8, 9]), np.array([2.5, 100.0, 8.0, 100.0]))
    got = figures(align(a, b), tolerance=0.1)
    assert (got.steps, got.first, got.last) == (2, 2, 8)
    assert got.mean_error_percent == pytest.approx(25.0)  # (0.5 + 0) / 2
    assert got.worst_step == 2
    assert common_steps([a.steps, b.steps, np.array([8, 10])]).tolist() == [8]
    assert values_at(a, np.array([0, 2, 8])).tolist() == [pytest.approx(NAN, nan_ok=True), 2.0, 8.0]


def test_curves_without_size_or_shape() -> None:
    zeros = figures(pair([0.0, 0.0], [0.0, 0.1]), tolerance=1.0)
    assert zeros.mean_error_percent == pytest.approx(5.0)
    assert zeros.relative_error_percent is None
    assert zeros.scaled_error_percent is None
    assert zeros.correlation is None
    assert figures(pair([1.0, 2.0], [2.0, 4.0]), tolerance=1.0).correlation == pytest.approx(1.0)
    assert figures(pair([1.0, 2.0], [4.0, 2.0]), tolerance=1.0).correlation == pytest.approx(-1.0)


def test_steps_without_numbers() -> None:
    both = pair([1.0, NAN, 3.0, math.inf], [1.5, NAN, 3.0, NAN])
    assert (both.left_out, both.one_sided.any()) == (2, False)
    got = figures(both, tolerance=1.0)
    assert (got.steps, got.mean_error_percent) == (2, pytest.approx(25.0))
    one = pair([1.0, 2.0, 3.0], [1.0, NAN, 3.0])
    assert (one.left_out, one.one_sided.tolist()) == (0, [False, True, False])
    nothing = figures(pair([NAN], [1.0]), tolerance=1.0)
    assert (nothing.steps, nothing.parted_at) == (0, 1)
    assert math.isnan(nothing.mean_error_percent)


def apart_at(steps: int, places: set[int], tolerance: float = 0.1) -> int | None:
    """Curves of `steps` steps that are 1 apart at these steps and the same elsewhere."""
    return divergence_step(
        pair([1.0] * steps, [2.0 if step in places else 1.0 for step in range(1, steps + 1)]), tolerance
    )


def test_the_divergence_step_is_the_first_of_the_final_stretch() -> None:
    assert apart_at(100, set(range(61, 101))) == 61
    assert apart_at(100, {*range(10, 30), *range(61, 101)}) == 61
    assert apart_at(100, set(range(1, 101))) == 1
    assert apart_at(100, set()) is None
    assert apart_at(100, set(range(10, 30))) is None


@pytest.mark.parametrize("last", range(90, 101))
def test_one_step_near_the_end_is_no_divergence(last: int) -> None:
    assert apart_at(100, {last}) is None


@pytest.mark.parametrize("last", range(90, 101))
def test_one_step_near_the_end_hides_no_divergence(last: int) -> None:
    assert apart_at(100, set(range(61, 101)) - {last}) == 61


def test_a_change_just_before_the_end_is_no_divergence() -> None:
    assert apart_at(60, {57, 59, 60}) is None
    assert apart_at(60, {56, 57, 59, 60}) == 57


def test_short_curves() -> None:
    assert [window_length(steps) for steps in (1, 2, 3, 29, 30, 40, 50, 99, 5000)] == [1, 1, 3, 3, 3, 5, 5, 9, 9]
    assert apart_at(1, {1}) == 1
    assert apart_at(2, {2}) == 2
    assert apart_at(5, {5}) is None
    assert apart_at(5, {4, 5}) == 4


def test_a_difference_of_exactly_the_tolerance_is_no_divergence() -> None:
    assert apart_at(10, set(range(1, 11)), tolerance=1.0) is None


def test_a_side_that_becomes_nan_diverges_there() -> None:
    broken = pair([1.0] * 50, [1.0] * 30 + [NAN] * 20)
    assert divergence_step(broken, 0.1) == 31
    growing = np.linspace(0.001, 0.05, 50)
    relative = Pair(np.arange(1, 51), growing, growing * 1.03)
    assert divergence_step(relative, 0.02) is None
    assert divergence_step(relative, 0.02 * np.abs(growing)) == 1
