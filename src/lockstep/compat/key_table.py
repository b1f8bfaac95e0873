"""Maps the keys of another trainer to recipe keys, by the tables in `tables/*.yaml` and rules in Python.

A table has one row per key of the other trainer. A row has the recipe keys that the key sets, its default and a note.
If lockstep ignores or refuses the key, the row has the reason instead. A rule is a Python function that computes recipe
values from several keys. The pages in docs/ print the same tables.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import Problem

FOLDER = Path(__file__).parent / "tables"
OutcomeKind = Literal["mapped", "changed", "ignored", "refused"]
"""What happens to a key: it is mapped with the same meaning, mapped with a changed meaning, ignored (it has no effect
in lockstep), or refused."""
_CASTS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "same": lambda value: value}


@dataclass(frozen=True)
class KeyRow:
    """One key of another trainer."""

    key: str
    outcome: OutcomeKind
    to: tuple[str, ...] = ()
    """The recipe keys that this key sets, directly (if `cast` is set) or through a rule."""
    note: str = ""
    default: Any = None
    """The default of this key in the other trainer."""
    unit: str = ""
    cast: str | None = None
    """The type of the recipe value. `cast` is None if a rule converts the key."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """For each value of this key: the recipe value, or a mapping of recipe keys to values."""
    remedy: str = ""
    off: tuple[Any, ...] = (None, False)
    """Values of a refused key that switch its feature off; the key is accepted with these values."""
    accepted: str = "this value switches the feature off"
    """The note on a refused key with one of the values in `off`."""
    type: str = ""
    """How OpenRLHF's parser reads the flag: int, float, str, switch, float2, str+, float+."""
    flat: str | None = None
    dotted: str | None = None
    """`flat` and `dotted` are the names of the flag in OpenRLHF 0.7 and in OpenRLHF 0.11."""

    def covers(self, key: str) -> bool:
        return key == self.key or ("*" in self.key and fnmatch.fnmatchcase(key, self.key))

    def name(self, dotted: bool) -> str | None:
        return self.dotted if dotted else self.flat


