"""A response as text while its tokens come: whole characters only, and nothing of a text that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A byte sequence that is not a character yet is decoded as one of these; only the last one may still change.
_BROKEN = "�"
# Tokens that are decoded again with each new one, at most and at least: what a token looks like may depend on the
# ones before it (a space, the bytes of a character), but not on those far away.
_MOST, _KEPT = 24, 8


class TextStream:
    """Tokens in, text out. `stops` end the response and are no part of its text."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.text = ""
        """What was let out so far."""
        self.stopped: str | None = None
        self._window: list[int] = []
        self._seen = 0
        """Characters of the window that are in `_held` or were let out."""
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._window.append(token)
        decoded = self.decode(self._window)
        settled = decoded[:-1] if decoded.endswith(_BROKEN) else decoded
        self._take(settled)
        if len(self._window) > _MOST:
            self._window = self._window[-_KEPT:]
            again = self.decode(self._window)
            # As many characters from the end are not let out as before.
            self._seen = max(0, len(again) - (len(decoded) - len(settled)))
        return self._let_out(final=False)

    def end(self) -> str:
        """What is left when no token follows."""
        self._take(self.decode(self._window))
        return self._let_out(final=True)

    def _take(self, settled: str) -> None:
        if len(settled) > self._seen:
            self._held += settled[self._seen :]
            self._seen = len(settled)

    def _let_out(self, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
        else:
            at = len(self._held) if final else len(self._held) - self._may_stop()
        out, self._held = self._held[:at], self._held[at:]
        self.text += out
        return out

    def _may_stop(self) -> int:
        """Characters at the end that may be the beginning of a text that ends the response."""
        for length in range(min(len(self._held), max(map(len, self.stops), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self.stops):
                return length
        return 0
