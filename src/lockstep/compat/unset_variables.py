"""Unset variables of a script: settings that do not affect training are converted without them, the others are listed.

A value is not needed if lockstep ignores its key, or if the key names only the run, its project or its folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from shlex import quote

from lockstep.compat.command_grammar import is_dotted
from lockstep.compat.key_table import KeyRow, load_tables, row_of, table_rows
from lockstep.compat.shell import Word
from lockstep.compat.shell_expansion import MARK
from lockstep.errors import Problem

# Recipe keys that name a run and its files.
_NAMES = {"run.name", "run.folder", "log.project"}
# Keys of which lockstep does not need the value: it does not store the key to a tracker, and a launcher sets devices.
_UNREAD = {"use_wandb", "use_tensorboard", "ckpt_path", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.logger"}


@dataclass
class KnownWords:
    """The words of a command with known values, remarks on words that were left out, and the missing variables."""

    words: list[Word] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    missing: list[Word] = field(default_factory=list)
    """Words whose values the conversion needs."""


def known_words(peer: str, program: str, words: Sequence[Word], script: str = "SCRIPT") -> KnownWords:
    """Removes or names the unset values that are not needed, and collects those that are."""
    known = KnownWords()
    dotted = peer == "openrlhf" and is_dotted([word.text for word in words])
    rows = _rows(peer, program)
    for word in words:
        if not word.unknown:
            known.words.append(word)
            continue
        flag = peer == "openrlhf" and "=" not in word.text.split(MARK)[0]
        key = _flag(known.words) if flag else word.text.partition("=")[0].lstrip("+-")
        row = None if MARK in key else _row(rows, key, peer, dotted)
        names = ", ".join(dict.fromkeys(word.unknown))
        if row is None or not _spare(row):
            known.missing.append(word)
            known.words.append(word)
        elif row.key not in _UNREAD and row.to and set(row.to) <= _NAMES:
            known.words.append(Word(re.sub(f"{MARK}([^{MARK}]*){MARK}", _plain, word.text), word.line))
            known.remarks.append(
                f"line {word.line}: {names} is not set; the name of the variable is used in {key}"
                + _setter(word.unknown, script)
            )
        else:
            known.remarks.append(f"line {word.line}: {names} is not set; {key} is left out, because it is not needed")
            if flag:
                known.words.pop()
    return known


def missing_problem(missing: Sequence[Word], computed: dict[str, str], script: str = "SCRIPT") -> Problem:
    """Returns one problem for all values that are missing, with one command that sets them."""
    names = list(dict.fromkeys(name for word in missing for name in word.unknown))
    shown = [f"{name} = {computed[name]}" if name in computed else name for name in names]
    places = [f"line {word.line}: {word.text.replace(MARK, '')}" for word in missing]
    variable = "variable" if len(names) == 1 else "variables"
    why = f"the {variable} {', '.join(shown)} {'is' if len(names) == 1 else 'are'} not set in the script"
    if len(places) > 1:
        lines = list(dict.fromkeys(str(word.line) for word in missing))
        why += f" (line{'s' if len(lines) > 1 else ''} {', '.join(lines)})"
    if unsettable := [name for name in names if not re.fullmatch(r"\w+", name)]:
        why = f"the value of {unsettable[0]} is known only when the script runs"
        if len(names) > 1:
            why += f"; also not set: {', '.join(name for name in names if name != unsettable[0])}"
    command = _command(names, script)
    remedy = f"set {'it' if len(names) == 1 else 'all of them'}: {command}"
    if unsettable:
        remedy = "write the value into the script" + (f"; {remedy}" if command else "")
    return Problem(places[0], why, remedy, code="unresolved-reference")


def _command(names: Sequence[str], script: str) -> str:
    """Returns the command that sets variables and arguments of the script, or an empty text if it can set none."""
    numbers = [int(name) for name in names if name.isdigit()]
    arguments = [f"ARGUMENT{number}" for number in range(1, max(numbers, default=0) + 1)]
    settable = [f"{name}=VALUE" for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)]
    return " ".join(["lockstep migrate", quote(script), *arguments, *settable]) if arguments or settable else ""


def _setter(names: Sequence[str], script: str) -> str:
    command = _command(list(dict.fromkeys(names)), script)
    return f" (set it: {command})" if command else ""


def _plain(mark: re.Match[str]) -> str:
    return re.sub(r"[^\w.-]+", "-", mark[1]).strip("-") or "value"


def _rows(peer: str, program: str) -> Sequence[KeyRow]:
    tables = load_tables(peer)
    *folders, name = program.split(".")
    table = tables["programs"].get(".".join([*folders[-1:], name]), tables["programs"].get(name))
    return table_rows(peer, table) if table is not None else ()


def _flag(words: Sequence[Word]) -> str:
    return words[-1].text.lstrip("-") if words and words[-1].text.startswith("--") else MARK


def _row(rows: Sequence[KeyRow], key: str, peer: str, dotted: bool) -> KeyRow | None:
    if peer == "openrlhf":
        return next((row for row in rows if row.name(dotted) == key), None)
    return row_of(rows, key)


def _spare(row: KeyRow) -> bool:
    named = bool(row.to) and set(row.to) <= _NAMES
    return row.key in _UNREAD or row.key.endswith("dist_checkpointing_path") or row.outcome == "ignored" or named
