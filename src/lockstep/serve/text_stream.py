"""Decodes tokens incrementally. It returns only complete characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The decoder's replacement for an incomplete character. Tokenizers with one token per byte (Llama 2, Mistral, Gemma)
# return one for each byte.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The size limits of the window of tokens that is decoded again with each new token. The text of a token depends on the
# tokens just before it (a space, the bytes of a character), not on distant ones.
_MAX_WINDOW, _MIN_WINDOW = 24, 8
# The maximum number of bytes to wait for a complete character; after it they are returned unchanged.
_MAX_INCOMPLETE = 8 * _MAX_WINDOW


class TextStream:
    """Converts tokens to text. A stop string of `stops` ends the response and is not part of the text."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.text = ""
        """The text returned so far."""
        self.stopped: str | None = None
        self._window: list[int] = []
        self._complete: list[int] = []
        """The window lengths that end with a complete character; the window may be shortened to them."""
        self._seen = ""
        """The part of the window's text that is in `_pending` or was returned."""
        self._pending = ""

    def push(self, token: int) -> str:
        """Adds a token; returns the new text that no later token can change."""
        self._window.append(token)
        decoded = self.decode(self._window)
        settled = decoded.rstrip(_REPLACEMENT)
        self._take(settled)
        if settled == decoded:
            self._complete.append(len(self._window))
            self._shorten()
        elif len(self._window) > _MAX_INCOMPLETE:
            self._take(decoded)
            self._cut(len(self._window) - _MIN_WINDOW)
        return self._emit(final=False)

    def end(self) -> str:
        """Returns the remaining text after the last token."""
        decoded = self.decode(self._window)
        if decoded.startswith(self._seen):
            self._take(decoded)
        else:
            # Byte-level decoders also mark returned characters as broken if the last one is. Only the last one is new.
            unfinished = len(self._window) - max(self._complete, default=0)
            self._pending += _REPLACEMENT * min(unfinished, len(decoded) - len(decoded.rstrip(_REPLACEMENT)))
        return self._emit(final=True)

    def _take(self, settled: str) -> None:
        if self._seen.startswith(settled):
            return  # also if a complete character decodes as broken because the next one is incomplete
        # Returned text cannot be changed, even if the decoder now returns different text for it.
        pairs = zip(self._seen, settled, strict=False)
        common = next((i for i, (was, now) in enumerate(pairs) if was != now), len(self._seen))
        self._pending += settled[common:]
        self._seen = settled

    def _shorten(self) -> None:
        """Shortens the window at a character border where no text is pending."""
        if len(self._window) > _MAX_WINDOW:
            cuts = [cut for cut in self._complete if cut <= len(self._window) - _MIN_WINDOW]
            if cuts:
                self._cut(cuts[-1])

    def _cut(self, cut: int) -> None:
        self._window = self._window[cut:]
        self._complete = [length - cut for length in self._complete if length > cut]
        self._seen = self.decode(self._window)

    def _emit(self, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        matches = [(at, stop) for stop in self.stops if (at := self._pending.find(stop)) >= 0]
        if matches:
            at, self.stopped = min(matches)
        else:
            at = len(self._pending) if final else len(self._pending) - self._may_stop()
        text, self._pending = self._pending[:at], self._pending[at:]
        self.text += text
        return text

    def _may_stop(self) -> int:
        """Returns the number of characters at the end that may begin a stop string."""
        for length in range(min(len(self._pending), max(map(len, self.stops), default=1) - 1), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self.stops):
                return length
        return 0
