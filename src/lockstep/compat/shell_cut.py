"""What a shell cuts off, replaces or changes in a variable's value: `${X%/}`, `${X##*/}`, `${X//./_}`, `${X:0:3}`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable


def cut(value: str, how: str, filled: Callable[[str], str]) -> str | None:
    """`how` is what stands behind the name; None where it is nothing that is understood here."""
    if how[0] in "#%":
        twice = how[:2] in ("##", "%%")
        return _without(value, filled(how[2 if twice else 1 :]), at_end=how[0] == "%", longest=twice)
    if how[0] == "/":
        return _replaced(value, how[1:], filled)
    if how[0] == ":":
        return _part(value, filled(how[1:]))
    if how in ("^^", ",,"):
        return value.upper() if how == "^^" else value.lower()
    if how in ("^", ","):
        return (value[:1].upper() if how == "^" else value[:1].lower()) + value[1:]
    return None


def _without(value: str, pattern: str, *, at_end: bool, longest: bool) -> str:
    """Without the shortest or longest beginning, or end, that the pattern matches."""
    sizes = range(len(value), -1, -1) if longest else range(len(value) + 1)
    for size in sizes:
        piece = value[len(value) - size :] if at_end else value[:size]
        if fnmatch.fnmatchcase(piece, pattern):
            return value[: len(value) - size] if at_end else value[size:]
    return value


def _replaced(value: str, how: str, filled: Callable[[str], str]) -> str:
    """`pattern/text` once, `/pattern/text` everywhere, `#pattern/text` and `%pattern/text` at the start and the end."""
    mode, how = (how[0], how[1:]) if how[:1] in ("/", "#", "%") else ("", how)
    pattern, _, text = how.partition("/")
    found = fnmatch.translate(filled(pattern)).removeprefix("(?s:").rsplit(")", 1)[0]
    found = {"#": f"^(?:{found})", "%": f"(?:{found})$"}.get(mode, found)
    replacement = filled(text)
    return re.sub(found, lambda _: replacement, value, count=0 if mode == "/" else 1, flags=re.DOTALL)


def _part(value: str, how: str) -> str | None:
    numbers = [part.strip() for part in how.split(":")]
    if not all(re.fullmatch(r"-?\d+", number) for number in numbers) or len(numbers) > 2:
        return None
    start = int(numbers[0])
    rest = value[start:]
    if len(numbers) == 1:
        return rest
    length = int(numbers[1])
    return rest[:length]
