"""Parses command lines with argparse's flags (OpenRLHF).

The parser accepts `--flag value`, `--flag=value`, an unambiguous prefix of a flag, switches without a value, and flags
with several values. Values may start with a minus (`--reward_clip_range -10 10`, `--reward_tokens + -`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.compat.key_table import Setting, nearest_name
from lockstep.errors import Problem

Count = int | Literal["switch", "many"]
_NEGATIVE = re.compile(r"^-\d+$|^-\d*\.\d+$|^-\d+(\.\d*)?[eE][-+]?\d+$")
FLAG_TYPES: dict[str, tuple[type, Count]] = {
    "int": (int, 1),
    "float": (float, 1),
    "str": (str, 1),
    "switch": (bool, "switch"),
    "float2": (float, 2),
    "str+": (str, "many"),
    "float+": (float, "many"),
}


@dataclass(frozen=True)
class Flag:
    """A command-line flag: its name in the key table, the type of its values, and the number of values."""

    name: str
    kind: type = str
    count: Count = 1


@dataclass
class ParsedFlags:
    """The parsed words of an argparse command line."""

    given: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse_flags(words: Sequence[str], flags: Mapping[str, Flag], locations: Sequence[str] = ()) -> ParsedFlags:
    """Parses the flags. `flags` maps written names to flags; `locations` has the script line of each word."""
    parsed = ParsedFlags()
    position = 0
    while position < len(words):
        word, where = words[position], locations[position] if position < len(locations) else ""
        position += 1
        if not is_flag(word):
            why = "is neither a flag nor the value of a flag"
            parsed.problems.append(
                Problem(_place(where, word), why, "remove the word, or quote it with its flag", code="invalid-syntax")
            )
            continue
        name, equals, text = word.lstrip("-").partition("=")
        flag, why_not = _which(name, flags)
        if flag is None:
            parsed.problems.append(Problem(_place(where, word), *why_not, code="unknown-key"))
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
            parsed.given.pop(flag.name, None)
            parsed.given[flag.name] = Setting(_read(flag, values, bool(equals)), where)
        except ValueError as error:
            parsed.problems.append(Problem(_place(where, word), str(error), "correct the value", code="invalid-value"))
    return parsed


def _place(where: str, word: str) -> str:
    return f"{where}: {word}" if where else word


def is_flag(word: str) -> bool:
    """Returns whether the word is a flag. A lone minus and a negative number are values."""
    return word.startswith("-") and len(word) > 1 and not _NEGATIVE.match(word)


def is_dotted(words: Sequence[str]) -> bool:
    """Returns whether flags are dotted as in OpenRLHF 0.11 (`--ds.lora.rank`). Flags of OpenRLHF 0.7 have no dot."""
    return any(is_flag(word) and "." in word.partition("=")[0] for word in words)


def _which(name: str, flags: Mapping[str, Flag]) -> tuple[Flag | None, tuple[str, str]]:
    if name in flags:
        return flags[name], ("", "")
    matches = sorted(flag_name for flag_name in flags if flag_name.startswith(name)) if name else []
    if len(matches) == 1:
        return flags[matches[0]], ("", "")
    if matches:
        names = ", ".join(f"--{flag_name}" for flag_name in matches)
        return None, (f"is ambiguous: it may mean any of {names}", "write the flag in full")
    # The other spelling of a flag (`--dataset`, `--data.dataset`) comes first.
    near = next((written for written, flag in flags.items() if flag.name == name), nearest_name(name, list(flags)))
    return None, ("the program has no such flag", f"did you mean --{near}?" if near else "remove it")


def _read(flag: Flag, values: list[str], by_equals: bool) -> Any:
    if flag.count == "switch":
        if by_equals:
            raise ValueError("is a switch and takes no value")
        return True
    if flag.count != "many" and len(values) != flag.count:
        raise ValueError(f"needs {flag.count} value{'s' if flag.count > 1 else ''}, and {len(values)} follow the flag")
    read = [_one(flag, value) for value in values]
    return read[0] if flag.count == 1 else read


def _one(flag: Flag, text: str) -> Any:
    try:
        if flag.kind is int:
            return int(text) if not re.search(r"[.eE]", text) else _whole(float(text))
        return flag.kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {'a number' if flag.kind is float else 'an integer'}") from error


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(f"{number} is not an integer")
    return int(number)
