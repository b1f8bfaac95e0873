"""What a run says it changed."""

from __future__ import annotations

import pytest

from lockstep.run.model_card import before_and_after

History = list[tuple[int, dict[str, float]]]


def rewards(*values: float) -> History:
    return [(step, {"critic/score/mean": value}) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0, 1.0], "0 -> 1"),
        # Three steps have no middle to share: one at either end.
        ([0.0, 0.5, 1.0], "0 -> 1"),
        ([0.0, 0.2, 0.6, 1.0], "0.1 -> 0.8 (mean of 2 steps at either end)"),
        (
            [*[0.1, 0.2, 0.3, 0.4, 0.5], 9.0, 9.0, *[0.5, 0.6, 0.7, 0.8, 0.9]],
            "0.3 -> 0.7 (mean of 5 steps at either end)",
        ),
    ],
)
def test_rewards_are_averaged_at_either_end(values: list[float], said: str) -> None:
    ((name, change),) = before_and_after(rewards(*values))
    assert name == "reward"
    assert change == said


@pytest.mark.parametrize("history", [[], rewards(0.5), [(0, {"val/accuracy": 0.5})]])
def test_one_value_is_no_change(history: History) -> None:
    assert before_and_after(history) == []


def test_losses_and_accuracy_from_the_first_to_the_last_step_that_has_them() -> None:
    history: History = [
        (0, {"val/accuracy": 0.125}),
        (1, {"train/loss": 4.0}),
        (2, {"train/loss": 9.0, "val/loss": 2.5, "val/accuracy": 0.9}),
        (3, {"train/loss": 1.23456, "val/loss": 2.0, "val/accuracy": 0.75}),
        (4, {"other": 1.0}),
    ]
    assert before_and_after(history) == [
        ("train/loss", "4 -> 1.235"),
        ("val/loss", "2.5 -> 2"),
        ("val/accuracy", "0.125 -> 0.75"),
    ]


def test_the_score_is_what_a_reward_summary_shows() -> None:
    """Not `critic/rewards`, from which the divergence has been taken off."""
    history: History = [(step, {"critic/score/mean": 0.5, "critic/rewards/mean": -float(step)}) for step in range(1, 5)]
    assert before_and_after(history) == [("reward", "0.5 -> 0.5 (mean of 2 steps at either end)")]
