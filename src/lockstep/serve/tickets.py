"""What is asked of the engine's thread, and what comes back from it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.rollout.native.online_engine import DrawnToken
from lockstep.serve.replies import ApiError
from lockstep.types import Sampling

# As the first reply of `lockstep generate`: the same seed gives the same answer.
NOISE_KEY = 1


@dataclass(frozen=True)
class GenerationOrder:
    """Prompts as tokens, each to be continued `n` times, and how; `likeliest` as in `LiveSample`."""

    prompts: Sequence[Sequence[int]]
    n: int
    samplings: Sequence[Sampling]
    """One for each prompt: they differ in the room that is left for a response."""
    stops: tuple[str, ...] = ()
    likeliest: int | None = None

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True)
class Piece:
    """What a round added to choice number `choice`; `finish` says why it ended (`stop` or `length`), where it did."""

    choice: int
    text: str
    tokens: Sequence[DrawnToken]
    finish: str | None = None


@dataclass(eq=False)
class Ticket:
    """An order under way. Its answers come to `inbox` in the event loop: pieces, or an error that ends it."""

    order: GenerationOrder
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Piece | ApiError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None

    async def piece(self) -> Piece:
        found = await self.inbox.get()
        if isinstance(found, ApiError):
            raise found
        return found

    def deliver(self, found: Iterable[Piece | ApiError]) -> None:
        """In the event loop."""
        for one in found:
            self.inbox.put_nowait(one)
