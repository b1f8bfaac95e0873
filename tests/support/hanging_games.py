"""A Gymnasium environment that hangs in the first step of the game with the seed 1."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class Hanging(gymnasium.Env):  # type: ignore[misc, name-defined]
    action_space = gymnasium.spaces.Text(1000)
    observation_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.seed == 1:
            time.sleep(10_000)
        return "", 1.0, True, False, {}


gymnasium.register("Hanging-v0", Hanging)
