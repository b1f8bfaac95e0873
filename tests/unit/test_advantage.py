"""Advantage estimators by hand, against padded references, and by their properties."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantage import (
    ESTIMATORS,
    Signals,
    TrajectoryTurns,
    Whitening,
    informative,
    positions,
    running_sum,
    whiten,
)
from lockstep.errors import Refusal
from work import lines_run, operators_run

GROUP_METHODS = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_pp_baseline")
SUM_TO_ZERO = ("grpo", "dr_grpo", "rloo", "gpg")


def step(scores, groups, lengths, dtype=torch.float64, **extra) -> Signals:
    """Sequences with their score on the last token."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    rewards = torch.zeros(int(sum(lengths)), dtype=dtype)
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
    for score, end, length in zip(scores, ends.tolist(), lengths, strict=True):
        if length:
            rewards[end] = score
    return Signals(rewards, sequence, torch.tensor(groups, dtype=torch.int64), **extra)


def one_turn(name: str, signals: Signals) -> Signals:
    """The signals with one turn per sequence, for an estimator that compares turns; all start in one state."""
    if name != "gigpo":
        return signals
    count = len(signals.group_S)
    return replace(
        signals, turns=TrajectoryTurns(signals.sequence_K, torch.arange(count), torch.zeros(count).long(), 0.9)
    )


def by_sequence(name: str, signals: Signals) -> list[float | None]:
    """The advantage of each sequence (its tokens must agree); None where it has no token."""
    advantages = ESTIMATORS[name](signals, gamma=1.0, lam=1.0).advantages_K
    result: list[float | None] = []
    for sequence in range(len(signals.group_S)):
        own = advantages[signals.sequence_K == sequence].tolist()
        assert len(set(own)) <= 1
        result.append(own[0] if own else None)
    return result


