"""A flag of OpenRLHF's: its names in both dialects, how it is read, and its row of the map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.compat.flags import Count, Flag
from lockstep.compat.table import KeyRow, idle, refused

_KINDS: dict[str, tuple[type, Count]] = {
    "i": (int, 1),
    "f": (float, 1),
    "s": (str, 1),
    "b": (bool, "switch"),
    "ff": (float, 2),
    "s*": (str, "many"),
    "f*": (float, "many"),
}


@dataclass(frozen=True)
class Option:
    """`row.key` is its name in the tables: the flat one, or the dotted one where there is no flat one."""

    row: KeyRow
    flat: str | None
    dotted: str | None
    flag: Flag

    def name(self, dotted: bool) -> str | None:
        return self.dotted if dotted else self.flat


def opt(kind: str, flat: str | None, dotted: str | None, row: KeyRow) -> Option:
    reads, count = _KINDS[kind]
    return Option(row, flat, dotted, Flag(row.key, reads, count))


def without_effect(names: str, note: str) -> list[Option]:
    """`names` are words of the form kind:flat:dotted, either name may be left empty."""
    return [opt(kind, flat, dotted, idle(flat or dotted or "", note)[0]) for kind, flat, dotted in _words(names)]


def cannot(names: str, note: str, off: Sequence[Any] = (None, False)) -> list[Option]:
    return [
        opt(kind, flat, dotted, refused(flat or dotted or "", note, off)[0]) for kind, flat, dotted in _words(names)
    ]


def _words(names: str) -> Iterable[tuple[str, str | None, str | None]]:
    for word in names.split():
        kind, flat, dotted = word.split(":")
        yield kind, flat or None, dotted or None


def flags_of(options: Iterable[Option], dotted: bool) -> dict[str, Flag]:
    """The flags of a dialect by the name that is written."""
    return {name: option.flag for option in options if (name := option.name(dotted)) is not None}
