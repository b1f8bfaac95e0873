"""`lockstep migrate --verify SCRIPT`: what becomes of every key of a command, and of every default that differs.

The same table is stored as migration.json in the folder of a converted run, and `lockstep compare` reads it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.compat.key_table import Conversion, KeyOutcome, WrittenKey, load_tables
from lockstep.masking import masked_tree
from lockstep.recipe.loader import value_text

RowVerdict = Literal["kept", "translated", "no effect", "different", "refused"]
VERDICTS: tuple[RowVerdict, ...] = ("kept", "translated", "no effect", "different", "refused")
FORMAT = 1
_WIDTH, _COLUMN = 80, 12
# The curves that a difference of a recipe section changes. A difference of any other section changes all curves.
_CURVES: dict[str, tuple[str, ...]] = {
    "val": ("val*",),
    "critic": ("critic/*", "actor/*"),
    **dict.fromkeys(("log", "checkpoint", "parallel", "device"), ()),
}
_NO_CURVES = ("run.name", "run.folder", "run.resume", "run.migration", "run.export")


@dataclass(frozen=True)
class MigrationRow:
    """One line of the table: a key of the command, a default of the other trainer, or a difference without a key."""

    key: str
    value: Any
    verdict: RowVerdict
    recipe: Mapping[str, Any]
    """The recipe keys that come from this key, with their values."""
    why: str = ""
    line: str = ""
    """The line of the script, or "" if the command is not in a script."""
    origin: Literal["command", "default", "trainer"] = "command"
    curves: tuple[str, ...] = ()
    """Patterns of the metrics that a difference changes."""


@dataclass(frozen=True)
class MigrationTable:
    """The table of one converted command."""

    peer: str
    program: str
    method: str
    rows: tuple[MigrationRow, ...]
    remarks: tuple[str, ...] = ()

    def counts(self) -> dict[RowVerdict, int]:
        return {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in VERDICTS}

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"format": FORMAT, **asdict(self), "counts": self.counts()}
        for row in values["rows"]:
            row["value"] = masked_tree(row["value"], row["key"])
        return values


def table_of(done: Conversion, lockstep_defaults: Mapping[str, Any]) -> MigrationTable:
    """Returns the table of a converted command. `lockstep_defaults` are lockstep's defaults of its method."""
    rows = [
        *(_command_row(outcome, done) for outcome in done.outcomes),
        *_unread_rows(done),
        *_default_rows(done, lockstep_defaults),
        *_trainer_rows(done),
    ]
    method = str(done.recipe["method"].value) if "method" in done.recipe else ""
    return MigrationTable(done.settings.peer, done.settings.program, method, tuple(rows), tuple(done.remarks))


def _command_row(outcome: KeyOutcome, done: Conversion) -> MigrationRow:
    recipe = {key: done.recipe[key].value for key in outcome.to}
    spelled, given = done.settings.spelling(outcome.key), outcome.given
    verdict: RowVerdict = "translated"
    if outcome.outcome == "mapped":
        verdict = "kept" if list(map(_plain, recipe.values())) == [_plain(given.value)] else "translated"
    elif outcome.outcome == "changed":
        verdict = "different"
    elif outcome.outcome == "ignored":
        verdict = "no effect"
    else:
        verdict = "refused"
    curves = _curves(recipe) if verdict == "different" else ()
    value = "(hidden)" if outcome.key == "use_wandb" and isinstance(given.value, str) else given.value
    return MigrationRow(spelled, value, verdict, recipe, outcome.note, given.where, "command", curves)


