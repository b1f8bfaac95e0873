"""GEM: `rollout.environment: gem:game:GuessTheNumber-v0-easy`. The model's turn is the action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.environments.adapters.game import (
    OwnRandom,
    action_of,
    first_messages,
    refuse_unknown,
    row_seed,
    user,
)
from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.return_values import json_or_empty


def import_package() -> None:
    import gem  # noqa: F401


class GemEnvironment:
    """The conversation is the history, so GEM's wrappers of observations are not needed. All arguments go to
    `gem.make`."""

    def __init__(self, environment: str, **arguments: Any):
        import gem
        from gem.envs.registration import ENV_REGISTRY

        refuse_unknown(environment, ENV_REGISTRY, "gem")
        # Some games already draw random numbers when they are made.
        self._random = OwnRandom(0)
        with self._random():
            self._game = gem.make(environment, **arguments)
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        seed = row_seed(row, seed)
        self._random = OwnRandom(seed)
        with self._random():
            observation, info = self._game.reset(seed=seed)
        return Start(first_messages(row, self._text(observation, info)))

    def step(self, reply: Reply) -> Turn:
        with self._random():
            observation, reward, terminated, truncated, info = self._game.step(action_of(reply))
        done, text = bool(terminated or truncated), self._text(observation, info)
        return Turn([] if done else user(text), float(reward), done, metrics={"truncated": float(truncated)})

    def close(self) -> None:
        if callable(getattr(self._game, "close", None)):
            self._game.close()

    def _text(self, observation: str, info: Mapping[str, Any]) -> str:
        self.info = json_or_empty(info)
        parts = (info.get("prefix"), observation, info.get("suffix"))
        return "\n".join(str(part).strip() for part in parts if part)
