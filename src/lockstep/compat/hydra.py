"""The grammar of verl's command line: Hydra's overrides.

`key=value` sets, `+key=value` adds, `++key=value` does either, `~key` takes away what was said before. The last one
wins. A value is a number, a switch, `null`, a list `[a,b]`, a group `{a:1}`, a quoted or a bare text; `${other.key}`
stands for the value of another key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.compat.settings import Setting
from lockstep.errors import Problem

_KEY = re.compile(r"^[A-Za-z_][\w]*(\.[\w-]+)*$")
_INTEGER = re.compile(r"^[-+]?\d[\d_]*$")
_FLOAT = re.compile(r"^[-+]?((\d[\d_]*)?\.\d+|\d[\d_]*\.|\d[\d_]*(?=[eE]))(\d*[eE][-+]?\d+)?$")
_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_WORDS: dict[str, Any] = {"null": None, "true": True, "false": False}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class ParsedOverrides:
    """The words of a command line taken apart."""

    given: dict[str, Setting] = field(default_factory=dict)
    config: str | None = None
    """The configuration that is named besides: `--config-name`."""
    problems: list[Problem] = field(default_factory=list)


def parse_overrides(
    words: Sequence[str], wheres: Sequence[str] = (), defaults: Mapping[str, Any] = {}
) -> ParsedOverrides:
    """`wheres` says of each word where it stands. `defaults` are for references to keys that nobody set."""
    found = ParsedOverrides()
    position = 0
    while position < len(words):
        word, where = words[position], wheres[position] if position < len(wheres) else ""
        position += 1
        if word.startswith("-"):
            position += _option(word, words[position:], where, found)
        else:
            _override(word, where, found)
    for key, given in list(found.given.items()):
        try:
            value = _resolved(given.value, found.given, defaults, (key,))
        except KeyError as missing:
            found.problems.append(
                Problem(_place(where := given.where, key), f"refers to {missing.args[0]}, which has no plain value")
            )
            continue
        found.given[key] = Setting(value, given.where)
    return found


def _option(word: str, rest: Sequence[str], where: str, found: ParsedOverrides) -> int:
    """Hydra's own options; how many further words it took."""
    name, equals, value = word.partition("=")
    taken = 0
    if not equals and rest:
        value, taken = rest[0], 1
    if name in ("--config-name", "-cn"):
        found.config = value
    elif name in ("--config-path", "-cp", "--config-dir", "-cd"):
        pass  # where the configuration of that name is; only its name decides
    else:
        found.problems.append(Problem(_place(where, word), "is an option of Hydra's that changes no setting"))
        return 0
    return taken


def _override(word: str, where: str, found: ParsedOverrides) -> None:
    key, equals, text = word.partition("=")
    deletes = key.startswith("~")
    key = key.lstrip("+~")
    if not _KEY.match(key):
        found.problems.append(
            Problem(_place(where, word), "is no override: key=value, +key=value, ++key=value or ~key")
        )
    elif deletes:
        for name in [name for name in found.given if name == key or name.startswith(key + ".")]:
            del found.given[name]
    elif not equals:
        found.problems.append(Problem(_place(where, word), "has no value", f"write {word}=VALUE"))
    else:
        try:
            value = parse_value(text)
        except ValueError as error:
            found.problems.append(Problem(_place(where, key), f"{text!r} cannot be read: {error}"))
            return
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                found.given[f"{key}.{name}"] = Setting(inner, where)
        else:
            found.given.pop(key, None)  # the last one wins, and its place is where it stands
            found.given[key] = Setting(value, where)


def _place(where: str, word: str) -> str:
    return f"{where}: {word}" if where else word


def parse_value(text: str) -> Any:
    """A value of Hydra's grammar."""
    value, rest = _value(text.strip(), stops="")
    if rest.strip():
        raise ValueError(f"{rest.strip()!r} is left over")
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
    mark, out, i = text[0], [], 1
    while i < len(text):
        if text[i] == "\\" and i + 1 < len(text) and text[i + 1] in (mark, "\\"):
            out.append(text[i + 1])
            i += 2
            continue
        if text[i] == mark:
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
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:].lstrip()
        elif not text.startswith("]"):
            raise ValueError("a list is not closed with ]")
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
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:].lstrip()
        elif not text.startswith("}"):
            raise ValueError("a group is not closed with }")
    return items, text[1:]


def _plain(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    if _FLOAT.match(text) or _EXPONENT.match(text):
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

    whole = _REFERENCE.fullmatch(value)
    if whole:
        return of(whole[1])
    text = _REFERENCE.sub(lambda found: str(of(found[1])), value)
    if "${" in text:
        raise KeyError(text)
    return text
