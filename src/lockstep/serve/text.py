"""A response as text while its tokens come: whole characters only, and nothing of a text that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Bytes that are not a character yet are decoded as these: as one, or, where a tokenizer has a token for each byte (that
# of Llama 2, Mistral or Gemma), as one for every byte of the row that they stand in.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens that are decoded again with each new one, at most and at least: what a token looks like may depend on the
# ones before it (a space, the bytes of a character), but not on those far away.
_MOST, _KEPT = 24, 8
# The same where bytes never come to a character: they are let go then.
_MOST_BROKEN = 8 * _MOST


class TextStream:
    """Tokens in, text out. `stops` end the response and are no part of its text."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.text = ""
        """What was let out so far."""
        self.stopped: str | None = None
        self._window: list[int] = []
        self._whole: list[int] = []
        """Lengths of the window at which no character was broken: where it may be cut."""
        self._seen = ""
        """What of the window's text is in `_held` or was let out."""
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._window.append(token)
        decoded = self.decode(self._window)
        settled = decoded.rstrip(_BROKEN)
        self._take(settled)
        if settled == decoded:
            self._whole.append(len(self._window))
            self._shorten()
        elif len(self._window) > _MOST_BROKEN:
            self._take(decoded)
            self._cut(len(self._window) - _KEPT)
        return self._let_out(final=False)

    def end(self) -> str:
        """What is left when no token follows."""
        decoded = self.decode(self._window)
        if decoded.startswith(self._seen):
            self._take(decoded)
        else:
            # A character that was let out looks broken beside the last one, which is: that one alone is told so.
            unfinished = len(self._window) - max(self._whole, default=0)
            self._held += _BROKEN * min(unfinished, len(decoded) - len(decoded.rstrip(_BROKEN)))
        return self._let_out(final=True)

    def _take(self, settled: str) -> None:
        if self._seen.startswith(settled):
            return  # also a character that looks broken again, because the next one has begun beside it
        # What was let out stays, also where a decoder writes it otherwise now.
        pairs = zip(self._seen, settled, strict=False)
        alike = next((i for i, (was, now) in enumerate(pairs) if was != now), len(self._seen))
        self._held += settled[alike:]
        self._seen = settled

    def _shorten(self) -> None:
        """Between two characters, and only when the end is whole too: nothing of the window waits then."""
        if len(self._window) > _MOST:
            places = [place for place in self._whole if place <= len(self._window) - _KEPT]
            if places:
                self._cut(places[-1])

    def _cut(self, place: int) -> None:
        self._window = self._window[place:]
        self._whole = [whole - place for whole in self._whole if whole > place]
        self._seen = self.decode(self._window)

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
