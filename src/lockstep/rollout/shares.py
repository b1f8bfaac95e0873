"""Who generates what: the prompts are divided over the ranks by how long their responses are expected to be, and a rank
that runs dry takes prompts that another has not begun. What a response says depends on neither: its noise is its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.parallel.world import Counter
from lockstep.types import Origin, Prompt


class ExpectedLengths:
    """Tokens of a response to each prompt: as many as the last ones to it had, or those to other prompts on average.

    Every rank learns the same.
    """

    def __init__(self) -> None:
        self._last: dict[Origin, float] = {}

    def learn(self, prompt: Prompt, tokens: float) -> None:
        """The mean over the last responses to a prompt."""
        self._last[prompt.question.origin] = tokens

    def of(self, prompts: Sequence[Prompt]) -> list[float]:
        other = sum(self._last.values()) / len(self._last) if self._last else 1.0
        return [self._last.get(prompt.question.origin, other) for prompt in prompts]


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """For each rank what it generates, the longest first: each goes to the rank that has the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = work.index(min(work))
        shares[least].append(index)
        work[least] += costs[index]
    return shares


class Shares:
    """The prompts of one call, as one rank sees them. `counters` say how far each rank's share is begun, by whomever;
    without them a share is a rank's own, and nobody else's."""

    def __init__(self, costs: Sequence[float], rank: int, ranks: int, counters: Sequence[Counter] = ()):
        self._shares, self._rank, self._counters = balanced(costs, ranks), rank, counters
        self._left = [len(share) for share in self._shares]
        """As far as this rank knows."""
        self.taken = 0
        """Prompts of other ranks' shares that this one has generated."""

    def own(self) -> list[int]:
        """The whole share of this rank, where nobody takes of another's."""
        return self._shares[self._rank]

    def take(self, count: int) -> list[int]:
        """Up to `count` prompts for this rank to begin: of its own share, or where that is begun of the fullest one."""
        found = self._begin(self._rank, count)
        while len(found) < count and any(self._left):
            fullest = self._left.index(max(self._left))
            # Half of what is left at most: its owner is at work on it too.
            other = self._begin(fullest, min(count - len(found), -(-self._left[fullest] // 2)))
            self.taken += len(other)
            found += other
        return found

    def _begin(self, rank: int, count: int) -> list[int]:
        share = self._shares[rank]
        if not self._left[rank] or not count:
            return []
        first = self._counters[rank].take(count)
        self._left[rank] = max(0, len(share) - first - count)
        return share[first : first + count]
