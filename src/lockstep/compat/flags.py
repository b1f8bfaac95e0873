"""The grammar of OpenRLHF's command lines: argparse.

`--flag value`, `--flag=value`, a prefix of a flag that no other flag shares, switches without a value, and flags with
several values, which may start with a minus (`--reward_clip_range -10 10`, `--reward_tokens + -`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.compat.settings import Setting
from lockstep.errors import Problem

Count = int | Literal["switch", "many"]
_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$|^-\d+(\.\d*)?[eE][-+]?\d+$")


@dataclass(frozen=True)
class Flag:
    """`kind` reads one value; `count` is how many there are."""

    name: str
    kind: type = str
    count: Count = 1


@dataclass
class Flags:
    given: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse_flags(words: Sequence[str], known: Mapping[str, Flag], wheres: Sequence[str] = ()) -> Flags:
    """The flags of a command line; `wheres` says of each word where it stands."""
    found = Flags()
    position = 0
    while position < len(words):
        word, where = words[position], wheres[position] if position < len(wheres) else ""
        place = f"{where}: {word}" if where else word
        position += 1
        if not is_flag(word):
            found.problems.append(Problem(place, "is neither a flag nor the value of one"))
            continue
        name, equals, text = word.lstrip("-").partition("=")
        flag, why = _which(name, known)
        if flag is None:
            found.problems.append(Problem(place, *why))
            while position < len(words) and not is_flag(words[position]):
                position += 1
            continue
        values = [text] if equals else []
        if not equals and flag.count != "switch":
            most = flag.count if isinstance(flag.count, int) else len(words)
            while len(values) < most and position < len(words) and not is_flag(words[position]):
                values.append(words[position])
                position += 1
        try:
            found.given.pop(flag.name, None)
            found.given[flag.name] = Setting(_read(flag, values, bool(equals)), where)
        except ValueError as error:
            found.problems.append(Problem(place, str(error)))
    return found


def is_flag(word: str) -> bool:
    """A lone minus and a negative number are values."""
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word)


def _which(name: str, known: Mapping[str, Flag]) -> tuple[Flag | None, tuple[str, str]]:
    if name in known:
        return known[name], ("", "")
    begun = sorted(full for full in known if full.startswith(name)) if name else []
    if len(begun) == 1:
        return known[begun[0]], ("", "")
    if begun:
        return None, (f"may be any of {', '.join('--' + full for full in begun)}", "write the flag in full")
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if not near:
        leaf = name.rsplit(".", 1)[-1]
        near = [full for full in known if full.rsplit(".", 1)[-1] == leaf][:1]
    return None, ("there is no such flag", f"did you mean --{near[0]}?" if near else "remove it")


def _read(flag: Flag, values: list[str], by_equals: bool) -> Any:
    if flag.count == "switch":
        if by_equals:
            raise ValueError("is a switch and takes no value")
        return True
    if flag.count == "many":
        return [_one(flag, value) for value in values]
    if len(values) != flag.count:
        raise ValueError(f"needs {flag.count} value{'s' if flag.count > 1 else ''}, and {len(values)} follow")
    read = [_one(flag, value) for value in values]
    return read[0] if flag.count == 1 else read


def _one(flag: Flag, text: str) -> Any:
    try:
        if flag.kind is int:
            return int(text) if not re.search(r"[.eE]", text) else int(float(text))
        return flag.kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {'a number' if flag.kind is float else 'a whole number'}") from error
