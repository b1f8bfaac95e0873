"""Stop reasons of trajectories: each decides whether its trajectory is masked, and is a metric."""

from __future__ import annotations

import pytest

from hand_rollouts import question
from lockstep.environments.conversation import TokenConversation
from lockstep.environments.running import Running
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.trajectory import STOP_REASONS, TurnRecord
from lockstep.types import Completion, Request, Sampling

# docs/environments.md: trajectories that a limit cut count as truncated responses, which `mask_truncated` masks.
CUT = {"max_turns", "max_tool_calls", "max_tokens", "context_overflow", "timeout"}


def ended(reason: str, failure: str = "") -> Completion:
    settings, asked = RolloutSettings(environment="guess_number"), question()
    running = Running(0, Request([1], 7, question=asked), 0, 0, settings, Sampling(50), asked)
    running.conversation = TokenConversation([1, 2], str)
    start, stop = running.conversation.add_turn(Completion(0, 0, [3, 4], [-1.0, -2.0], "token"))
    running.turns, running.turn_rows = [TurnRecord(start, stop)], [0]
    running.ended_by, running.stop, running.failure = "token", reason, failure
    return running.completion()


@pytest.mark.parametrize("reason", STOP_REASONS)
def test_a_limit_truncates_a_trajectory_and_nothing_else_does(reason: str) -> None:
    """`train/advantages.py` masks the responses whose stop is `length` (tests/unit/test_annotate.py)."""
    made = ended(reason)
    assert made.stop == ("length" if reason in CUT else "token")
    assert (made.ids, list(made.loss_mask)) == ([3, 4], [1, 1])
    assert made.trajectory is not None
    stops = {name for name in made.trajectory.named_metrics() if name.startswith("environment/stop/")}
    assert stops == {f"environment/stop/{reason}"}


@pytest.mark.parametrize("reason", ["tool_error", "timeout", "context_overflow"])
def test_a_failed_trajectory_has_no_tokens_to_train(reason: str) -> None:
    made = ended(reason, failure="game.py:Game: step raised ValueError")
    assert (made.stop, made.ids, made.failure) == ("failed", [], "game.py:Game: step raised ValueError")
    assert made.trajectory is not None
    assert made.trajectory.stop == reason
