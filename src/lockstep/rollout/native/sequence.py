"""What the engine keeps of a prompt and of each of its samples."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Stretch:
    """Tokens whose keys and values go to the cache: `cached` of them are there, in `blocks`."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass(eq=False)
class Prefix(Stretch):
    """A prompt without its last token: computed once, read by all samples of the prompt."""

    waiting: int = 0
    running: int = 0

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens)


@dataclass(eq=False)
class Sample(Stretch):
    """One continuation. Its last token is the one that is fed next, so it is never cached before the pass."""

    request: int = 0
    number: int = 0
    prompt: int = 0
    """Tokens of the prompt."""
    limit: int = 0
    """Tokens at which it ends, prompt included."""
    keys: tuple[int, int] = (0, 0)
    logprobs: list[float] = field(default_factory=list)
    stop: str = ""

    @property
    def ready(self) -> bool:
        """Everything before the last token is cached: the next pass can produce a token."""
        return self.cached == len(self.tokens) - 1

    @property
    def order(self) -> tuple[int, int]:
        """Who came first is served first."""
        return self.request, self.number
