"""The environment of `environment_sides.py`, in the form of TRL's `environment_factory`, which both sides play."""

from __future__ import annotations

import asyncio
from typing import Any


class Waiting:
    """Each call of its only tool takes as long as the row says. A call after the last turn, which only lockstep makes,
    returns at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.calls = 0

    def reset(self, seconds: list[float], **row: Any) -> None:
        self.seconds, self.calls = list(seconds), 0

    async def look_up(self) -> str:
        """Looks up the next number."""
        if self.calls < len(self.seconds):
            await asyncio.sleep(self.seconds[self.calls])
            self.calls += 1
        return f"The next number is {self.calls}."

    def get_reward(self) -> float:
        return float(self.calls)
