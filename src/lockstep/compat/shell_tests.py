"""Conditions of a shell script, as far as known values decide them: `[ -z "$X" ]`, `[[ $N -gt 4 ]]`, `[ "$A" = b ]`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

_COUNTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


def holds(words: Sequence[str], mark: str) -> bool | None:
    """Whether a test is true; None where it is another command, or one of its values (with a `mark`) is not known."""
    if words[:1] == ["!"]:
        inner = holds(words[1:], mark)
        return None if inner is None else not inner
    if words[:1] == ["true"] or words[:1] == ["false"]:
        return words[0] == "true"
    if not words or words[0] not in ("[", "[[", "test") or any(mark in word for word in words):
        return None
    inside = list(words[1:] if words[0] == "test" else words[1:-1])
    if inside[:1] == ["!"]:
        inner = holds(["test", *inside[1:]], mark)
        return None if inner is None else not inner
    if len(inside) == 2 and inside[0] in ("-z", "-n"):
        return (not inside[1]) == (inside[0] == "-z")
    if len(inside) != 3:
        return None
    left, sign, right = inside
    if sign in _COUNTS:
        return _COUNTS[sign](int(left), int(right)) if _whole(left) and _whole(right) else None
    if sign in ("=", "==", "!="):
        # In [[ ]] the right side is a pattern.
        same = fnmatch.fnmatchcase(left, right) if words[0] == "[[" else left == right
        return same == (sign != "!=")
    return None


def _whole(text: str) -> bool:
    return text.lstrip("-").isdigit()
