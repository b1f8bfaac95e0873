"""Converts a command of verl to a recipe: finds the program and the verl release, applies the key table and rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from lockstep.compat.conversion_output import lockstep_defaults, program_name
from lockstep.compat.key_table import Conversion, Setting, Settings, convert, load_tables, row_of, table_rows
from lockstep.compat.verl.verl_main_ppo import PPO_RULES
from lockstep.compat.verl.verl_offload import sft_offload_rule
from lockstep.compat.verl.verl_release import ReadCommand, defaults_of, read_command, stored_keys
from lockstep.compat.verl.verl_rules import SFT_RULES

_RULES = {"main_ppo": PPO_RULES, "sft": (*SFT_RULES, sft_offload_rule)}


def convert_verl(
    program: str, words: Sequence[str], locations: Sequence[str] = (), version: str | None = None
) -> Conversion:
    """Converts `verl PROGRAM WORDS`. `locations` has the script line of each word. `version` is the verl release that
    the command is written for; without it, the keys of the command decide."""
    tables = load_tables("verl")
    name = program_name("verl", program, tables)
    trainer = tables["programs"][name]
    rows = table_rows("verl", trainer)
    read = read_command(name, words, locations, [row.key for row in rows], version)
    given = renamed(read.given, read.groups)
    settings = Settings(
        f"verl {read.version}",
        trainer,
        given,
        _defaults(name, trainer, read),
        {old: key for key in read.given if (old := _old_name(key, read.groups)) != key},
        era=".".join(map(str, max((0, 3), _parts(read.version)[:2]))),
        unread=_unread(read, {key for key in given if row_of(rows, key) is None}),
    )
    done = convert(settings, rows, _RULES[trainer], lockstep_defaults)
    done.problems[:0] = read.problems
    done.remarks[:0] = [f"release: verl {read.version} ({read.why})", *read.remarks]
    return done


def renamed(given: Mapping[str, Setting], groups: Collection[str] = ()) -> dict[str, Setting]:
    """Renames keys of newer releases of verl to their older names, which the table has. `groups` are the groups of keys
    that the configuration of the command has."""
    return {_old_name(key, groups): value for key, value in given.items()}


def _names(groups: Collection[str]) -> dict[str, str]:
    tables = load_tables("verl")
    present = {new: old for new, old in tables["renamed_groups"].items() if new.removesuffix(".") in groups}
    return {**tables["renamed"], **present}


def _old_name(key: str, groups: Collection[str] = ()) -> str:
    names = _names(groups)
    fitting = [name for name in names if key == name or (name.endswith(".") and key.startswith(name))]
    new = max(fitting, default="", key=len)
    return names[new] + key[len(new) :] if new else key


def _defaults(program: str, trainer: str, read: ReadCommand) -> dict[str, Any]:
    """Returns the defaults of the release for the keys with a default in the table or in `program_defaults`."""
    tables = load_tables("verl")
    of_release: list[str] = tables["defaults_of_release"][trainer]
    keys: dict[str, Any] = {row.key: row.default for row in table_rows("verl", trainer) if row.default is not None}
    keys |= dict.fromkeys(of_release) | tables["program_defaults"].get(program, {})
    newer: dict[str, list[str]] = {}
    for key in keys:
        for new, old in _names(read.groups).items():
            if key == old or (old.endswith(".") and key.startswith(old)):
                newer.setdefault(key, []).append(new + key[len(old) :])
    implied: dict[str, Any] = tables["implied"].get(read.config, {})
    return implied | defaults_of(read.applied, keys, newer)


def _unread(read: ReadCommand, keys: set[str]) -> dict[str, str]:
    """Returns the keys that the command adds with `+`, that no release of verl has and that no row covers."""
    added = {_old_name(key, read.groups) for key in read.added}
    return dict.fromkeys((keys & added) - _known_keys(), f"verl {read.version} does not read this key")


@cache
def _known_keys() -> frozenset[str]:
    """Returns the older names of the keys of all releases."""
    return frozenset(map(_old_name, stored_keys()))


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
