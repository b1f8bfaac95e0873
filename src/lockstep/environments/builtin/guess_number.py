"""The environment `guess_number`: the model guesses a number and learns after each guess whether it is higher or lower.

A row of `lockstep data guess-number` has the number as `ground_truth`. Without it, the seed selects the number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from lockstep.environments.environment import Reply, Start, Turn

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """A game of at most `guesses` turns. The reward is 1 for the right number; a reply without a number costs a
    turn."""

    def __init__(self, low: int = 1, high: int = 7, guesses: int = 3):
        self.low, self.high, self.guesses = low, high, guesses
        self.number = self.made = 0
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        given = str(row.get("ground_truth") or "")
        self.number = int(given) if given.strip().isdigit() else Random(seed).randint(self.low, self.high)
        self.made = 0
        self.info = {"number": self.number, "guesses": []}
        return Start(row.get("prompt") or [{"role": "user", "content": question(self.low, self.high, self.guesses)}])

    def step(self, reply: Reply) -> Turn:
        self.made += 1
        found = _NUMBER.findall(reply.content or reply.text)
        guess = int(found[-1][:9]) if found else None
        self.info["guesses"].append(guess)
        if guess == self.number:
            return Turn(reward=1.0, done=True, metrics={"guesses": self.made})
        if self.made == self.guesses:
            return Turn(done=True, metrics={"guesses": self.made})
        answer = "a number!" if guess is None else "higher" if guess < self.number else "lower"
        return Turn([{"role": "user", "content": answer}])


def question(low: int, high: int, guesses: int) -> str:
    return f"Guess a number from {low} to {high} in {guesses} turns."
