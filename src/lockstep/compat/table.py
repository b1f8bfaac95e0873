"""The map from another trainer's keys to the recipe's: a row a key, and rules for keys that mean something together.

A row says what becomes of its key. The tables are what the converters run on and what the documents show, so that
both say the same.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.compat.settings import Setting, Settings, Unreadable
from lockstep.errors import Problem, Refusal

Fate = Literal["taken", "changed", "idle", "refused"]
"""Taken over; taken over with another meaning; without effect here; refused."""


@dataclass(frozen=True)
class KeyRow:
    """One key. `to` are the recipe's keys that it decides, alone (`convert`) or by one of the rules."""

    key: str
    fate: Fate
    to: tuple[str, ...] = ()
    note: str = ""
    default: Any = None
    """The other trainer's; what is not said counts as this."""
    convert: Callable[[Any], Any] | None = None
    off: tuple[Any, ...] = (None, False)
    """Of a refused key: values that ask for nothing."""

    def covers(self, key: str) -> bool:
        return key == self.key or ("*" in self.key and fnmatch.fnmatchcase(key, self.key))


def same(key: str, to: str, default: Any = None, note: str = "", *, convert: Any = lambda value: value) -> KeyRow:
    """A key that is one of ours by another name."""
    return KeyRow(key, "taken", (to,), note, default, convert)


def other(key: str, to: str, note: str, default: Any = None, *, convert: Any = lambda value: value) -> KeyRow:
    """One that does not mean quite the same here."""
    return KeyRow(key, "changed", (to,), note, default, convert)


def part(key: str, *to: str, default: Any = None, note: str = "") -> KeyRow:
    """One that decides together with others, in a rule."""
    return KeyRow(key, "taken", to, note, default)


def idle(keys: str, note: str, default: Any = None) -> list[KeyRow]:
    """Keys, separated by spaces, that change nothing here."""
    return [KeyRow(key, "idle", note=note, default=default) for key in keys.split()]


def refused(keys: str, note: str, off: Sequence[Any] = (None, False), default: Any = None) -> list[KeyRow]:
    """Keys, separated by spaces, that cannot be done here; `off` are the values that do not ask for it."""
    return [KeyRow(key, "refused", note=note, default=default, off=tuple(off)) for key in keys.split()]


@dataclass(frozen=True)
class WrittenKey:
    """A value of the recipe, the keys it comes from, and what is to be said about it."""

    value: Any
    sources: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class KeyTold:
    """A line of the report about one key that the command sets."""

    key: str
    given: Setting
    fate: Fate
    to: tuple[str, ...]
    note: str


@dataclass
class Conversion:
    """What a command becomes: values for the recipe, and a word on every key that it sets."""

    settings: Settings
    recipe: dict[str, WrittenKey] = field(default_factory=dict)
    told: list[KeyTold] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What holds for the whole run and for no key alone."""
    devices: int = 1
    nodes: int = 1
    fates: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """Where a rule knows better than the table what became of a key."""

    def write(self, to: str, value: Any, *sources: str, note: str = "") -> None:
        """A value of the recipe; a note means that it is not quite what the sources meant."""
        self.recipe[to] = WrittenKey(value, sources, note)
        for key in sources if note else ():
            self.fates.setdefault(key, ("changed", note))

    def ignore(self, key: str, why: str) -> None:
        self.fates[key] = ("idle", why)

    def refuse(self, key: str, why: str, remedy: str = "") -> None:
        self.fates[key] = ("refused", why)
        self.problems.append(Problem(self.named(key), why, remedy))

    def named(self, key: str) -> str:
        """The key as the user wrote it, and where."""
        given = self.settings.given.get(key)
        shown = self.settings.spelling(key)
        return f"{given.where}: {shown}" if given is not None and given.where else shown


KeyRule = Callable[[Settings, Conversion], None]


def converted(
    settings: Settings, rows: Sequence[KeyRow], rules: Iterable[KeyRule], own: Callable[[str], Mapping[str, Any]]
) -> Conversion:
    """The command as a recipe: rows first, then rules, then the fate of every key that was given.

    `own` gives the defaults of a method of ours by dotted key: a default of the other trainer that is the same is not
    written out.
    """
    done = Conversion(settings)
    by_key = {key: _row_of(rows, key) for key in settings.given}
    for key, row in by_key.items():
        if row is None:
            done.refuse(key, f"{settings.peer} has no such key", _nearest(key, rows))
    for row in rows:
        if row.convert is None or row.fate not in ("taken", "changed"):
            continue
        value = settings[row.key]
        if value is None and not settings.says(row.key):
            continue
        try:
            done.write(row.to[0], row.convert(value), row.key)
        except (TypeError, ValueError):
            done.refuse(row.key, f"{value!r} is not a value that it takes", row.note)
    for row in rows:
        if row.fate == "refused":
            asking = [key for key in settings.given if by_key[key] is row and not _asks_nothing(settings[key], row.off)]
            for key in asking[1:]:
                done.fates[key] = ("refused", row.note)
            if asking:  # a group is one problem, however many keys of it are set
                more = f" ({len(asking)} keys {row.key})" if len(asking) > 1 else ""
                done.refuse(asking[0], row.note + more)
    if not done.problems:  # rules rely on values that can be read
        for rule in rules:
            try:
                rule(settings, done)
            except Unreadable as bad:
                done.refuse(bad.key, bad.why, "write the value itself")
    if "method" in done.recipe:
        _leave_out_defaults(done, own(str(done.recipe["method"].value)))
    done.told = [_told(key, row, done) for key, row in by_key.items()]
    return done


def _row_of(rows: Sequence[KeyRow], key: str) -> KeyRow | None:
    """The row of this very key, else of a group that holds it."""
    exact = next((row for row in rows if row.key == key), None)
    return exact or next((row for row in rows if row.covers(key)), None)


def _asks_nothing(value: Any, off: tuple[Any, ...]) -> bool:
    return any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in off)


def _leave_out_defaults(done: Conversion, own: Mapping[str, Any]) -> None:
    """What nobody said and what would hold anyway."""
    for key, written in list(done.recipe.items()):
        unsaid = not done.settings.says(*written.sources)
        if unsaid and key in own and own[key] == written.value and key != "method":
            del done.recipe[key]


def _told(key: str, row: KeyRow | None, done: Conversion) -> KeyTold:
    given = done.settings.given[key]
    fate, note = done.fates.get(key, (row.fate, row.note) if row else ("refused", "no such key"))
    if fate == "refused" and key not in done.fates:
        fate, note = "idle", "asks for nothing"
    to = tuple(name for name, written in done.recipe.items() if key in written.sources)
    if fate in ("taken", "changed") and not to:
        fate, note = "idle", note or "what it would set does not hold here"
    return KeyTold(key, given, fate, to, note)


def _nearest(key: str, rows: Sequence[KeyRow]) -> str:
    known = [row.key for row in rows if "*" not in row.key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        leaf = key.rsplit(".", 1)[-1]
        near = [name for name in known if name.rsplit(".", 1)[-1] == leaf][:1]
    return f"did you mean {near[0]}?" if near else "remove it, or look it up in the table of keys"


def refuse_problems(done: Conversion) -> None:
    if done.problems:
        raise Refusal(done.problems)
