"""What the verdict must see (late collapse, bias, parting for good), and what it must not claim to have seen."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.parity.compare.comparison import Power
from lockstep.parity.compare.show import EXIT_CODES
from parity_curves import SD, biased, collapsed, judged, remembering, reward, runs, stopped

PASSES = ("in step", "within noise")


def quiet(seed: int, count: int, memory: float = 0.3) -> np.ndarray:
    """Rewards that settle at 0.8; repeats differ by 1.13 % in the mean."""
    level = np.minimum(0.8, 0.2 + 0.01 * np.arange(200))
    return level + 0.01 * remembering(np.random.default_rng(seed), (count, 200), memory)


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


def test_a_loss_that_parts_for_good_near_its_end() -> None:
    """DPO, +0.15 over the last 20 of 200 steps: 1.5 % in the mean, within the bar of 2 %."""
    draw = np.random.default_rng(0)
    a, b = (0.69 * np.exp(-np.arange(200) / 150) + 0.0001 * draw.normal(size=(1, 200)) for _ in range(2))
    assert judged(a, b, "loss")[0].verdict == "in step"
    b[:, -20:] += 0.15
    judgement, _ = judged(a, b, "loss")
    assert (judgement.verdict, judgement.parted_at) == ("out of step", 181)
    assert judgement.explanation.startswith("absolute mean error 1.5")
    assert " <= 2 % (" in judgement.explanation


def test_a_change_that_passes_is_told_with_its_steps() -> None:
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
        assert near.explanation.endswith("too few: 8 at least are needed")
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
    assert "not known without repeats: " in alone.explanation
    assert alone.explanation.endswith("would suffice")
    assert (examined.repeats, examined.findings) == (0, [])
    assert judged(a[0], b[0])[0].verdict == "within noise"


def test_too_much_noise_is_said_with_what_would_suffice() -> None:
    """One repeat at 50 steps sees no drift of one standard deviation: no pass, however alike the curves are."""
    a, b = runs(np.random.default_rng(5), 1, reward(50), (1, 0), 0.5)
    judgement, examined = judged(a[0], b[0])
    assert judgement.verdict == "cannot tell"
    assert examined.power is not None
    assert examined.power.drift > examined.power.noise_sd
    assert f"a drift below {examined.power.drift:.2g} would not be seen: " in judgement.explanation
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


@pytest.mark.parametrize("fault", [biased, collapsed, stopped])
@pytest.mark.parametrize("repeats", [0, 2, 5])
def test_what_is_parted_is_never_passed(fault: object, repeats: int) -> None:
    """The exit code and the step of parting say the same: one is 1 wherever the other is there."""
    draw = np.random.default_rng(repeats)
    for memory in (0.0, 0.8):
        a, b = runs(draw, 10, reward(100), (repeats, 0), memory, fault=fault)  # type: ignore[arg-type]
        for one, other in zip(a, b, strict=True):
            judgement, _ = judged(one, other)
            assert (judgement.parted_at is None) or EXIT_CODES[judgement.verdict] == 1
            assert judgement.verdict not in PASSES or judgement.parted_at is None


def test_runs_that_cross_each_other_have_not_parted() -> None:
    """Apart at every step, now above and now below: over the bar, but to no side."""
    a = reward(60)[None]
    crossing, examined = judged(a, a + 0.05 * np.resize([1, -1], 60))
    assert (crossing.verdict, crossing.parted_at, examined.findings) == ("cannot tell", None, [])


def test_the_same_runs_leave_no_noise() -> None:
    a = np.stack([reward(50)] * 3)
    judgement, examined = judged(a, a[:1])
    assert judgement.explanation == "the same at all 50 steps"
    assert examined.power == Power(2, 0.0, 0.0, 0.0, 3, 50)
    other = judged(a, a[:1] + 1e-6)[0]
    assert (other.verdict, "drift: +1e-06 in the mean of steps 1 to 50" in other.explanation) == ("in step", True)


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