@cache
def load_tables(peer: str) -> dict[str, Any]:
    """Reads the content of `tables/PEER.yaml`."""
    import yaml

    text = (FOLDER / f"{peer}.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


@cache
def table_rows(peer: str, table: str) -> tuple[KeyRow, ...]:
    """Returns the rows of a table and of the tables that it includes, in the order of the file."""
    rows: list[KeyRow] = []
    for section in load_tables(peer)["tables"][table]:
        if "include" in section:
            prefix = section.get("prefix", "")
            rows += [replace(row, key=prefix + row.key) for row in table_rows(peer, section["include"])]
            continue
        rows += [_mapped_row(key, entry) for key, entry in section.get("keys", {}).items()]
        for outcome in ("ignored", "refused"):
            for group in section.get(outcome, ()):
                rows += _group_rows(outcome, group)
    return tuple(rows)


def _mapped_row(key: str, entry: Mapping[str, Any]) -> KeyRow:
    to = entry.get("to", ())
    return KeyRow(
        key,
        "changed" if "differs" in entry else "mapped",
        (to,) if isinstance(to, str) else tuple(to),
        entry.get("differs", entry.get("note", "")),
        default=entry.get("default"),
        unit=entry.get("unit", ""),
        cast=entry.get("as"),
        values=entry.get("values", {}),
        **_flag_names(key, entry),
    )


def _group_rows(outcome: Any, group: Mapping[str, Any]) -> list[KeyRow]:
    """Returns one row per key of a group of keys that are ignored or refused for the same reason."""
    keys = group["keys"]
    off = tuple(group.get("accepts", (None, False)))
    return [
        KeyRow(
            key,
            outcome,
            note=group["because"],
            remedy=group.get("do", ""),
            off=off,
            **({"accepted": group["accepted"]} if "accepted" in group else {}),
            **(_flag_names(key, keys[key]) if isinstance(keys, dict) else {}),
        )
        for key in keys
    ]


def _flag_names(key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if "type" not in entry:
        return {}
    only = entry.get("only")
    return {
        "type": entry["type"],
        "flat": entry.get("flat") if only == "dotted" else key,
        "dotted": None if only == "flat" else entry.get("dotted", key),
    }


@dataclass(frozen=True)
class Setting:
    """A value that a command sets, and its place: a line of a script, or "" if the command is not in a script."""

    value: Any
    where: str = ""


class Unreadable(Exception):
    """Raised if a value has the wrong type for its key."""

    def __init__(self, key: str, why: str):
        super().__init__(key, why)
        self.key, self.why = key, why


@dataclass(frozen=True)
class Settings:
    """The settings of a command, and the defaults of the trainer version that the command is written for."""

    peer: str
    """Name and version of the other trainer, such as `verl 0.4`."""
    program: str
    """The program, such as `main_ppo` or `train_dpo`."""
    given: Mapping[str, Setting]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    """For each key that the command spells differently from the table: the spelling of the command."""
    era: str = ""
    """The version whose rules apply, if it is not the version in `peer`."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Keys without a row that the other trainer does not read, and the reason."""

    @property
    def release(self) -> tuple[int, ...]:
        """The version of the other trainer as numbers."""
        return tuple(int(part) for part in self.peer.rsplit(" ", 1)[-1].split("."))

    def spelling(self, key: str) -> str:
        return self.spelled.get(key, key)


@dataclass(frozen=True)
class WrittenKey:
    """A recipe value, the keys of the other trainer that it comes from, and a note on the difference, if any."""

    value: Any
    sources: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class KeyOutcome:
    """The result for one key that the command sets."""

    key: str
    given: Setting
    outcome: OutcomeKind
    to: tuple[str, ...]
    note: str


@dataclass
class Conversion:
    """A conversion in progress: the command's settings, the recipe values so far, and the outcome of each key."""

    settings: Settings
    rows: Mapping[str, KeyRow] = field(default_factory=dict)
    recipe: dict[str, WrittenKey] = field(default_factory=dict)
    outcomes: list[KeyOutcome] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Remarks on the run as a whole."""
    devices: int = 1
    nodes: int = 1
    decided: dict[str, tuple[OutcomeKind, str]] = field(default_factory=dict)
    """The outcome and note of each key for which a rule, not the table, decides."""

    # Settings ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        return self.settings.era or self.settings.peer.rsplit(" ", 1)[-1]

    def since(self, version: str) -> bool:
        """Returns whether the command is written for this version of the other trainer or for a newer one."""
        return self.settings.release >= tuple(int(part) for part in version.split("."))

    def __getitem__(self, key: str) -> Any:
        """Returns the value that the other trainer uses for a key: that of the command, its default, or None."""
        given = self.settings.given
        return given[key].value if key in given else self.settings.defaults.get(key)

    def is_set(self, *keys: str) -> bool:
        """Returns whether the command itself sets one of the keys."""
        return any(key in self.settings.given for key in keys)

    def below(self, prefix: str) -> list[str]:
        """Returns the keys of the command that start with `prefix` and a dot."""
        return [key for key in self.settings.given if key.startswith(prefix + ".")]

    def integer(self, key: str) -> int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise Unreadable(key, f"{value!r} is not an integer")
        return int(value)

    def number(self, key: str) -> float:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unreadable(key, f"{value!r} is not a number")
        return float(value)

    def numbers(self, key: str) -> list[float]:
        try:
            return [float(value) for value in self[key]]
        except (TypeError, ValueError) as error:
            raise Unreadable(key, f"{self[key]!r} is not a list of numbers") from error

    def lookup(self, key: str, value: Any = None) -> Any:
        """Returns the recipe value that the table has for the key's value; adds a problem if there is no such value."""
        value, values = self[key] if value is None else value, self.rows[key].values
        if isinstance(value, list) or value not in values:
            self.refuse(key, f"{value} is not supported", f"use one of {', '.join(map(str, values))}")
            return None
        return values[value]

    # Results -----------------------------------------------------------------------------------------------------

    def write(self, to: str, value: Any, *sources: str, note: str = "") -> None:
        """Sets a recipe value. `note` says how the value differs from those of `sources` (other trainer's keys)."""
        self.recipe[to] = WrittenKey(value, sources, note)
        for key in sources if note else ():
            self.decided.setdefault(key, ("changed", note))

    def write_number(self, to: str, key: str, *switches: str) -> None:
        self.write(to, self.number(key), key, *switches)

    def write_integer(self, to: str, key: str, *switches: str) -> None:
        self.write(to, self.integer(key), key, *switches)

    def write_text(self, to: str, key: str) -> None:
        self.write(to, str(self[key]), key)

    def write_lookup(self, to: str, key: str) -> Any:
        value = self.lookup(key)
        if value is not None:
            self.write(to, value, key)
        return value

    def ignore(self, why: str, *keys: str) -> None:
        for key in keys:
            self.decided[key] = ("ignored", why)

    def refuse(self, key: str, why: str, remedy: str = "", code: str = "unsupported-setting") -> None:
        self.decided[key] = ("refused", f"{why}; {remedy}" if remedy else why)
        self.problems.append(Problem(self.named(key), why, remedy, code=code))

    def require(self, key: str, remedy: str, why: str = "is not set") -> bool:
        """Adds a problem if the key has no value; returns whether the key has a value."""
        if not self[key]:
            self.refuse(key, why, remedy, "not-set")
        return bool(self[key])

    def named(self, key: str) -> str:
        """Returns the key as the command spells it, with its line in the script."""
        given = self.settings.given.get(key)
        shown = self.settings.spelling(key)
        return f"{given.where}: {shown}" if given is not None and given.where else shown


KeyRule = Callable[[Conversion], None]


def convert(
    settings: Settings,
    rows: Sequence[KeyRow],
    rules: Iterable[KeyRule],
    lockstep_defaults: Callable[[str], Mapping[str, Any]],
) -> Conversion:
    """Applies the table rows, then the rules, and collects the outcome of every key that the command sets.

    `lockstep_defaults` returns lockstep's defaults for a method. A default of the other trainer that equals lockstep's
    default is not written to the recipe.
    """
    done = Conversion(settings, {row.key: row for row in rows})
    by_key = {key: row_of(rows, key) for key in settings.given}
    for key, row in by_key.items():
        if row is None and key in settings.unread:
            done.decided[key] = ("ignored", settings.unread[key])
        elif row is None:
            done.refuse(key, f"{settings.peer} has no such key", _nearest(key, rows), "unknown-key")
    _apply_casts(done, rows)
    _apply_refusals(done, rows, by_key)
    if not done.problems:  # rules need values of the right type
        for rule in rules:
            try:
                rule(done)
            except Unreadable as bad:
                done.refuse(bad.key, bad.why, "write the value itself", "invalid-value")
    if "method" in done.recipe:
        _leave_out_defaults(done, lockstep_defaults(str(done.recipe["method"].value)))
    done.outcomes = [_outcome(key, row, done) for key, row in by_key.items()]
    return done


def row_of(rows: Sequence[KeyRow], key: str) -> KeyRow | None:
    """Returns the table row of the key, or else the row with the longest pattern that matches the key."""
    covering = [row for row in rows if row.covers(key)]
    return max(covering, key=lambda row: (row.key == key, len(row.key)), default=None)


def _apply_casts(done: Conversion, rows: Sequence[KeyRow]) -> None:
    for row in rows:
        value = done[row.key]
        if row.cast is None or (value is None and not done.is_set(row.key)):
            continue
        try:
            done.write(row.to[0], _CASTS[row.cast](value), row.key)
        except (TypeError, ValueError):
            done.refuse(
                row.key, f"{value!r} is not of type {row.cast}", f"write a value of type {row.cast}", "invalid-value"
            )


def _apply_refusals(done: Conversion, rows: Sequence[KeyRow], by_key: Mapping[str, KeyRow | None]) -> None:
    for row in rows:
        if row.outcome != "refused":
            continue
        keys = [key for key, its_row in by_key.items() if its_row is row and not _is_off(done[key], row.off)]
        for key in keys[1:]:
            done.decided[key] = ("refused", row.note)
        if keys:  # a row with a pattern gives one problem for all keys that match it
            more = f" ({len(keys)} keys {row.key})" if len(keys) > 1 else ""
            done.refuse(keys[0], row.note + more, row.remedy)


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    return any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in off)


def _leave_out_defaults(done: Conversion, defaults: Mapping[str, Any]) -> None:
    for key, written in list(done.recipe.items()):
        if key != "method" and not done.is_set(*written.sources) and key in defaults and defaults[key] == written.value:
            del done.recipe[key]


def _outcome(key: str, row: KeyRow | None, done: Conversion) -> KeyOutcome:
    outcome, note = done.decided.get(key, (row.outcome, row.note) if row else ("refused", "no such key"))
    if outcome == "refused" and key not in done.decided:
        outcome, note = "ignored", row.accepted if row else ""
    to = tuple(name for name, written in done.recipe.items() if key in written.sources)
    if outcome in ("mapped", "changed") and not to:
        outcome, note = "ignored", note or "the setting has no effect with the other settings of this command"
    return KeyOutcome(key, done.settings.given[key], outcome, to, note)


def _nearest(key: str, rows: Sequence[KeyRow]) -> str:
    near = nearest_name(key, [row.key for row in rows if "*" not in row.key])
    listed = "`lockstep help verl-keys` and `lockstep help openrlhf-keys` list the known keys"
    return f"did you mean {near}?" if near else f"remove the key; {listed}"


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Returns the most similar of `names`, else a name with the same part after the last dot, else None."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    leaf = name.rsplit(".", 1)[-1]
    return next(iter([*near, *(other for other in names if other.rsplit(".", 1)[-1] == leaf)]), None)
