"""What the verdict must find (late collapse, bias, divergence), and what it must not report."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.parity.compare.compare_report import EXIT_CODES
from lockstep.parity.compare.comparison import Power
from parity_curves import SD, biased, collapsed, judged, remembering, reward, runs, stopped

PASSES = ("in step", "within noise")


def quiet(seed: int, count: int, memory: float = 0.3) -> np.ndarray:
    """Rewards that settle at 0.8; repeats differ by 1.13 % in the mean."""
    level = np.minimum(0.8, 0.2 + 0.01 * np.arange(200))
    return level + 0.01 * remembering(np.random.default_rng(seed), (count, 200), memory)


@pytest.mark.daily
@pytest.mark.parametrize("repeats", [0, 1, 3])
@pytest.mark.parametrize("last", [3, 5, 11, 20, 50])
def test_a_late_collapse_is_out_of_step_from_its_step_on(last: int, repeats: int) -> None:
    for seed in range(5):
        a, b = quiet(seed, 1 + repeats), quiet(100 + seed, 1)
        b[:, -last:] -= 0.7
        judgement, examined = judged(a, b)
        assert (judgement.verdict, judgement.parted_at) == ("out of step", 201 - last)
        assert f"in the mean of steps {201 - last} to 200" in judgement.explanation
        assert "end" in [found.statistic for found in examined.findings]


def test_a_loss_that_diverges_near_its_end() -> None:
    """DPO, +0.15 over the last 20 of 200 steps: 1.5 % in the mean, within the bar of 2 %."""
    draw = np.random.default_rng(0)
    a, b = (0.69 * np.exp(-np.arange(200) / 150) + 0.0001 * draw.normal(size=(1, 200)) for _ in range(2))
    assert judged(a, b, "loss")[0].verdict == "in step"
    b[:, -20:] += 0.15
    judgement, _ = judged(a, b, "loss")
    assert (judgement.verdict, judgement.parted_at) == ("out of step", 181)
    assert judgement.explanation.startswith("absolute mean error 1.5")
    assert " <= 2 % (" in judgement.explanation


def test_a_temporary_change_is_reported_with_its_steps() -> None:
    a, b = quiet(1, 4), quiet(2, 1)
    b[:, 60:100] -= 0.5
    judgement, examined = judged(a, b)
    assert (judgement.verdict, judgement.parted_at) == ("out of step", None)  # 10 % in the mean; they end together
    window = next(found for found in examined.findings if found.statistic == "window")
    assert 55 <= window.first < window.last <= 106
    assert window.difference == pytest.approx(-0.5, abs=0.1)


def test_few_steps_never_pass() -> None:
    """Unless they are the same to the last bit, and more than one."""
    for count in range(1, 8):
        a = np.linspace(0.2, 0.8, count)[None]
        near = judged(a, a + 0.001 * np.resize([1, -1], count))[0]
        assert near.verdict == "cannot tell", count
        assert "too few" in near.explanation
        assert judged(a, a)[0].verdict == ("in step" if count > 1 else "cannot tell")
        far = judged(a, a + 0.5)[0]
        assert far.verdict == ("out of step" if count > 1 else "cannot tell")
    a = np.linspace(0.2, 0.8, 8)[None]
    assert judged(a, a + 0.001 * np.resize([1, -1], 8))[0].verdict == "in step"


def test_no_repeat_no_pass_over_the_bar() -> None:
    """Noise of one kind on both sides, 6.8 % apart: without a repeat nobody knows."""
    a, b = runs(np.random.default_rng(3), 1, reward(200), (3, 0), 0.3)
    alone, examined = judged(a[0, :1], b[0])
    assert alone.verdict == "cannot tell"
    assert "unknown without repeats: " in alone.explanation
    assert alone.explanation.endswith("would suffice")
    assert (examined.repeats, examined.findings) == (0, [])
    assert judged(a[0], b[0])[0].verdict == "within noise"


def test_too_much_noise_is_reported_with_what_would_suffice() -> None:
    """One repeat at 50 steps sees no drift of one standard deviation: no pass, however alike the curves are."""
    a, b = runs(np.random.default_rng(5), 1, reward(50), (1, 0), 0.5)
    judgement, examined = judged(a[0], b[0])
    assert judgement.verdict == "cannot tell"
    assert examined.power is not None
    assert examined.power.drift > examined.power.noise_sd
    assert f"a drift of {examined.power.drift_within:.2g} is not excluded: " in judgement.explanation
    assert judgement.explanation.endswith("would suffice")
    wanted = examined.suffices(examined.power.noise_sd)
    assert wanted is not None
    assert wanted.repeats > 1 or wanted.steps > 50
    # And it does suffice, more often than not.
    a, b = runs(np.random.default_rng(2), 20, reward(wanted.steps), (wanted.repeats, 0), 0.5)
    verdicts = [judged(one, other)[0].verdict for one, other in zip(a, b, strict=True)]
    assert verdicts.count("within noise") > 10
    hopeless = judged(
        np.array([reward(50)] * 2) + 0.5 * remembering(np.random.default_rng(4), (2, 50), 0.5), b[0, :, :50]
    )
    assert hopeless[0].verdict != "within noise"


def test_repeats_of_b_count_like_those_of_a() -> None:
    a, b = runs(np.random.default_rng(5), 1, reward(200), (2, 2), 0.3)
    judgement, examined = judged(a[0], b[0])
    assert (judgement.verdict, examined.repeats) == ("within noise", 4)
    assert judged(a[0], b[0] + SD)[0].verdict == "out of step"
    # Twice as many runs of B make a difference of the sides that is as much more certain.
    assert examined.power is not None
    fewer = judged(a[0], b[0, :1])[1].power
    assert fewer is not None
    assert examined.power.drift < fewer.drift


def test_a_repeat_that_does_not_cover_the_run_is_not_used() -> None:
    """One that ends early says nothing of a late collapse."""
    a, b = runs(np.random.default_rng(6), 1, reward(200), (3, 0), 0.3)
    a[0, 1:, 180:] = np.nan
    assert judged(a[0], b[0])[1].repeats == 0
    a, b = runs(np.random.default_rng(6), 1, reward(200), (3, 0), 0.3, fault=collapsed)
    a[0, 1:, ::2] = np.nan
    thinned, examined = judged(a[0], b[0])
    assert (thinned.verdict, examined.repeats, len(examined.steps)) == ("out of step", 3, 100)


def test_a_run_that_scatters_more_is_not_within_noise() -> None:
    draw = np.random.default_rng(7)
    a, b = runs(draw, 1, reward(200), (3, 0), 0.0)
    wild = b[0] + 2 * SD * draw.normal(size=(1, 200))
    judgement, examined = judged(a[0], wild)
    assert judgement.verdict == "out of step"
    assert "scatter" in [found.statistic for found in examined.findings]


@pytest.mark.daily
@pytest.mark.parametrize("fault", [biased, collapsed, stopped])
@pytest.mark.parametrize("repeats", [0, 2, 5])
def test_diverged_runs_never_pass(fault: object, repeats: int) -> None:
    """The exit code and the step of parting say the same: one is 1 wherever the other is there."""
    draw = np.random.default_rng(repeats)
    for memory in (0.0, 0.8):
        a, b = runs(draw, 10, reward(100), (repeats, 0), memory, fault=fault)  # type: ignore[arg-type]
        for one, other in zip(a, b, strict=True):
            judgement, _ = judged(one, other)
            assert (judgement.parted_at is None) or EXIT_CODES[judgement.verdict] == 1
            assert judgement.verdict not in PASSES or judgement.parted_at is None


def test_runs_that_cross_each_other_do_not_diverge() -> None:
    """Apart at every step, now above and now below: over the bar, but to no side."""
    a = reward(60)[None]
    crossing, examined = judged(a, a + 0.05 * np.resize([1, -1], 60))
    assert (crossing.verdict, crossing.parted_at, examined.findings) == ("cannot tell", None, [])


def test_the_same_runs_leave_no_noise() -> None:
    a = np.stack([reward(50)] * 3)
    judgement, examined = judged(a, a[:1])
    assert judgement.explanation == "A and B are equal at all 50 steps"
    assert (examined.power, examined.copies) == (Power(0, 0.0, 0.0, 0.0, 3, 50), 2)
    assert judged(a, a[:1] + 1e-6)[0].verdict == "in step"


def test_copies_of_a_deterministic_run_are_no_repeats() -> None:
    """A is deterministic, so its repeats are equal. B rounds differently and then samples other responses. The copies
    do not show by how much two such runs differ."""
    draw = np.random.default_rng(11)
    a, b = np.stack([0.15 + 0.02 * draw.normal(size=40)] * 3), 0.15 + 0.02 * draw.normal(size=(1, 40))
    judgement, examined = judged(a, b)
    assert (judgement.verdict, examined.repeats, examined.copies) == ("cannot tell", 0, 2)
    assert "; the noise is unknown, because all repeats equal another run of the same side" in judgement.explanation
    assert "the noise is unknown without repeats: " in judged(a[:1], b)[0].explanation
    # A run that earns nothing is found without the noise of repeats.
    assert judged(a, 0.001 * draw.normal(size=(1, 40)))[0].verdict == "out of step"


def test_one_deterministic_side_does_not_hide_the_noise_of_the_other() -> None:
    """With kernels, repeats differ from the second step on; with plain torch, they are equal. The copies of plain torch
    are one run."""
    draw = np.random.default_rng(12)
    a = np.stack([0.8 + 0.03 * draw.normal(size=200)] * 3)
    b = 0.8 + 0.03 * draw.normal(size=(3, 200))
    judgement, examined = judged(a, b)
    assert (examined.repeats, examined.copies, examined.findings) == (2, 2, [])
    assert judgement.verdict == "in step"
    same, other = judged(a[:1], b)
    assert (judgement, examined.findings) == (same, other.findings)


def test_rewards_that_differ_by_single_responses_are_not_out_of_step() -> None:
    """512 responses a step of a model that hardly ever earns: the same counts at 18 of 20 steps, and two that differ
    by one response, up and down. The mean does not differ at all."""
    a = np.array([[2, 2, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 1]]) / 512
    b = a.copy()
    b[0, [1, 8]] += np.array([1, -1]) / 512
    judgement, examined = judged(a, b)
    assert (judgement.verdict, examined.findings) == ("cannot tell", [])


@pytest.mark.parametrize("last", [3, 20])
def test_curves_that_are_equal_until_one_collapses_are_out_of_step(last: int) -> None:
    a = quiet(1, 1)
    b = a.copy()
    b[0, 40] += 0.002
    b[:, -last:] -= 0.3
    judgement, _ = judged(a, b)
    assert (judgement.verdict, judgement.parted_at) == ("out of step", 201 - last)


# The bar and the test, each by itself; the worse one is the headline ------------------------------------------------


def test_a_difference_of_many_deviations_does_not_pass_below_the_bar() -> None:
    """0.25 against 0.211 is 3.9 %, below the bar of 4 %, and 13 standard deviations of the noise."""
    draw = np.random.default_rng(0)
    a, b = 0.25 + 0.003 * draw.normal(size=(4, 200)), 0.211 + 0.003 * draw.normal(size=(1, 200))
    judgement, _ = judged(a, b)
    assert (judgement.verdict, judgement.bar, judgement.test) == ("out of step", "met", "difference")
    assert judgement.explanation.startswith("absolute mean error 3.9")
    assert "drift: -0.0393 in the mean of steps 1 to 200" in judgement.explanation
    # Without a repeat nobody knows whether runs of one side lie as far apart.
    alone, _ = judged(a[:1], b)
    assert (alone.verdict, alone.bar, alone.test) == ("cannot tell", "met", "difference")
    # A tenth of it is as certain, but small relative to the bar: only a remark.
    small, _ = judged(a, b + 0.035)
    assert (small.verdict, small.bar, small.test) == ("in step", "met", "small difference")
    assert "drift: -0.004" in small.explanation


def test_a_pass_excludes_a_drift_of_the_size_of_the_bar() -> None:
    """Noise of 3 % around one curve: its mean error meets the bar of 4 %, and so it does in 12 steps with a drift of
    0.04 in them that nobody can see."""
    draw = np.random.default_rng(1)
    a, b = 0.5 + 0.03 / np.sqrt(2) * draw.normal(size=(2, 1, 12))
    judgement, examined = judged(a, b)
    assert (judgement.verdict, judgement.bar, judgement.test) == ("cannot tell", "met", "cannot tell")
    assert examined.power is not None
    assert examined.power.drift_within > 0.04
    assert "may hide a drift" in judgement.explanation


LENGTHS_AND_REPEATS = [(30, 0), (30, 3), (100, 1), (200, 0), (200, 3)]


@pytest.mark.parametrize(
    ("steps", "repeats", "pairs", "most"),
    [
        (30, 0, 20, 5),
        (100, 1, 20, 5),
        *(pytest.param(*row, 60, 9, marks=pytest.mark.slow) for row in LENGTHS_AND_REPEATS),
    ],
)
def test_a_drift_of_the_size_of_the_bar_seldom_passes(steps: int, repeats: int, pairs: int, most: int) -> None:
    """At 5 %, 60 pairs have more than 9 passes, and 20 pairs more than 5, once in a thousand times."""
    for sd in (0.01, 0.03, 0.06):
        a, b = runs(np.random.default_rng(steps + repeats), pairs, reward(steps), (repeats, 0), 0.5)
        a, b = ((side - reward(steps)) * sd / SD + reward(steps) for side in (a, b))
        verdicts = [judged(one, other + 0.04)[0].verdict for one, other in zip(a, b, strict=True)]
        assert sum(verdict in PASSES for verdict in verdicts) <= most, sd


@pytest.mark.daily
@pytest.mark.parametrize("repeats", [0, 3])
@pytest.mark.parametrize("steps", [20, 100, 500])
def test_a_single_step_of_20_deviations_is_found(steps: int, repeats: int) -> None:
    a, b = runs(np.random.default_rng(steps), 40, np.full(steps, 0.5), (repeats, 0), 0.5)
    b[:, 0, steps // 3] += 20 * SD * (1 - 0.5 / 3)
    found = [judged(one, other) for one, other in zip(a, b, strict=True)]
    spikes = [[each for each in examined.findings if each.statistic == "spike"] for _, examined in found]
    assert sum(judgement.verdict == "out of step" for judgement, _ in found) >= 36
    assert {spike[0].first for spike in spikes if spike} == {steps // 3 + 1}
    assert sum(bool(spike) for spike in spikes) >= 36
    explanation = next(
        judgement.explanation for judgement, examined in found if examined.findings[0].statistic == "spike"
    )
    assert f"single step {steps // 3 + 1}: +" in explanation


def test_a_single_step_of_curves_that_are_equal_elsewhere() -> None:
    """A wrong step is found in a curve that moves; one more correct response in nearly constant rewards is not."""
    draw = np.random.default_rng(2)
    a = 1 + 0.05 * draw.normal(size=(1, 100))
    b = a.copy()
    b[0, 40] += 1
    assert [found.statistic for found in judged(a, b, "loss")[1].findings] == ["spike"]
    rare = np.zeros((1, 100))
    rare[0, [7, 60]] = 0.25
    other = rare.copy()
    other[0, 40] = 0.25
    assert judged(rare, other)[1].findings == []