# One group of 1, 0, 0.5 (lengths 1, 2, 4) and one of 3, 1 (lengths 2, 1), sequences interleaved.
SCORES, GROUPS, LENGTHS = [1.0, 3.0, 0.0, 0.5, 1.0], [7, 3, 7, 7, 3], [1, 2, 2, 4, 1]
STD_7, STD_3 = 0.5, math.sqrt(2)
OPO_7, OPO_3 = (1 * 1 + 2 * 0 + 4 * 0.5) / 7, (2 * 3 + 1 * 1) / 3
BY_HAND = {
    "grpo": [0.5 / (STD_7 + 1e-6), 1 / (STD_3 + 1e-6), -0.5 / (STD_7 + 1e-6), 0.0, -1 / (STD_3 + 1e-6)],
    "dr_grpo": [0.5, 1.0, -0.5, 0.0, -1.0],
    "rloo": [1 - 0.25, 3 - 1.0, 0 - 0.75, 0.5 - 0.5, 1 - 3.0],
    "opo": [1 - OPO_7, 3 - OPO_3, 0 - OPO_7, 0.5 - OPO_7, 1 - OPO_3],
    "gpg": [0.5, 1.0, -0.5, 0.0, -1.0],
    "grpo_passk": [0.5 / (STD_7 + 1e-6), 2 / (STD_3 + 1e-6), 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_group_methods_by_hand(name):
    assert by_sequence(name, step(SCORES, GROUPS, LENGTHS)) == pytest.approx(BY_HAND[name], abs=1e-12)


def test_reinforce_pp_baseline_is_whitened_over_tokens():
    tokens = [0.5, 1.0, 1.0, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0]
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in tokens]
    estimate = ESTIMATORS["reinforce_pp_baseline"](step(SCORES, GROUPS, LENGTHS), gamma=1.0, lam=1.0)
    assert estimate.advantages_K.tolist() == pytest.approx(expected, abs=1e-12)


def test_flash_reinforce_takes_off_the_mean_of_the_step():
    assert by_sequence("flash_reinforce", step(SCORES, GROUPS, LENGTHS)) == pytest.approx([-0.1, 1.9, -1.1, -0.6, -0.1])
    # A sequence without a token has no part in the mean: 3 of 3.0, 1.0, 2.0.
    found = by_sequence("flash_reinforce", step([3.0, 9.0, 1.0, 2.0], [0, 0, 1, 2], [1, 0, 2, 1]))
    assert found == pytest.approx([1.0, None, -1.0, 0.0])
    assert by_sequence("flash_reinforce", step([0.1] * 3, [0, 0, 1], [1, 2, 1])) == [0.0] * 3


def test_gdpo_by_hand():
    """A large reward 10, 0 | 0, 10 and a small one 0, 0.1 | 0, 0 at weight 2, in two groups of two.

    A deviation of two numbers is their distance over sqrt(2), so each comes to +-1/sqrt(2); the small one of the second
    group to 0.
    """
    one, two = 1 / math.sqrt(2), 2 / math.sqrt(2)
    sums = [one - two, -one + two, -one, one]
    rewards = (1.0, torch.tensor([10.0, 0.0, 0.0, 10.0])), (2.0, torch.tensor([0.0, 0.1, 0.0, 0.0]))
    signals = step([10.0, 0.2, 0.0, 10.0], [0, 0, 1, 1], [1, 1, 1, 1], rewards=rewards)
    expected = [x / math.sqrt(statistics.variance(sums) + 1e-8) for x in sums]  # their mean is 0
    assert by_sequence("gdpo", signals) == pytest.approx(expected, rel=1e-4)
    plain = ESTIMATORS["gdpo"](replace(signals, whitening=Whitening(over="none")), gamma=1.0, lam=1.0)
    assert plain.advantages_K.tolist() == pytest.approx(sums, rel=1e-4)


def test_optimal_token_baseline_by_hand():
    """A group of three tokens and two; energies 1, 2, 1 | 3, 1, so 1, 3, 4 | 3, 4 up to each position.

    Returns to go of the first 6, 5, 4 (rewards 1, 1, 4), of the second 2, 2. Baselines: (6 x 1 + 2 x 3) / 4 = 3,
    (5 x 3 + 2 x 4) / 7 = 23/7, and 0 where one is left. A group of one gives 0.
    """
    sequence = torch.tensor([0, 0, 0, 1, 1, 2])
    rewards = torch.tensor([1.0, 1.0, 4.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    energy = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    signals = Signals(rewards, sequence, torch.tensor([4, 4, 1]), energy_K=energy)
    estimate = ESTIMATORS["optimal_token_baseline"](signals, gamma=1.0, lam=1.0)
    assert estimate.returns_K.tolist() == [6, 5, 4, 2, 2, 5]
    assert estimate.advantages_K.tolist() == pytest.approx([6 - 3, 5 - 23 / 7, 4, 2 - 3, 2 - 23 / 7, 0])


def test_a_penalty_that_is_not_compared_is_taken_off_token_by_token():
    """Scores 1 and 0: 0.5 from their mean on either side. Penalties of 0.1, 0.2 and of 0.4, each with those to come."""
    sequence = torch.tensor([0, 0, 1])
    rewards, penalties = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.1, 0.2, 0.4])
    signals = Signals(rewards, sequence, torch.tensor([0, 0]), kl_penalty_K=penalties)
    advantages = ESTIMATORS["dr_grpo"](signals, gamma=1.0, lam=1.0).advantages_K
    torch.testing.assert_close(advantages, torch.tensor([0.5 - 0.3, 0.5 - 0.2, -0.5 - 0.4]))
    # A group that compares it sees 0.7 and -0.4.
    compared = Signals(rewards - penalties, sequence, torch.tensor([0, 0]))
    advantages = ESTIMATORS["dr_grpo"](compared, gamma=1.0, lam=1.0).advantages_K
    torch.testing.assert_close(advantages, torch.tensor([0.55, 0.55, -0.55]))


def test_gpg_makes_up_for_groups_without_a_gradient():
    # Groups: 1, 0 (differ); 1, 1 and 0, 0 (equal); a single. Seven sequences, two of them informative.
    signals = step([1, 0, 1, 1, 0, 0, 5], [0, 0, 1, 1, 2, 2, 3], [1] * 7)
    assert by_sequence("gpg", signals) == pytest.approx([3.5 * 0.5, 3.5 * -0.5, 0, 0, 0, 0, 0])


def test_small_differences_are_not_drowned_by_the_floor():
    # The floor is on the deviation (7.07e-5), not on the variance, where it would give 0.05.
    assert by_sequence("grpo", step([1e-4, 0.0], [0, 0], [2, 3])) == pytest.approx([0.697247, -0.697247], rel=1e-5)


def test_score_is_the_sum_of_token_rewards():
    rewards = torch.tensor([0.1, 0.9, -0.2, 0.2, 0.0], dtype=torch.float64)
    signals = Signals(rewards, torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0]))
    assert by_sequence("dr_grpo", signals) == pytest.approx([0.5, -0.5])
    estimate = ESTIMATORS["dr_grpo"](signals, gamma=1.0, lam=1.0)
    assert estimate.returns_K.tolist() == pytest.approx([1, 1, 0, 0, 0])


