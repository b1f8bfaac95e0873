"""Rounding and systematic differences, on tensors whose difference is given."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.parity.replay.tolerances import (
    BF16,
    DEVIATIONS,
    MIXED,
    Bound,
    Systematic,
    excess_of,
    line,
    movement_slope,
    overall_slope,
    slope,
    slope_excess,
    systematic,
    tolerance_of,
)
from lockstep.tape.digest import SHORT, digest

SHAPE = (300, 128)


def draw(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def found(a: torch.Tensor, b: torch.Tensor) -> Systematic:
    one = systematic(digest(a), digest(b), a.shape)
    assert one is not None
    return one


def rounded(a: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16 twice, in two ways: what two honest devices make of one tensor."""
    return (a * 1.37).bfloat16().float() / 1.37


def test_the_slope_is_that_of_least_squares() -> None:
    a = draw(0)
    for factor in (0.97, 1.0, 1.001, 1.3):
        b = factor * rounded(a)
        expected = float((a.double() * b.double()).sum() / a.double().square().sum()) - 1
        assert slope(digest(a), digest(b)) == pytest.approx(expected, abs=1e-5 + 0.2 * (factor - 1) ** 2)


def test_the_slope_without_the_means_is_that_of_the_line() -> None:
    """Log-probabilities lie far from 0: another temperature hardly changes their size, but it does their spread."""
    a = draw(1) - 4
    b = a.mean() + 1.02 * (a - a.mean()) + 0.003 * draw(2)
    one = found(a, b)
    assert one.values["spread"] == pytest.approx(0.02, abs=2e-3)
    assert one.values["slope"] < 3e-3


def test_an_offset_by_column_is_found_at_its_size() -> None:
    a = draw(3)
    b = rounded(a) + 0.02 * draw(4, (1, 128))
    assert found(a, b).values["offset"] == pytest.approx(0.02, rel=0.5)
    assert found(a, rounded(a)).values["offset"] < 5e-4


def test_the_sizes_of_columns_and_rows_are_found_at_their_size() -> None:
    a = draw(5)
    by_column, by_row = a * (1 + 0.05 * draw(6, (1, 128))), a * (1 + 0.05 * draw(7, (300, 1)))
    assert found(a, by_column).values["columns"] == pytest.approx(0.05, rel=0.6)
    assert found(a, by_row).values["rows"] == pytest.approx(0.05, rel=0.6)
    assert found(a, rounded(a)).values["columns"] < 1e-3


def test_rounding_stays_within_its_limits_and_a_factor_of_1_percent_does_not() -> None:
    for seed in range(20):
        a = draw(seed)
        clean, faulty = found(a, rounded(a)), found(a, 1.01 * rounded(a))
        assert clean.excess(BF16.forward).times < 0.5
        assert faulty.excess(BF16.forward).times > 2
        assert faulty.excess(BF16.forward).kind == "slope"


def test_the_bound_is_the_formula() -> None:
    """floor + 5 * rounding / sqrt(n), with n no larger than there are independent roundings."""
    assert DEVIATIONS == 5
    assert Bound(0.01, 100).allowed(0.2, 25) == pytest.approx(0.01 + 5 * 0.2 / 5)
    assert Bound(0.01, 100).allowed(0.2, 1_000_000) == pytest.approx(0.01 + 5 * 0.2 / 10)
    assert Bound(0.01).allowed(0.2, 0) == pytest.approx(0.01 + 5 * 0.2)


