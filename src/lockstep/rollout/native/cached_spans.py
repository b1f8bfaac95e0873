"""Token spans with their blocks of the KV cache, and the pools of blocks and of slots for recurrent states."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lockstep.kernels.mixer_states import RESERVED
from lockstep.types import Sampling
from lockstep.vision.spans import ImageSpan


@dataclass(eq=False)
class CachedSpan:
    """A list of tokens with its KV-cache blocks. Keys and values of the first `cached` tokens are in the cache."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int = 0
    """The slot with the states of recurrent layers after the cached tokens, or 0 if there is none."""
    images: tuple[ImageSpan, ...] = field(default=(), kw_only=True)
    """The images of the prompt."""


@dataclass(eq=False)
class SharedPrompt(CachedSpan):
    """A prompt without its last token, which is prefilled once and shared by all samples of the prompt."""

    waiting: int = 0
    running: int = 0

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens)


@dataclass(eq=False)
class SequenceState(CachedSpan):
    """A sample that is being generated. The last token of the sample is the input of the next pass, so this token is
    not cached yet."""

    request: int = 0
    number: int = 0
    prompt: int = 0
    """Number of prompt tokens."""
    limit: int = 0
    """Maximum number of tokens, prompt included."""
    keys: tuple[int, int] = (0, 0)
    logprobs: list[float] = field(default_factory=list)
    stop: str = ""
    stops: Sampling | None = None
    """The sampling parameters, if the request has its own stop conditions."""
    asked: int = 0
    """The index of the engine's request. Requests with equal prompts are one request of the scheduler."""
    session: int | None = None
    """The trajectory whose blocks are kept for its next turn, or None."""
    routes: np.ndarray | None = None
    """The experts of tokens that were computed before a preemption or a pause (`Completion.routes`)."""

    @property
    def ready(self) -> bool:
        """Whether all tokens before the last one are cached, so that the next pass produces a token."""
        return self.cached == len(self.tokens) - 1

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of the sequence, by which requests are served in order of arrival."""
        return self.request, self.number


class BlockPool:
    """Reference-counted blocks of the KV cache."""

    def __init__(self, count: int):
        self._free = deque(range(count))
        self._readers = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        block = self._free.popleft()
        self._readers[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._readers[block] += 1

    def freed_by(self, spans: Iterable[CachedSpan]) -> Iterator[int]:
        """Yields for each span how many blocks become free if this span and those before it are dropped."""
        dropped: Counter[int] = Counter()
        free = 0
        for span in spans:
            dropped.update(span.blocks)
            free += sum(dropped[block] == self._readers[block] for block in span.blocks)
            yield free

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._free.append(block)


class StatePool:
    """Slots for the states of recurrent layers. `count` slots follow the reserved ones. A model without recurrent
    layers has `count` None, and every part uses slot 0."""

    def __init__(self, count: int | None):
        self.used = count is not None
        self._free = deque(range(RESERVED, RESERVED + (count or 0)))

    def missing(self, slots: int) -> int:
        """Returns how many slots must be dropped, so that `slots` slots are free."""
        return max(0, slots - len(self._free)) if self.used else 0

    def take(self) -> int:
        return self._free.popleft() if self.used else 0

    def drop(self, slot: int) -> None:
        if slot:
            self._free.append(slot)