def test_passk_ties_give_nothing():
    assert by_sequence("grpo_passk", step([1, 1, 0], [0, 0, 0], [1, 1, 1])) == [0, 0, 0]


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_group_of_one_gives_zero(name):
    assert by_sequence(name, step([5.0, -3.0, 0.1], [0, 1, 2], [2, 1, 3])) == [0, 0, 0]


@pytest.mark.parametrize("name", GROUP_METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_zero(name, dtype):
    # The mean of seven times 0.1 is not 0.1 in floating point.
    signals = step([0.1] * 7 + [1 / 3] * 3, [0] * 7 + [1] * 3, [1, 2, 3, 1, 2, 3, 1, 2, 5, 7], dtype)
    assert by_sequence(name, signals) == [0.0] * 10


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_sequence_without_tokens_is_no_part_of_the_baseline(name):
    whole = step(SCORES, GROUPS, LENGTHS)
    with_empty = step([*SCORES, 0.0, 0.0], [*GROUPS, 7, 99], [*LENGTHS, 0, 0])
    result = by_sequence(name, with_empty)
    assert result == [*by_sequence(name, whole), None, None]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_tokens_at_all(name):
    none = torch.zeros(0)
    signals = Signals(
        none,
        none.long(),
        torch.tensor([0, 0]),
        values_K=none,
        baseline_S=torch.zeros(2),
        energy_K=none,
        rewards=((1.0, torch.zeros(2)),),
    )
    estimate = ESTIMATORS[name](one_turn(name, signals), gamma=0.9, lam=0.9)
    assert len(estimate.advantages_K) == len(estimate.returns_K) == 0


def test_return_to_go_by_hand():
    rewards = torch.tensor([1.0, 0.0, 2.0, -1.0, 4.0], dtype=torch.float64)
    signals = Signals(rewards, torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 1, 2]))
    returns = [1 + 0.25 * 2, 0.5 * 2, 2, -1 + 0.5 * 4, 4]
    estimate = ESTIMATORS["reinforce"](signals, gamma=0.5, lam=1.0)
    assert estimate.advantages_K.tolist() == estimate.returns_K.tolist() == pytest.approx(returns)
    estimate = ESTIMATORS["reinforce_pp"](signals, gamma=0.5, lam=1.0)
    mean, deviation = statistics.mean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    assert estimate.advantages_K.tolist() == pytest.approx([(g - mean) / deviation for g in returns])
    assert estimate.returns_K.tolist() == pytest.approx(returns)


def test_remax_subtracts_the_greedy_score():
    rewards = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    baseline = torch.tensor([0.25, 9.0, -1.0], dtype=torch.float64)
    signals = Signals(rewards, torch.tensor([0, 0, 2]), torch.tensor([0, 1, 2]), baseline_S=baseline)
    estimate = ESTIMATORS["remax"](signals, gamma=1.0, lam=1.0)
    assert estimate.advantages_K.tolist() == pytest.approx([0.75, 0.75, 1.5])
    assert estimate.returns_K.tolist() == pytest.approx([1, 1, 0.5])


