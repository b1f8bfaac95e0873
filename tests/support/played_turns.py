"""A source of turns without an environment: each trajectory has fixed observations, which come after some polls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.rollout.engine import StreamEngine
from lockstep.types import Completion, Request, Sampling


@dataclass(frozen=True)
class Script:
    """A trajectory: the prompt, the observation after each turn but the last, and the polls that the tool takes."""

    prompt: Sequence[int]
    observations: Sequence[Sequence[int]]
    polls: Sequence[int]

    def request(self, number: int, turns: Sequence[Sequence[int]], most: int) -> Request:
        """The request of the next turn, after the sampled tokens of `turns`."""
        ids = list(self.prompt)
        for sampled, seen in zip(turns, self.observations, strict=False):
            ids += [*sampled, *seen]
        return Request(ids, key=100 * number + len(turns), max_tokens=most, session=number)


class Played:
    """Implements `Conversations`."""

    def __init__(self, engine: StreamEngine, scripts: Sequence[Script], most: int, *, sessions: bool = True):
        self.engine, self.scripts, self.most, self.keeps = engine, scripts, most, sessions
        seen = [len(s.prompt) + sum(map(len, s.observations)) + most * len(s.observations) for s in scripts]
        self.longest_prompt, self.sessions = max(seen), len(scripts)
        self.longest_sequence = self.longest_prompt + most
        self.turns: list[list[Completion]] = [[] for _ in scripts]
        self.due = dict.fromkeys(range(len(scripts)), 0)
        self.requests: list[Request] = []
        self._asked: list[int] = []
        self._polls = 0
        self.waited = 0

    @property
    def more(self) -> bool:
        return bool(self.due)

    def take(self, room: int, wait: bool = False) -> list[Request]:
        self._polls += 1
        if wait and self.due:
            self.waited += 1
            self._polls = max(self._polls, min(self.due.values()))
        numbers = [number for number, when in self.due.items() if when <= self._polls][:room]
        taken = []
        for number in numbers:
            del self.due[number]
            request = self.scripts[number].request(number, [made.ids for made in self.turns[number]], self.most)
            self._asked.append(number)
            taken.append(request if self.keeps else replace(request, session=None))
        self.requests += taken
        return taken

    def play(self, sampling: Sampling) -> list[list[Completion]]:
        """Plays all trajectories to their end. Returns the turns of each."""
        self.engine.further = self
        try:
            for made in self.engine.generate([], sampling):
                number = self._asked[made.request]
                self.turns[number].append(made)
                done = len(self.turns[number]) - 1
                if done < len(self.scripts[number].observations):
                    self.due[number] = self._polls + self.scripts[number].polls[done]
                elif self.keeps:
                    self.engine.end_session(number)
        finally:
            self.engine.further = None
        return self.turns