def test_a_pure_factor_is_not_counted_as_rounding() -> None:
    """The rounding is what is left without the slope, so that a large factor does not raise its bound."""
    a = draw(8, (512, 64))
    excess = slope_excess(digest(a), digest(1.3 * rounded(a)), BF16.gradient)
    assert excess.value == pytest.approx(0.3, abs=0.03)
    assert excess.allowed < 0.06
    assert slope_excess(digest(a), digest(1.3 * a), BF16.gradient, inherited=1.0).times < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_cannot_be_judged_is_left_to_the_distance(bad: float) -> None:
    a, broken = draw(9), draw(9)
    broken[0, 0] = bad
    assert systematic(digest(a), digest(broken), SHAPE) is None
    assert systematic(digest(torch.zeros(SHAPE)), digest(a), SHAPE) is None
    assert slope_excess(digest(torch.zeros(SHAPE)), digest(a), BF16.gradient).times == 0


def test_digests_of_earlier_tapes_have_no_sums() -> None:
    a, b = digest(draw(10)), digest(1.1 * draw(10))
    assert systematic(a[:SHORT], b, SHAPE) is None
    assert excess_of([a[:SHORT]], [b[:SHORT]], [SHAPE], BF16.forward).times == 0
    assert slope_excess(a[:SHORT], b, BF16.gradient).times == 0


def test_a_movement_is_followed_through_two_digests() -> None:
    start = 10 * draw(11)
    way = 1e-3 * draw(12)
    for factor in (0.0, 1.0, 2.0):
        after = start + way, start + factor * way
        one = movement_slope([digest(start)] * 2, [digest(end) for end in after])
        assert one is not None
        off, rounding, count = one
        assert off == pytest.approx(factor - 1, abs=0.05)
        assert rounding < 0.05
        assert count == 32
    assert movement_slope([digest(start)] * 2, [digest(start)] * 2) is None


def test_a_line_through_complete_vectors() -> None:
    a = draw(13, (500,)) - 3
    b = a.mean() + 1.1 * (a - a.mean()) + 0.25
    one = line(a, b)
    assert one is not None
    assert one.slope == pytest.approx(0.1, abs=1e-5)
    assert one.offset == pytest.approx(0.25, abs=1e-5)
    assert one.rounding == pytest.approx(0.0, abs=1e-5)
    assert line(torch.ones(100), torch.ones(100)) is None
    assert line(a[:3], b[:3]) is None


def test_a_handful_of_numbers_is_left_to_the_distance() -> None:
    a = draw(14, (4,))
    assert systematic(digest(a), digest(1.05 * a), (4,)) is None
    assert line(draw(15, (12,)), draw(16, (12,))) is None


def test_rounding_of_numbers_far_from_0_is_judged_by_their_spread() -> None:
    for seed in range(20):
        a = draw(seed, (300, 1)) - 4
        b = a + 0.02 * draw(seed + 100, (300, 1))
        assert found(a, b).excess({"spread": BF16.forward["spread"]}).times < 0.8


def test_many_tensors_together_have_the_slope_of_one_long_one() -> None:
    parts = [(draw(seed, (40, 8)), scale) for seed, scale in ((11, 1.0), (12, 3.0), (13, 0.1))]
    pairs = [(scale * a, scale * (1.1 * a + 0.02 * draw(seed, (40, 8)))) for seed, (a, scale) in enumerate(parts)]
    joined = [torch.cat([side.flatten() for side in sides]).double() for sides in zip(*pairs, strict=True)]
    expected = float((joined[0] * joined[1]).sum() / joined[0].square().sum()) - 1
    both = [(digest(a), digest(b)) for a, b in pairs]
    found = overall_slope(both, Bound(0.05, 50), 0.0)
    assert found.value == pytest.approx(expected, abs=2e-3)
    assert found.times > 1
    assert overall_slope(both, Bound(0.2, 50), 0.0).times < 1


def test_two_dtypes_have_wider_limits_than_bf16_alone() -> None:
    mixed, alone = tolerance_of("fp32", "bf16"), tolerance_of("bf16", "bf16")
    assert alone.systematic is BF16
    assert mixed.systematic is MIXED
    assert (mixed.module, mixed.growth) > (alone.module, alone.growth)
    assert tolerance_of("fp32", "fp32").systematic is None