def test_gae_by_hand():
    rewards = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64)
    signals = Signals(rewards, torch.tensor([0, 0, 1]), torch.tensor([0, 1]), values_K=values)
    estimate = ESTIMATORS["gae"](signals, gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    raw = [0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last, last, 2.0 - 1.0]
    assert estimate.returns_K.tolist() == pytest.approx([raw[0] + 0.5, raw[1] + 0.25, raw[2] + 1.0])
    mean, deviation = statistics.mean(raw), math.sqrt(statistics.variance(raw) + 1e-8)
    assert estimate.advantages_K.tolist() == pytest.approx([(a - mean) / deviation for a in raw])


def padded_gae(rewards, values, mask, gamma, lam):
    """Token by token over padded rows: where the mask is 0 the next value and the running advantage pass through."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        following, running = 0.0, 0.0
        for t in reversed(range(values.shape[1])):
            if mask[row, t]:
                running = rewards[row, t] + gamma * following - values[row, t] + gamma * lam * running
                following = values[row, t]
                advantages[row, t] = running
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0)])
def test_gae_and_returns_carry_across_observations(gamma, lam):
    # Rows with tool output in the middle, at the start, at the end, everywhere, and padding behind.
    mask = torch.tensor(
        [
            [1, 1, 0, 0, 1, 1, 0, 1],
            [0, 0, 1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 1, 0, 1, 0, 1, 0],
        ]
    )
    draw = torch.Generator().manual_seed(3)
    rewards = torch.randn(4, 8, generator=draw, dtype=torch.float64) * mask
    values = torch.randn(4, 8, generator=draw, dtype=torch.float64)  # at observations too: they must not matter
    own = mask.bool()
    sequence = torch.arange(4)[:, None].expand(4, 8)[own]
    signals = Signals(rewards[own], sequence, torch.arange(4), values_K=values[own])
    expected = padded_gae(rewards, values, mask, gamma, lam)[own]
    estimate = ESTIMATORS["gae"](signals, gamma=gamma, lam=lam)
    assert torch.allclose(estimate.returns_K, expected + values[own], rtol=0, atol=1e-12)
    white = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    assert torch.allclose(estimate.advantages_K, white, rtol=0, atol=1e-12)
    # Without values and with lambda 1 the same recursion is the return to go.
    returns = padded_gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)[own]
    assert torch.allclose(ESTIMATORS["reinforce"](signals, gamma=gamma, lam=lam).returns_K, returns, rtol=0, atol=1e-12)


def test_whitening_of_one_or_equal_values_is_zero():
    assert whiten(torch.tensor([4.2])).tolist() == [0]
    assert whiten(torch.full((1000,), 0.1)).tolist() == [0] * 1000
    assert whiten(torch.tensor([1.0, 3.0], dtype=torch.float64)).tolist() == pytest.approx(
        [-1 / math.sqrt(2 + 1e-8), 1 / math.sqrt(2 + 1e-8)], rel=1e-12
    )


def test_informative_groups():
    scores, groups = torch.tensor([0.1, 1.0, 0.1, 0.0, 1.0, 0.1]), torch.tensor([5, 2, 5, 2, 9, 5])
    assert informative(scores, groups).tolist() == [False, True, False, True, False, False]
    assert informative(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gae", "values"),
        ("remax", "greedy"),
        ("gdpo", "separate rewards"),
        ("optimal_token_baseline", "squared"),
        ("gigpo", "turns"),
    ],
)
def test_what_is_missing_is_named(name, what):
    with pytest.raises(Refusal, match=what):
        ESTIMATORS[name](step([1.0], [0], [2]), gamma=1.0, lam=1.0)


def test_types_are_those_of_the_rewards():
    for name in GROUP_METHODS:
        assert by_sequence(name, step(SCORES, GROUPS, LENGTHS, torch.float32)) == pytest.approx(
            by_sequence(name, step(SCORES, GROUPS, LENGTHS)), abs=1e-6
        )
        estimate = ESTIMATORS[name](step(SCORES, GROUPS, LENGTHS, torch.float32), gamma=1.0, lam=1.0)
        assert estimate.advantages_K.dtype == estimate.returns_K.dtype == torch.float32


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_loop_over_sequences_or_tokens(name):
    """At most a loop over positions, all sequences at once: four operators for each."""
    draw = torch.Generator().manual_seed(0)

    def work(sequences, tokens):
        signals = Signals(
            torch.randn(sequences * tokens, generator=draw),
            torch.arange(sequences).repeat_interleave(tokens),
            torch.arange(sequences) // 8,
            values_K=torch.randn(sequences * tokens, generator=draw),
            baseline_S=torch.zeros(sequences),
            energy_K=torch.rand(sequences * tokens, generator=draw),
            rewards=((1.0, torch.randn(sequences, generator=draw)),),
        )

        def estimate():
            return ESTIMATORS[name](one_turn(name, signals), gamma=0.99, lam=0.95)

        estimate()  # what is only done the first time
        return operators_run(estimate) + lines_run(estimate)

    assert work(512, 16) <= 1.1 * work(16, 16)
    assert work(16, 512) <= work(16, 16) + (512 - 16) * (4 + 2)


samples = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-8, 8).map(lambda x: x / 4)), min_size=1, max_size=12
)
quick = settings(max_examples=25)


def split(drawn):
    groups, lengths, scores = zip(*drawn, strict=True)
    return list(scores), list(groups), list(lengths)


def close(one, other) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.daily("grpo", "rloo", "grpo_passk", "opo")
@pytest.mark.parametrize("name", GROUP_METHODS)
@quick
@given(drawn=samples, shift=st.integers(-20, 20))
def test_a_constant_added_to_a_groups_scores_changes_nothing(name, drawn, shift):
    scores, groups, lengths = split(drawn)
    moved = [score + shift * (group + 1) for score, group in zip(scores, groups, strict=True)]
    assert close(by_sequence(name, step(scores, groups, lengths)), by_sequence(name, step(moved, groups, lengths)))


@pytest.mark.daily("grpo", "rloo", "grpo_passk", "opo")
@pytest.mark.parametrize("name", GROUP_METHODS)
@quick
@given(drawn=samples, data=st.data())
def test_order_and_names_of_groups_do_not_matter(name, drawn, data):
    order = data.draw(st.permutations(range(len(drawn))))
    names = data.draw(st.permutations([0, 1, 10**9, 7]))
    scores, groups, lengths = split(drawn)
    plain = by_sequence(name, step(scores, groups, lengths))
    mixed = step([scores[i] for i in order], [names[groups[i]] for i in order], [lengths[i] for i in order])
    assert close([plain[i] for i in order], by_sequence(name, mixed))


@pytest.mark.parametrize("name", SUM_TO_ZERO)
@quick
@given(drawn=samples)
def test_advantages_of_a_group_sum_to_zero(name, drawn):
    scores, groups, lengths = split(drawn)
    result = by_sequence(name, step(scores, groups, lengths))
    for group in set(groups):
        own = [a for a, g in zip(result, groups, strict=True) if g == group and a is not None]
        assert math.isclose(sum(own), 0, abs_tol=1e-9)


@quick
@given(drawn=samples)
def test_opo_sums_to_zero_by_length(drawn):
    scores, groups, lengths = split(drawn)
    signals = step(scores, groups, lengths)
    advantages = ESTIMATORS["opo"](signals, gamma=1.0, lam=1.0).advantages_K
    for group in set(groups):
        assert math.isclose(float(advantages[signals.group_S[signals.sequence_K] == group].sum()), 0, abs_tol=1e-9)


@pytest.mark.daily("grpo_passk", "optimal_token_baseline", "reinforce_pp", "gdpo", "opo", "grpo")
@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(drawn=samples)
def test_nothing_is_ever_nan(name, drawn):
    scores, groups, lengths = split(drawn)
    tokens = sum(lengths)
    more = {"energy_K": torch.ones(tokens), "rewards": ((1.0, torch.tensor(scores)), (0.5, torch.ones(len(scores))))}
    signals = step(scores, groups, lengths, values_K=torch.ones(tokens), baseline_S=torch.ones(len(lengths)), **more)
    estimate = ESTIMATORS[name](one_turn(name, signals), gamma=0.9, lam=0.9)
    assert bool(estimate.advantages_K.isfinite().all())
    assert bool(estimate.returns_K.isfinite().all())


def test_whitening_over_the_step_by_hand():
    """Advantages 0.5, 0.5, 0.5 and -0.5 of tokens: mean 0.25, squares 3 / 16 + 9 / 16 = 0.75 over 3 or over 4."""
    signals = step([1.0, 0.0], [0, 0], [3, 1])
    centred = [0.25, 0.25, 0.25, -0.75]

    def whitened(**choices) -> list[float]:
        changed = replace(signals, whitening=Whitening("step", **choices))
        return ESTIMATORS["dr_grpo"](changed, gamma=1.0, lam=1.0).advantages_K.tolist()

    assert whitened(divide=False) == pytest.approx(centred)
    assert whitened() == pytest.approx([value / math.sqrt(0.25 + 1e-8) for value in centred])
    assert whitened(biased=True) == pytest.approx([value / math.sqrt(0.75 / 4 + 1e-8) for value in centred])
    unchanged = replace(signals, whitening=Whitening("none"))
    advantages = ESTIMATORS["dr_grpo"](unchanged, gamma=1.0, lam=1.0).advantages_K
    assert advantages.tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_positions_count_from_zero_in_every_sequence():
    assert positions(torch.tensor([0, 0, 0, 2, 5, 5])).tolist() == [0, 1, 2, 0, 0, 1]
    assert positions(torch.zeros(0, dtype=torch.int64)).tolist() == []
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert running_sum(values, torch.tensor([0, 0, 0, 2, 5, 5])).tolist() == [1, 3, 7, 8, 16, 48]
