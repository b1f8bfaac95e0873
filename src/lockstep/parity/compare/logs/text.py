"""Console output as lines: colours, process prefixes and progress bars that write over themselves are taken apart."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray puts the name and process of the one who printed before each line, and notes lines that several printed.
_RAY = re.compile(r"^\((?:[\w.:<>-]+ )?pid=\d+(?:, ip=[^)]*)?\)\s?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_BAR_END = re.compile(r"\[[^\[\]]*(?:it/s|s/it)[^\[\]]*\]\s*$")
_BREAK = re.compile(r"\r\n|\n|\r")
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf(?:inity)?|nan)"
_WRAPPED = re.compile(rf"(?:(?:np|numpy|torch)\.)?\w*\(?\s*({NUMBER})\s*(?:,[^)]*)?\)?", re.IGNORECASE)


def decoded(content: bytes) -> str | None:
    """UTF-8, or UTF-16 with its mark, as Windows' shells write it; None for what is no text."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode("utf-16", errors="replace")
        return None if "\0" in text[:4096] else text
    if b"\0" in content[:4096]:
        return None
    return content.decode("utf-8", errors="replace").removeprefix("\ufeff")


def lines(text: str) -> Iterator[tuple[str, str]]:
    """Every line with who printed it ("" when nobody is named). A last one without its line break is half written."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    *whole, rest = _BREAK.split(text)
    # A progress bar is whole when its bracket is closed, and no line break follows the newest one.
    if _BAR_END.search(rest):
        whole.append(rest)
    for line in whole:
        prefix = _RAY.match(line) if line.startswith("(") else None
        who = prefix.group() if prefix else ""
        line = line[len(who) :]
        if "[repeated" in line:
            line = _REPEATED.sub("", line)
        yield who, line


def number(text: str) -> float | None:
    """`1e-05`, `nan`, `np.float64(0.25)`, `tensor(0.25)` as a number; None for anything else."""
    try:
        return float(text)
    except ValueError:
        found = _WRAPPED.fullmatch(text.strip())
        return float(found.group(1)) if found else None
