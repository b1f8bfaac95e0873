"""The one door to stdout and stderr. Text of rows, responses and files is shown there, never sent: a terminal obeys
escape sequences, whoever wrote them. No other module of the layers above may print (a test holds this)."""

from __future__ import annotations

import re
import sys

from lockstep.masking import without_concealed

# Control characters but for the line break and the tab; marks, overrides and isolates of the writing direction, which
# make a line read otherwise than it is; separators that some terminals break lines at; halves of surrogate pairs,
# which no encoding can print.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""`text` with its hidden characters spelt out: `\x1b`, and beyond ASCII as JSON writes them, `\u202e`."""
    return _HIDDEN.sub(lambda found: _spelt(ord(found[0])), text)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 32 else f"\\u{code:04x}"


def write(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """A line on stdout, or on stderr, at once."""
    print(visible(without_concealed(text)), file=sys.stderr if error else sys.stdout, end=end, flush=True)


def never_fail_to_encode() -> None:
    """Spell out what the terminal's encoding does not have, where Python would end the program."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
