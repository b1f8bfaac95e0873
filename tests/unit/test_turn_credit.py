"""Credit per turn: the discount between turns and GiGPO, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch

from hand_rollouts import recipe_of, rollout
from lockstep.errors import Refusal
from lockstep.recipe import Recipe
from lockstep.recipe.recipe_checks import combination_problems
from lockstep.train.advantages import estimate_advantages
from lockstep.train.experience import ModelOutputs, build_experience, rollout_metas
from lockstep.train.monitor import has_signal
from lockstep.trajectory import Trajectory, TurnRecord
from lockstep.types import Rollout

# Three trajectories of one prompt. Each turn: number of tokens, reward, state at its start. One token of the
# environment follows each turn but the last.
GAME: list[list[tuple[int, float, str | None]]] = [
    [(2, 0.0, "start"), (1, 1.0, "middle")],
    [(1, 0.5, "start"), (1, 0.0, "middle"), (2, 0.25, "end")],
    [(3, 0.0, "start"), (1, 0.0, None)],
]
DISCOUNT = 0.5
# R_t = r_t + 0.5 R_{t+1}
RETURNS = [[0.5, 1.0], [0.5 + 0.0625, 0.125, 0.25], [0.0, 0.0]]
TOKENS = [[2, 1], [1, 1, 2], [3, 1]]


def played(turns: Sequence[tuple[int, float, str | None]], sample: int) -> Rollout:
    mask: list[int] = []
    records: list[TurnRecord] = []
    for length, reward, anchor in turns:
        mask += [0] if mask else []
        records.append(TurnRecord(len(mask), len(mask) + length, reward, anchor=anchor))
        mask += [1] * length
    total = sum(reward for _, reward, _ in turns)
    earned = tuple((turn.stop - 1, turn.reward) for turn in records if turn.reward)
    made = rollout(0, range(10, 10 + len(mask)), total, sample=sample, trained=mask, earned=earned)
    return replace(made, trajectory=Trajectory([], records, "completed"))


def recipe(**keys: Any) -> Recipe:
    given = {"algorithm__kl__where": "none", "algorithm__whiten__over": "none", "rollout__environment": "game.py:Game"}
    return recipe_of(rollout__n=3, **given, **keys)


def estimated(game: Sequence[Sequence[tuple[int, float, str | None]]], values: Any = None, **keys: Any) -> list[float]:
    experience = build_experience([played(turns, sample) for sample, turns in enumerate(game)])
    tokens = len(experience.sequence_K)
    outputs = ModelOutputs(torch.zeros(tokens), None, values)
    return estimate_advantages(experience, outputs, recipe(**keys), 0.0).advantages_K.tolist()


def at_tokens(by_turn: Sequence[Sequence[float]]) -> list[float]:
    return [
        value
        for values, counts in zip(by_turn, TOKENS, strict=True)
        for value, count in zip(values, counts, strict=True)
        for _ in range(count)
    ]


def normalized(values: Sequence[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    return ((found - found.mean()) / (found.std() + 1e-6)).tolist()


def test_returns_are_discounted_between_turns() -> None:
    """Within a turn, nothing is discounted. The token of the environment adds no discount."""
    found = estimated(GAME, algorithm__advantage="reinforce", algorithm__turn_discount=DISCOUNT)
    assert found == pytest.approx(at_tokens(RETURNS))
    assert estimated(GAME, algorithm__advantage="reinforce") == pytest.approx(
        at_tokens([[1.0, 1.0], [0.75, 0.25, 0.25], [0.0, 0.0]])
    )


def test_a_group_compares_the_returns_of_first_turns() -> None:
    """The scores are 0.5 x 1; 0.5 + 0.25 x 0.25; 0. Every token of a trajectory has its advantage."""
    scores = [returns[0] for returns in RETURNS]
    wanted = [value for value, counts in zip(normalized(scores), TOKENS, strict=True) for _ in range(sum(counts))]
    found = estimated(GAME, algorithm__advantage="grpo", algorithm__turn_discount=DISCOUNT)
    assert found == pytest.approx(wanted, rel=1e-5)
    undiscounted = estimated(GAME, algorithm__advantage="grpo")
    assert undiscounted != pytest.approx(wanted, rel=1e-2)


def test_equal_scores_of_different_turns_give_no_advantage() -> None:
    """The sums of these rewards differ in their last bits."""
    split = [[(1, 0.1, "s")] * 30, [(1, 0.3, "s")] * 10]
    assert reduce(add, [0.1] * 30) != reduce(add, [0.3] * 10)  # since Python 3.12, sum() corrects its rounding
    assert set(estimated(split, algorithm__advantage="grpo")) == {0.0}
    assert set(estimated(split, algorithm__advantage="rloo")) == {0.0}


@pytest.mark.parametrize("advantage", ["gigpo", "grpo", "rloo"])
def test_equal_discounted_returns_of_different_turns_give_no_advantage(advantage: str) -> None:
    """0.2 + 0.5 x 0.2 = 0.3 + 0.5 x 0 = 0.3, but not as sums of rounded numbers."""
    discounted = [[(1, 0.2, "a"), (1, 0.2, "b")], [(1, 0.3, "a"), (1, 0.0, "c")]]
    split = [[(1, 0.1, f"s{i}") for i in range(30)], [(1, 0.3, f"t{i}") for i in range(10)]]
    keys = {"algorithm__advantage": advantage}
    if advantage != "gigpo":
        assert set(estimated(discounted, **keys, algorithm__turn_discount=DISCOUNT)) == {0.0}
    assert set(estimated(split, **keys)) == {0.0}


def test_turns_of_gigpo_with_equal_returns_have_no_advantage() -> None:
    """The returns are 0.1 + 0.2 and 0.3, and the trajectories of the group have equal scores."""
    turns = [[(1, 0.1, "a"), (1, 0.2, "b")], [(1, 0.3, "a"), (1, 0.0, "c")]]
    assert set(estimated(turns, algorithm__advantage="gigpo")) == {0.0}


Group = list[list[tuple[int, float, str | None]]]


@pytest.mark.parametrize(
    ("game", "keys", "wanted"),
    [
        # Equal totals, earned in other turns.
        ([[(1, 1.0, "a"), (1, 0.0, "b")], [(1, 0.0, "a"), (1, 1.0, "b")]], {"turn_discount": 0.5}, True),
        ([[(1, 1.0, "a"), (1, 0.0, "b")], [(1, 0.0, "a"), (1, 1.0, "b")]], {}, False),
        # Other totals, but equal discounted returns.
        ([[(1, 0.2, "a"), (1, 0.2, "b")], [(1, 0.3, "a"), (1, 0.0, "b")]], {"turn_discount": 0.5}, False),
        ([[(1, 0.2, "a"), (1, 0.2, "b")], [(1, 0.3, "a"), (1, 0.0, "b")]], {}, True),
        # gigpo compares totals, and the returns of turns that start in the same state.
        ([[(1, 1.0, "a"), (1, 0.0, "b")], [(1, 0.0, "a"), (1, 1.0, "b")]], {"advantage": "gigpo"}, True),
        ([[(1, 1.0, "a"), (1, 0.0, "b")], [(1, 0.0, "a"), (1, 1.0, "c")]], {"advantage": "gigpo"}, False),
        ([[(1, 1.0, None), (1, 0.0, None)], [(1, 0.0, None), (1, 1.0, None)]], {"advantage": "gigpo"}, False),
        ([[(1, 0.5, "a")], [(1, 0.25, "b")]], {"advantage": "gigpo", "turn_discount": 0.5}, True),
        ([[(1, 0.1, "s")] * 30, [(1, 0.3, "t")] * 10], {}, False),
    ],
)
def test_dynamic_sampling_keeps_the_groups_that_have_advantages(
    game: Group, keys: dict[str, Any], wanted: bool
) -> None:
    given = {f"algorithm__{name}": value for name, value in keys.items()}
    algorithm = recipe(**given).algorithm
    group = [played(turns, sample) for sample, turns in enumerate(game)]
    assert has_signal(rollout_metas(group), {0: group[0].prompt}, algorithm) == wanted
    named = any(anchor for turns in game for _, _, anchor in turns)
    if named or algorithm.advantage != "gigpo":
        assert any(estimated(game, **given)) == wanted


def test_generalized_advantages_are_discounted_between_turns() -> None:
    values = [0.3, -0.2, 0.6, 0.1, 0.4, -0.5, 0.2, 0.7, 0.0, 0.9, -0.1]
    gamma, lam = 0.9, 0.8
    place, wanted = 0, []
    for turns in GAME:
        rewards, factors = [], []
        for number, (length, reward, _) in enumerate(turns):
            rewards += [0.0] * (length - 1) + [reward]
            factors += [gamma] * (length - 1) + [gamma * DISCOUNT if number < len(turns) - 1 else 0.0]
        later, advantages = 0.0, [0.0] * len(rewards)
        for i in reversed(range(len(rewards))):
            following = values[place + i + 1] if i < len(rewards) - 1 else 0.0
            later = rewards[i] + factors[i] * following - values[place + i] + factors[i] * lam * later
            advantages[i] = later
        wanted += advantages
        place += len(rewards)
    keys = {"algorithm__advantage": "gae", "algorithm__gamma": gamma, "algorithm__lam": lam}
    found = estimated(GAME, torch.tensor(values), method="ppo", algorithm__turn_discount=DISCOUNT, **keys)
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_gigpo(weight: float) -> None:
    """A trajectory has its advantage in the group by its undiscounted score. A turn has its advantage among the turns
    that start in the same state: three in `start`, two in `middle`. The states `end` and None occur once."""
    trajectory = normalized([1.0, 0.75, 0.0])
    start = normalized([returns[0] for returns in RETURNS])
    middle = normalized([RETURNS[0][1], RETURNS[1][1]])
    turns = [[start[0], middle[0]], [start[1], middle[1], 0.0], [start[2], 0.0]]
    wanted = at_tokens([[whole + weight * turn for turn in of] for whole, of in zip(trajectory, turns, strict=True)])
    found = estimated(
        GAME, algorithm__advantage="gigpo", algorithm__turn_discount=DISCOUNT, algorithm__turn_weight=weight
    )
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_states_of_other_prompts_are_not_compared() -> None:
    """The same state in another prompt is another state: its turn is alone, so it has only the trajectory's advantage,
    which is 0 in a group of one."""
    other = replace(played(GAME[0], 0), prompt_index=1)
    experience = build_experience([*(played(turns, i) for i, turns in enumerate(GAME)), other])
    outputs = ModelOutputs(torch.zeros(len(experience.sequence_K)), None, None)
    given = recipe(algorithm__advantage="gigpo", algorithm__turn_discount=DISCOUNT)
    found = estimate_advantages(experience, outputs, given, 0.0).advantages_K.tolist()
    alone = estimated(GAME, algorithm__advantage="gigpo", algorithm__turn_discount=DISCOUNT)
    assert found == pytest.approx([*alone, 0.0, 0.0, 0.0])


def test_gigpo_needs_states() -> None:
    nameless = [[(length, reward, None) for length, reward, _ in turns] for turns in GAME]
    with pytest.raises(Refusal, match="the environment names no state"):
        estimated(nameless, algorithm__advantage="gigpo")


def test_a_greedy_baseline_is_not_discounted() -> None:
    given = recipe(algorithm__advantage="remax")
    discounted = given.model_copy(update={"algorithm": given.algorithm.model_copy(update={"turn_discount": DISCOUNT})})
    found = list(combination_problems(discounted))
    assert "algorithm.turn_discount" in [str(problem.where) for problem in found]


def test_keys_of_turns_need_conversations() -> None:
    values = {"method": "grpo", "device": "cpu", "model": {"path": "m"}, "data": {"train": "rows"}}
    for algorithm, key in (({"turn_discount": 0.9}, "turn_discount"), ({"advantage": "gigpo"}, "advantage")):
        found = list(combination_problems(Recipe.model_validate({**values, "algorithm": algorithm})))
        assert f"algorithm.{key}" in [str(problem.where) for problem in found]
