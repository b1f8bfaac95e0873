"""Warnings of trouble: at which number each is said, in which words, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hand_rollouts import recipe_of, rollout
from lockstep.train.advantages import Advantages, TrainBatch
from lockstep.train.experience import ModelOutputs, build_experience
from lockstep.train.monitor import STEPS_BETWEEN_WARNINGS as QUIET
from lockstep.train.monitor import Warnings, find_idle_cause

FINE = {"actor/entropy": 1.0}


def read(warnings: Warnings, **metrics: float) -> list[str]:
    return list(warnings.read({**FINE, **{name.replace("__", "/"): value for name, value in metrics.items()}}))


@pytest.mark.parametrize(
    ("name", "quiet", "loud", "words"),
    [
        ("actor__pg_clipfrac", 0.3, 0.3001, ["30 %", "optim.lr", "algorithm.epochs"]),
        ("actor__ppo_kl", 0.2, 0.2001, ["0.2 nats", "optim.lr"]),
        ("actor__ppo_kl", -0.2, -0.2001, ["0.2 nats", "optim.lr"]),
        ("actor__kl", 1.0, 1.0001, ["1 nat", "algorithm.kl.coefficient"]),
        ("actor__reward_kl_penalty", 1.0, 1.0001, ["1 nat", "algorithm.kl.coefficient"]),
        ("response_length__clip_ratio", 0.5, 0.5001, ["rollout.max_tokens", "end token"]),
        (
            "training__rollout_probs_diff_mean",
            0.05,
            0.0501,
            ["engine and trainer", "algorithm.rollout_correction.weight"],
        ),
    ],
)
def test_a_sign_shows_beyond_its_threshold_and_says_what_it_means(
    name: str, quiet: float, loud: float, words: list[str]
) -> None:
    warnings = Warnings(recipe_of())
    assert read(warnings, **{name: quiet}) == []
    (said,) = read(warnings, **{name: loud})
    assert all(word in said for word in words)


def test_a_limit_of_trajectories_is_not_called_max_tokens() -> None:
    (said,) = read(Warnings(recipe_of()), response_length__clip_ratio=1.0, environment__turns=3.0)
    assert "rollout.max_turns" in said
    assert "end token" not in said


def test_failing_tools_are_reported() -> None:
    warnings = Warnings(recipe_of())
    assert read(warnings, environment__tool_errors=1.0, environment__tool_calls=2.0) == []
    (said,) = read(warnings, environment__tool_errors=1.1, environment__tool_calls=2.0)
    assert "tool calls fail" in said


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        (
            {"rollout__max_staleness": 2, "algorithm__correction__bypass": False},
            "Remove algorithm.rollout_correction.weight",
        ),
        (
            {"rollout__max_staleness": 2, "algorithm__loss": "cispo"},
            "this. Lower optim.lr or rollout.max_staleness",
        ),
        ({"rollout__max_staleness": 2}, None),
        ({"rollout__max_staleness": 0}, None),
        ({}, None),
    ],
)
def test_a_policy_that_runs_away_is_seen_where_responses_are_stale(keys: dict[str, Any], remedy: str | None) -> None:
    warnings = Warnings(recipe_of(**keys))
    assert read(warnings, rollout_corr__k3=0.02) == []
    said = read(warnings, rollout_corr__k3=0.0201)
    assert [remedy is not None and remedy in one for one in said] == [True] * (remedy is not None)


def test_what_stale_responses_show_has_a_remedy_that_may_be_said() -> None:
    """A weight beside the clip that is held against the draw would be refused."""
    warnings = Warnings(recipe_of(rollout__max_staleness=2))
    signs = {"actor__pg_clipfrac": 0.4, "actor__ppo_kl": 0.3, "training__rollout_probs_diff_mean": 0.1}
    clipped, moved, apart = read(warnings, **signs)
    assert "Lower optim.lr, or rollout.max_staleness, or make fewer" in clipped
    assert "since generation" in moved
    assert apart.endswith("Lower optim.lr or rollout.max_staleness")
    (served,) = read(Warnings(recipe_of(algorithm__correction__weight="token")), training__rollout_probs_diff_mean=0.1)
    assert served.endswith("Try model.dtype=fp32")


def test_entropy_is_measured_against_where_it_began() -> None:
    warnings = Warnings(recipe_of())
    assert read(warnings, actor__entropy=2.0) == []
    assert read(warnings, actor__entropy=0.1) == []
    (said,) = read(warnings, actor__entropy=0.0999)
    assert "a twentieth of its initial value" in said


def test_entropy_begins_with_the_first_step_that_has_one() -> None:
    """Steps in which only the critic learns have no entropy."""
    warnings = Warnings(recipe_of())
    assert list(warnings.read({})) == []
    assert read(warnings, actor__entropy=1.0) == []
    assert len(read(warnings, actor__entropy=0.04)) == 1


def missing(scores: list[float], advantages: list[float], keep: list[float] | None = None, **keys: Any) -> str | None:
    """Why responses of one token, two to a prompt, teach nothing; None where they do."""
    made = [rollout(number // 2, [7], score, sample=number % 2) for number, score in enumerate(scores)]
    cut = {} if keep is None else {"response/skipped_ratio": keep.count(0.0) / len(keep)}
    mixed = sum(a != b for a, b in zip(scores[::2], scores[1::2], strict=True)) * 2 / len(scores)
    metrics = {**cut, "critic/mixed_groups": mixed, "critic/score/mean": sum(scores) / len(scores)}
    values, ones = torch.tensor(advantages), torch.ones(len(scores))
    kept = ones if keep is None else torch.tensor(keep)
    found = Advantages(values, values, values, kept, ones, metrics)
    learned = TrainBatch(build_experience(made), ModelOutputs(None, None, None), found)
    said = find_idle_cause(learned, recipe_of(**keys))
    return None if said is None else said.cause


def test_what_a_step_lacks_is_named() -> None:
    same = "every advantage is zero, because all responses of each group earned the same reward (mean 0.5)"
    assert missing([0, 0, 1, 1], [0, 0, 0, 0]) == same
    assert missing([0, 1, 1, 1], [-1, 1, 0, 0]) is None
    # Only what is kept counts.
    assert missing([0, 1, 1, 1], [-1, 1, 0, 0], [0, 1, 1, 1]) is None
    half = "50% of the responses are masked as truncated, and of the others every advantage is zero"
    assert missing([0, 1, 1, 1], [-1, 1, 0, 0], [0, 0, 1, 1]) == half
    assert "every response is truncated" in str(missing([0, 1, 1, 1], [-1, 1, 0, 0], [0, 0, 0, 0]))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "on_policy_distill"}, False),
        ({"method": "on_policy_distill", "reward__function": "f.py:f"}, True),
        ({"algorithm__advantage": "rloo"}, True),
        ({"algorithm__advantage": "reinforce"}, True),
    ],
    ids=str,
)
def test_without_rewards_a_teacher_alone_is_followed(keys: dict[str, str], named: bool) -> None:
    """Advantages of zero mean that there is nothing to learn, unless no reward counts."""
    teacher = {"algorithm__kl__reference": "teacher"} if keys.get("method") else {}
    cause = missing([1, 1], [0, 0], None, **{"rollout__n": 4, **teacher, **keys})
    assert (cause is not None) is named


def test_a_sign_is_quiet_while_it_lasts() -> None:
    warnings = Warnings(recipe_of())
    said = [read(warnings, actor__ppo_kl=1.0) for _ in range(3 * QUIET)]
    assert [len(each) for each in said] == [1] + [0] * (3 * QUIET - 1)


@pytest.mark.parametrize(("away", "again"), [(QUIET - 1, 0), (QUIET, 1), (QUIET + 1, 1)])
def test_a_sign_comes_again_after_it_was_away(away: int, again: int) -> None:
    warnings = Warnings(recipe_of())
    for _ in range(2 * QUIET):
        read(warnings, actor__ppo_kl=1.0)
    for _ in range(away):
        assert read(warnings) == []
    assert len(read(warnings, actor__ppo_kl=1.0)) == again


def test_warnings_are_remembered_apart() -> None:
    warnings = Warnings(recipe_of())
    assert len(read(warnings, actor__ppo_kl=1.0)) == 1
    assert len(read(warnings, actor__ppo_kl=1.0, actor__pg_clipfrac=0.9)) == 1
    assert len(read(warnings, actor__kl=2.0, response_length__clip_ratio=0.9)) == 2
