"""A value out of a row by its key, also from inside nested columns: "extra_info.question", "choices.0"."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from lockstep.errors import Refusal
from lockstep.types import Origin, Row

_LISTED = 20


def lookup(row: Row, key: str, origin: Origin) -> Any:
    """The value at `key`; dots go into objects and lists. A column whose own name holds dots wins over a path."""
    value: Any = row
    parts = key.split(".")
    done = 0
    while done < len(parts):
        taken = _step(value, parts[done:])
        if taken is None:
            raise _missing(row, key, ".".join(parts[:done]), value, origin)
        done += taken
        name = ".".join(parts[done - taken : done])
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _step(value: Any, parts: list[str]) -> int | None:
    """How many of the parts name something directly inside `value`: the most that do, None if none do."""
    if isinstance(value, dict):
        return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in value), None)
    if isinstance(value, list) and parts[0].isascii() and parts[0].isdecimal():
        return 1 if int(parts[0]) < len(value) else None
    return None


def _missing(row: Row, key: str, reached: str, value: Any, origin: Origin) -> Refusal:
    inside = f"{reached!r}" if reached else "the row"
    if isinstance(value, dict):
        held = f"{inside} has the keys {_listed(list(value))}" if value else f"{inside} has no keys"
    elif isinstance(value, list):
        held = f"{inside} is a list of {len(value)}"
    else:
        held = f"{inside} is {'null' if value is None else 'a ' + type(value).__name__}, with nothing inside"
    near = _nearest(row, key)
    return Refusal.at(str(origin), f"has no {key!r}: {held}", f"did you mean {near!r}?" if near else "")


def _listed(keys: list[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(map(repr, keys[:_LISTED])) + (f" and {more} more" if more > 0 else "")


def _nearest(row: Row, key: str) -> str | None:
    """The likeliest meant path: one that ends in the same name (a forgotten parent), else one spelled alike."""
    paths = list(row)
    paths += [f"{column}.{inner}" for column, value in row.items() if isinstance(value, dict) for inner in value]
    same_end = [path for path in paths if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return next(iter(same_end or get_close_matches(key, paths, n=1)), None)
