"""Reasoning Gym: `rollout.environment: reasoning_gym:chain_sum`. The row's seed makes the question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.environments.adapters.game import OwnRandom, action_of, first_messages, refuse_unknown, row_seed
from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.return_values import json_or_empty


def import_package() -> None:
    import reasoning_gym  # noqa: F401


class ReasoningGymEnvironment:
    """The reward is the score of the task, from 0 to 1. The answer is the text in the last `<answer>` tag, or the whole
    turn if there is none. All arguments go to `reasoning_gym.create_dataset`."""

    def __init__(self, environment: str, **arguments: Any):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        refuse_unknown(environment, DATASETS, "reasoning_gym")
        self._make = lambda seed: reasoning_gym.create_dataset(environment, size=1, seed=seed, **arguments)
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        seed = row_seed(row, seed)
        with OwnRandom(seed)():
            self._task = self._make(seed)
            self._entry = self._task[0]
        self.info = {"answer": str(self._entry["answer"]), "metadata": json_or_empty(self._entry["metadata"])}
        return Start(first_messages(row, self._entry["question"]))

    def step(self, reply: Reply) -> Turn:
        from reasoning_gym.utils import extract_answer

        text = action_of(reply)
        tagged = extract_answer(text)
        score = self._task.score_answer(text if tagged is None else tagged, self._entry)
        return Turn(reward=float(score), done=True, metrics={"solved": float(score >= 1)})
