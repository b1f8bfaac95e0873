"""Environment factories as TRL's GRPOTrainer takes them."""

from __future__ import annotations

import time
from typing import Any


class Counter:
    """The model raises a counter to a target."""

    def __init__(self) -> None:
        self.count, self.target = 0, 0
        self._log: list[int] = []

    def reset(self, target: int = 3, **row: Any) -> str:
        self.count, self.target, self._log = 0, target, []
        return f" Count to {target}."

    def add(self, amount: int) -> str:
        """Adds to the counter.

        Args:
            amount: What to add.
        """
        before = self.count
        time.sleep(0.01)
        self.count = before + amount
        self._log.append(amount)
        return f"The counter is {self.count}."

    async def read(self) -> int:
        """Returns the counter."""
        return self.count

    def break_down(self) -> str:
        """Fails."""
        raise RuntimeError("broken")

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0 - abs(self.target - self.count) / 10


class Silent:
    """Has no reward and no text."""

    def reset(self, prompt: Any, answer: str) -> None:
        self.answer = answer

    def look(self) -> str:
        """Returns the answer."""
        return self.answer


class NoReset:
    def look(self) -> str:
        """Looks."""
        return ""


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def several() -> Counter:
    return Counter()


FACTORIES = {"count": Counter, "silent": Silent}
NUMBER = 3
