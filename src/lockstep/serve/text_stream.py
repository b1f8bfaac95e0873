"""Decodes tokens to text incrementally. The text has only complete characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Decoders return U+FFFD for an incomplete character. Tokenizers with byte tokens (Llama 2, Mistral, Gemma) return
# U+FFFD once for each byte.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# With each new token, the last tokens (the window) are decoded again. `_MAX_WINDOW` and `_MIN_WINDOW` are the maximum
# and minimum number of tokens in the window. A window is sufficient, because the text of a token depends only on the
# tokens shortly before it.
_MAX_WINDOW, _MIN_WINDOW = 24, 8
# If this many tokens do not give a complete character, the text is returned as the decoder returns it.
_MAX_INCOMPLETE = 8 * _MAX_WINDOW


class TextStream:
    """Converts tokens to text. A stop string in `stops` ends the response and is not part of the returned text."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.text = ""
        """The text returned so far."""
        self.stopped: str | None = None
        self._window: list[int] = []
        self._complete: list[int] = []
        """The positions in the window after which the text is a complete character. `_shorten` cuts the window after a
        complete character."""
        self._seen = ""
        """The text of the window that was already returned or is in `_pending`."""
        self._pending = ""

    def push(self, token: int) -> str:
        """Adds a token. Returns the new text that later tokens cannot change."""
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
            # If the last character is incomplete, byte-level decoders also return replacement characters for complete
            # characters before it. Only the replacements for the last character are added.
            unfinished = len(self._window) - max(self._complete, default=0)
            self._pending += _REPLACEMENT * min(unfinished, len(decoded) - len(decoded.rstrip(_REPLACEMENT)))
        return self._emit(final=True)

    def _take(self, settled: str) -> None:
        if self._seen.startswith(settled):
            return  # no new text, for example because the next character is incomplete
        # Text that was already returned is not changed, even if the decoder now returns a different text for these
        # tokens.
        pairs = zip(self._seen, settled, strict=False)
        common = next((i for i, (was, now) in enumerate(pairs) if was != now), len(self._seen))
        self._pending += settled[common:]
        self._seen = settled

    def _shorten(self) -> None:
        """Removes tokens at the start of a long window. Cuts at the end of a complete character."""
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