def _unread_rows(done: Conversion) -> Iterator[MigrationRow]:
    """Yields the words of the command that the other trainer would refuse; they are no settings."""
    refused = {done.settings.spelling(outcome.key) for outcome in done.outcomes if outcome.outcome == "refused"}
    for problem in done.problems:
        line, _, word = problem.where.rpartition(": ")
        if word not in refused:
            why = f"{problem.why}; {problem.remedy}" if problem.remedy else problem.why
            yield MigrationRow(word, None, "refused", {}, why, line)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _default_rows(done: Conversion, lockstep_defaults: Mapping[str, Any]) -> Iterator[MigrationRow]:
    """Yields a row for each recipe value that comes from defaults of the other trainer. A default that equals
    lockstep's is not in the recipe."""
    for key, written in done.recipe.items():
        if key == "run.migration" or done.is_set(*written.sources):
            continue
        ours = lockstep_defaults.get(key)
        why = f"lockstep's default is {value_text(ours)}" if key in lockstep_defaults else "lockstep has no default"
        names = ", ".join(done.settings.spelling(name) for name in written.sources)
        value = _default_of(done, written)
        verdict: RowVerdict = "kept" if _plain(value) == _plain(written.value) else "translated"
        if not names:  # what the other trainer always does
            names, value = f"{done.settings.program} (no key)", None
        if written.note and written.sources:
            verdict, why = "different", f"{written.note}; {why}"
        curves = _curves({key: written.value}) if verdict == "different" else ()
        yield MigrationRow(names, value, verdict, {key: written.value}, why, "", "default", curves)


def _default_of(done: Conversion, written: WrittenKey) -> Any:
    return done[written.sources[0]] if len(written.sources) == 1 else written.value


def _trainer_rows(done: Conversion) -> Iterator[MigrationRow]:
    """Yields the differences that no key switches (tables/differences.yaml)."""
    name, _, version = done.settings.peer.partition(" ")
    program = done.settings.program
    for entry in load_tables("differences")[name.lower()]:
        fits = program in entry.get("programs", [program]) and _release(version) < _release(entry.get("before", "99"))
        recipe = {key: done.recipe[key].value if key in done.recipe else None for key in entry.get("recipe", {})}
        if fits and all(recipe[key] in values for key, values in entry.get("recipe", {}).items()):
            shown = {key: value for key, value in recipe.items() if value is not None}
            curves = tuple(entry["curves"])
            yield MigrationRow(entry["what"], None, "different", shown, entry["how"], "", "trainer", curves)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _curves(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for key in recipe:
        if key not in _NO_CURVES:
            found |= dict.fromkeys(_CURVES.get(key.split(".")[0], ("*",)))
    return ("*",) if "*" in found else tuple(found)


# Output --------------------------------------------------------------------------------------------------------------


def table_text(table: MigrationTable, end: str = "") -> str:
    """Returns the table as text of 80 columns, with the sentence `end` as last line."""
    method = f", method {table.method}" if table.method else ""
    lines = [f"{table.peer} {table.program}{method}"]
    titles = {
        "command": "Keys of the command",
        "default": f"Defaults of {table.peer} that differ from lockstep's, in the recipe",
        "trainer": "Differences that no key switches",
    }
    for origin, title in titles.items():
        rows = [row for row in table.rows if row.origin == origin]
        if rows:
            lines += ["", f"{title} ({len(rows)})", "-" * _WIDTH]
            lines += [line for row in rows for line in _row_lines(row)]
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in table.counts().items())]
    for remark in (*table.remarks, end):
        lines += textwrap.wrap(remark, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _row_lines(row: MigrationRow) -> Iterator[str]:
    place = f"  ({row.line})" if row.line else ""
    shown = f"{row.key} = {value_text(masked_tree(row.value, row.key))}{place}"
    if row.value is None and (row.origin == "trainer" or row.verdict == "refused" or row.key.endswith("(no key)")):
        shown = f"{row.key}{place}"
    yield from _wrapped(shown, row.verdict.ljust(_COLUMN), " " * (_COLUMN + 2))
    for key, value in row.recipe.items():
        if row.verdict in ("kept", "translated", "different"):
            yield from _wrapped(f"-> {key}: {value_text(value)}", " " * (_COLUMN + 2), " " * (_COLUMN + 5))
    if row.why:
        yield from _wrapped(row.why, " " * (_COLUMN + 2), " " * (_COLUMN + 2))


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def table_json(*tables: MigrationTable) -> str:
    """Returns one table as a JSON object, or several tables as a list."""
    values = [table.as_json() for table in tables]
    return json.dumps(values[0] if len(values) == 1 else values, indent=1, ensure_ascii=False, default=str) + "\n"
