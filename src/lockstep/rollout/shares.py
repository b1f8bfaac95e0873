"""Who generates what: the prompts are divided over the ranks by how long their responses are expected to be, and a rank
that runs dry takes prompts that another has not begun. What a response says depends on neither: its noise is its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.types import Origin, Prompt, Request, Sampling

# Between two looks at the others' shares while nothing of them can be taken: each is a question to the store.
LOOK_SECONDS = 0.05


class ExpectedLengths:
    """Tokens of a response to each prompt: as many as the last ones to it had, or those to other prompts on average.

    Every rank learns the same.
    """

    def __init__(self) -> None:
        self._last: dict[Origin, float] = {}
        self._sum = 0.0

    def learn(self, prompt: Prompt, tokens: float) -> None:
        """The mean over the last responses to a prompt."""
        origin = prompt.question.origin
        self._sum += tokens - self._last.get(origin, 0.0)
        self._last[origin] = tokens

    def of(self, prompts: Sequence[Prompt]) -> list[float]:
        other = self._sum / len(self._last) if self._last else 1.0
        return [self._last.get(prompt.question.origin, other) for prompt in prompts]


def costs_of(prompts: Sequence[Prompt], n: int, expected: Sequence[float]) -> list[float]:
    """Tokens of each prompt and of its `n` responses, which are `expected` to have so many each."""
    return [len(prompt.ids) + n * tokens for prompt, tokens in zip(prompts, expected, strict=True)]


def balanced(costs: Sequence[float], ranks: int, given: Mapping[int, int] | None = None) -> list[list[int]]:
    """For each rank what it generates, the longest first: each goes to the rank that has the least so far. A rank alone
    takes them as they come. Those that are `given` to a rank already stay with it."""
    if ranks == 1:
        return [list(range(len(costs)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    given = given or {}
    for index, rank in given.items():
        shares[rank].append(index)
        work[rank] += costs[index]
    for index in sorted(set(range(len(costs))) - given.keys(), key=lambda i: (-costs[i], i)):
        least = work.index(min(work))
        shares[least].append(index)
        work[least] += costs[index]
    return shares


class AskedAhead:
    """Which rank was asked for a response before its step came. Every rank knows it of all, by the same reckoning."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        self._asked: dict[tuple[Sampling, int, int], int] = {}

    def ask(
        self, prompts: Sequence[Prompt], keys: Sequence[int], n: int, sampling: Sampling, expected: Sequence[float]
    ) -> list[Request]:
        """Divide the prompts of a step; returns what this rank asks its engine."""
        shares = balanced(costs_of(prompts, n, expected), self._ranks)
        for rank, share in enumerate(shares):
            self._asked |= {(sampling, keys[index], n): rank for index in share}
        return [Request(prompts[index].ids, keys[index], n) for index in shares[self._rank]]

    def take(self, keys: Sequence[int], n: int, sampling: Sampling) -> dict[int, int]:
        """Their step has come: the rank that was asked for each prompt, by its place; not of those nobody was."""
        found = {index: self._asked.pop((sampling, key, n), None) for index, key in enumerate(keys)}
        return {index: rank for index, rank in found.items() if rank is not None}


class ShareCounter(Protocol):
    """How far a share is begun, by whomever (`parallel/world.py`)."""

    def take(self, count: int) -> int:
        """Begin so many more; returns how many were begun before."""
        ...


class Shares:
    """The prompts of one call, as one rank sees them. Without counters a share is a rank's own, and nobody else's."""

    def __init__(
        self,
        costs: Sequence[float],
        rank: int,
        ranks: int,
        begun: Sequence[ShareCounter] = (),
        given: Mapping[int, int] | None = None,
    ):
        self._shares, self._rank, self._begun = balanced(costs, ranks, given), rank, begun
        self._open = {other for other, share in enumerate(self._shares) if share and other != rank}
        """Other ranks whose share may have something left, as far as this one knows."""
        self._ended = False
        self._look_at = 0.0
        self.taken = 0
        """Prompts of other ranks' shares that this one has begun."""

    def own(self) -> list[int]:
        """The whole share of this rank, where nobody takes of another's."""
        return self._shares[self._rank]

    def begin(self, count: int) -> list[int]:
        """Up to `count` prompts of this rank's share."""
        if self._ended:
            return []
        some = self._some(self._rank, self._begun[self._rank].take(count), count)
        self._ended = len(some) < count
        return some

    def help(self, count: int, *, idle: bool) -> list[int]:
        """Up to `count` prompts of another rank's share, of the one with the most left.

        What a rank has not begun of its share is more than it has room for, unless it has not come yet: then it is left
        alone by all who still have something to do (who are not `idle`).
        """
        if not self._open or not (idle or time.monotonic() >= self._look_at):
            return []
        first = {other: self._begun[other].take(0) for other in self._open}
        left = {other: len(self._shares[other]) - begun for other, begun in first.items() if idle or begun}
        for other in sorted(left, key=lambda one: -left[one]):
            # Half of what is left at most: its owner is at work on it too.
            most = min(count, -(-left[other] // 2))
            some = self._some(other, self._begun[other].take(most), most) if most > 0 else []
            if some:
                self.taken += len(some)
                return some
            self._open.discard(other)
        self._look_at = time.monotonic() + LOOK_SECONDS
        return []

    def _some(self, rank: int, first: int, count: int) -> list[int]:
        return self._shares[rank][first : first + count]
