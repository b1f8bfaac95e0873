"""Parses command lines with Hydra's overrides (verl) or with argparse's flags (OpenRLHF).

Hydra: `key=value` sets a key, `+key=value` adds a key, `++key=value` sets or adds, `~key` removes an earlier setting.
The last setting of a key wins. A value is a number, a boolean, `null`, a list `[a,b]`, a mapping `{a:1}`, or quoted or
plain text; `${other.key}` is the value of another key.

argparse: the parser accepts `--flag value`, `--flag=value`, an unambiguous prefix of a flag, switches without a value,
and flags with several values. Values may start with a minus (`--reward_clip_range -10 10`, `--reward_tokens + -`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.compat.key_table import Setting, nearest_name
from lockstep.errors import Problem

# Hydra ---------------------------------------------------------------------------------------------------------------

_KEY = re.compile(r"^[A-Za-z_][\w]*(\.[\w-]+)*$")
# The numbers of Hydra's grammar. An underscore between two digits is part of a number: 0.5_5 is 0.55, and only
# 0.5_5.0 is text.
_UNSIGNED, _DIGITS = r"(?:0|[1-9](?:_?\d)*)", r"\d(?:_?\d)*"
_POINT = rf"(?:{_UNSIGNED}\.|{_UNSIGNED}?\.{_DIGITS})"
_INTEGER = re.compile(rf"[-+]?{_UNSIGNED}")
_FLOAT = re.compile(rf"[-+]?(?:{_POINT}|(?:{_UNSIGNED}|{_POINT})[eE][-+]?{_DIGITS})")
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class ParsedOverrides:
    """The parsed words of a Hydra command line."""

    given: dict[str, Setting] = field(default_factory=dict)
    config: str | None = None
    """The value of `--config-name`."""
    folder: str | None = None
    """The value of `--config-path` or `--config-dir`."""
    problems: list[Problem] = field(default_factory=list)


def parse_overrides(
    words: Sequence[str],
    locations: Sequence[str] = (),
    defaults: Mapping[str, Any] = {},
    base: Mapping[str, Setting] = {},
) -> ParsedOverrides:
    """Parses the overrides. `locations` has the script line of each word. `${key}` of an unset key uses `defaults`.
    `base` has the settings of a configuration file, which overrides change."""
    parsed = ParsedOverrides(dict(base))
    position = 0
    while position < len(words):
        word, where = words[position], locations[position] if position < len(locations) else ""
        position += 1
        if word.startswith("-"):
            position += _option(word, words[position:], where, parsed)
        else:
            _override(word, where, parsed)
    for key, given in list(parsed.given.items()):
        try:
            parsed.given[key] = Setting(_resolved(given.value, parsed.given, defaults, (key,)), given.where)
        except KeyError as missing:
            why = f"refers to {missing.args[0]}, which has no known value"
            parsed.problems.append(
                Problem(_place(given.where, key), why, "write the value itself", code="unresolved-reference")
            )
    return parsed


def _option(word: str, rest: Sequence[str], where: str, parsed: ParsedOverrides) -> int:
    """Reads one of Hydra's options; returns the number of further words that it uses."""
    name, equals, value = word.partition("=")
    used = 0
    if not equals and rest:
        value, used = rest[0], 1
    if name in ("--config-name", "-cn"):
        parsed.config = value
    elif name in ("--config-path", "-cp", "--config-dir", "-cd"):
        parsed.folder = value
    else:
        why = "is an option of Hydra that changes no setting"
        parsed.problems.append(Problem(_place(where, word), why, "remove it", code="unused-key"))
        return 0
    return used


def _override(word: str, where: str, parsed: ParsedOverrides) -> None:
    key, equals, text = word.partition("=")
    removes = key.startswith("~")
    key = key.lstrip("+~")
    if not _KEY.match(key):
        why, remedy = "is not an override", "write key=value, +key=value, ++key=value or ~key"
        parsed.problems.append(Problem(_place(where, word), why, remedy, code="invalid-syntax"))
    elif removes:
        for name in [name for name in parsed.given if name == key or name.startswith(key + ".")]:
            del parsed.given[name]
    elif not equals:
        parsed.problems.append(Problem(_place(where, word), "has no value", f"write {word}=VALUE", code="not-set"))
    else:
        try:
            value = parse_value(text)
        except ValueError as error:
            parsed.problems.append(
                Problem(
                    _place(where, key), f"{text!r} cannot be read: {error}", "quote the value", code="invalid-syntax"
                )
            )
            return
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                parsed.given[f"{key}.{name}"] = Setting(inner, where)
        else:
            parsed.given.pop(key, None)  # the last setting of a key wins and determines its position
            parsed.given[key] = Setting(value, where)


def _place(where: str, word: str) -> str:
    return f"{where}: {word}" if where else word


def parse_value(text: str) -> Any:
    """Parses a value of Hydra's grammar."""
    value, rest = _value(text.strip(), stops="")
    if rest.strip():
        raise ValueError(f"{rest.strip()!r} follows the value")
    return value


def _value(text: str, stops: str) -> tuple[Any, str]:
    text = text.lstrip()
    if text.startswith(("'", '"')):
        return _quoted(text)
    if text.startswith("["):
        return _list(text[1:])
    if text.startswith("{"):
        return _group(text[1:])
    end = next((i for i, sign in enumerate(text) if sign in stops), len(text))
    return _plain(text[:end].strip()), text[end:]


def _quoted(text: str) -> tuple[str, str]:
    out: list[str] = []
    mark, i = text[0], 1
    while i < len(text):
        if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in (mark, "\\"):
            i += 1
        elif text[i] == mark:
            return "".join(out), text[i + 1 :]
        out.append(text[i])
        i += 1
    raise ValueError("a quotation mark is not closed")


def _list(text: str) -> tuple[list[Any], str]:
    items: list[Any] = []
    text = text.lstrip()
    while not text.startswith("]"):
        if not text:
            raise ValueError("a list is not closed with ]")
        value, text = _value(text, stops=",]")
        items.append(value)
        text = _next_item(text, "]", "list")
    return items, text[1:]


def _group(text: str) -> tuple[dict[str, Any], str]:
    items: dict[str, Any] = {}
    text = text.lstrip()
    while not text.startswith("}"):
        key, colon, text = text.partition(":")
        if not colon:
            raise ValueError("a group is not closed with }")
        value, text = _value(text, stops=",}")
        items[key.strip().strip("'\"")] = value
        text = _next_item(text, "}", "group")
    return items, text[1:]


def _next_item(text: str, closing: str, kind: str) -> str:
    text = text.lstrip()
    if text.startswith(","):
        return text[1:].lstrip()
    if not text.startswith(closing):
        raise ValueError(f"a {kind} is not closed with {closing}")
    return text


def _plain(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _resolved(value: Any, given: Mapping[str, Setting], defaults: Mapping[str, Any], seen: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, given, defaults, seen) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def of(key: str) -> Any:
        if key in seen:
            raise KeyError(f"itself ({key})")
        if key in given:
            return _resolved(given[key].value, given, defaults, (*seen, key))
        if defaults.get(key) is None:
            raise KeyError(key)
        return defaults[key]

    only = _REFERENCE.fullmatch(value)
    if only:
        return of(only[1])
    text = _REFERENCE.sub(lambda match: str(of(match[1])), value)
    if "${" in text:
        raise KeyError(text)
    return text


# argparse ------------------------------------------------------------------------------------------------------------

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
    near = nearest_name(name, list(flags))
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
            return int(text) if not re.search(r"[.eE]", text) else int(float(text))
        return flag.kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {'a number' if flag.kind is float else 'an integer'}") from error
