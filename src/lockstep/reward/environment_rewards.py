"""The rewards of an environment as reward components, and what reward functions see of a trajectory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lockstep.reward.function_worker import TRAJECTORY
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Question

# The reward components that an environment gives: the sum of its rewards per turn, the result of its method `score`,
# and the result of its method `score_group`.
STEPS, SCORE, GROUP = "environment", "score", "group"
ENVIRONMENT_PARTS = (STEPS, SCORE, GROUP)
# The fields of a row in which a reward function gets the trajectory.
COLUMNS, EXTRA_INFO = "columns", "extra_info"
_METHODS = {SCORE: "score", GROUP: "score_group"}


def environment_parts(trajectory: Trajectory, required: frozenset[str] = frozenset()) -> dict[str, float] | Failure:
    """Returns the rewards of the environment by name. Components in `required` must exist: the recipe has a weight for
    them."""
    parts = {STEPS: trajectory.reward, **trajectory.scores}
    missing = sorted(required - parts.keys())
    if missing:
        why = f"reward.weights has an entry {missing[0]!r}, but the environment has no method {_METHODS[missing[0]]}"
        return Failure(missing[0], why)
    return parts


def turn_rewards(trajectory: Trajectory, weight: float) -> tuple[tuple[int, float], ...]:
    """Returns the weighted reward of each turn, at the last token of the turn."""
    return tuple((turn.stop - 1, weight * turn.reward) for turn in trajectory.turns if turn.reward)


def overlap(question: Question, fields: Collection[str]) -> str:
    """Returns the first field of the row that has the name of a field of the trajectory, among those that a reward
    reads: `extra_info` or `columns`. Empty if there is none. The column of the prompt is no such field, because the
    messages of the trajectory begin with the prompt."""
    columns, prompt = question.columns if COLUMNS in fields else {}, question.columns.get("prompt")
    taken = [name for name in TRAJECTORY if name in columns and not (name == "messages" and columns[name] == prompt)]
    if EXTRA_INFO in fields:
        taken += [f"{EXTRA_INFO}.{name}" for name in TRAJECTORY if name in question.extra_info]
    return taken[0] if taken else ""


def overlap_reason(field: str) -> str:
    return f"has the field {field!r}, but a reward gets the field of this name from the trajectory"


def with_trajectory(question: Question, trajectory: Trajectory) -> Question:
    """Returns the question for reward functions: `messages`, `state` and `info` of the trajectory are in `extra_info`,
    and in the columns if a reward reads columns (TRL's signature). With tools that report rewards, `extra_info` also
    has `tool_rewards`, `turn_scores` and `num_turns`, as in verl. Its images are those of the conversation."""
    seen: dict[str, Any] = {
        "messages": [dict(message) for message in trajectory.messages],
        "state": dict(trajectory.state),
        "info": dict(trajectory.info),
    }
    if "tool_rewards" in trajectory.info:
        rewards = trajectory.info["tool_rewards"]
        seen |= {"tool_rewards": rewards, "turn_scores": [], "num_turns": 2 * len(trajectory.turns)}
    columns = {**question.columns, **seen} if question.columns else question.columns
    # The last row of a trajectory has all images of the conversation.
    images = tuple(image.ref for image in trajectory.images[-1]) if trajectory.images else question.images
    return replace(question, extra_info={**question.extra_info, **seen}, columns=columns, images=images)


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns the weighted sum of the rewards of an environment. Rewards that it does not give add nothing."""
    return sum(weights[name] * parts[name] for name in ENVIRONMENT_PARTS if name in weights and name in parts)
