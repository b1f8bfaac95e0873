"""Converts a command of OpenRLHF to a recipe: finds the program and its flag style, applies key table and rules.

OpenRLHF 0.7 has flat flags (`--lora_rank`), OpenRLHF 0.11 dotted flags (`--ds.lora.rank`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.compat.command_grammar import FLAG_TYPES, Flag, is_dotted, parse_flags
from lockstep.compat.conversion_output import lockstep_defaults, program_name
from lockstep.compat.key_table import Conversion, KeyRow, KeyRule, Settings, convert, load_tables, table_rows
from lockstep.compat.openrlhf.openrlhf_inference import refuse_training
from lockstep.compat.openrlhf.openrlhf_ppo import PPO_RULES
from lockstep.compat.openrlhf.openrlhf_release import find_release, flags_of_release
from lockstep.compat.openrlhf.openrlhf_rules import offline_rules

_BOUNDS = "vllm_is_truncated_threshold"
# Programs of OpenRLHF 0.7 that OpenRLHF 0.11 does not have.
_FLAT_ONLY = ("train_kto", "train_prm", "train_kd")


def convert_openrlhf(
    program: str, words: Sequence[str], locations: Sequence[str] = (), version: str | None = None
) -> Conversion:
    """Converts `openrlhf.cli.PROGRAM WORDS`. `locations` has the script line of each word. `version` is the release
    that the command is written for; without it, the flags of the command decide."""
    tables = load_tables("openrlhf")
    if (name := program.rsplit(".", 1)[-1]) in tables["inference"]:
        refuse_training(name, words, locations)
    name = tables["programs"][old := program_name("openrlhf", program, tables)]
    dotted = is_dotted(words) and name not in _FLAT_ONLY
    rows = table_rows("openrlhf", name)
    release, why = find_release(name, words, dotted, version)
    new = dotted or release.startswith("0.9.")  # 0.9 has the settings of 0.11 with flat names
    flags = flags_of(rows, dotted)
    if new and not dotted and _BOUNDS in flags:  # in 0.9, the flag has two values
        flags[_BOUNDS] = Flag("algo.advantage.is_correction_threshold", float, 2)
    parsed = parse_flags(words, flags, locations)
    spelled = {row.key: f"--{row.name(dotted)}" for row in rows if row.name(dotted)}
    defaults = defaults_of(name, new)
    defaults |= _of_release(defaults, rows, dotted, flags_of_release(name, release))
    defaults |= tables["program_defaults"].get(old, {})
    era = "0.11" if new else "0.7"
    settings = Settings(f"OpenRLHF {release}", name, parsed.given, defaults, spelled, era)
    done = convert(settings, rows, rules_of(name), lockstep_defaults)
    done.problems[:0] = parsed.problems
    done.remarks[:0] = [f"release: OpenRLHF {release} ({why})"]
    if old == "train_ppo" and name != old and not done.is_set("lambd"):
        done.remarks.append("lambd is 1.0, as in OpenRLHF 0.5; the default of earlier releases is 0.95")
    return done


def _of_release(
    keys: Iterable[str], rows: Iterable[KeyRow], dotted: bool, stored: Mapping[str, tuple[Any, str]]
) -> dict[str, Any]:
    """Returns the defaults of a release for the given keys."""
    names = {row.key: row.name(dotted) for row in rows}
    found = {key: stored.get(str(names[key]), (None, ""))[0] for key in keys if key in names}
    return {key: default for key, default in found.items() if default is not None}


def flags_of(rows: Iterable[KeyRow], dotted: bool) -> dict[str, Flag]:
    """Returns a mapping from the flag names of one style (dotted or flat) to the flags."""
    return {name: Flag(row.key, *FLAG_TYPES[row.type]) for row in rows if (name := row.name(dotted)) is not None}


def rules_of(program: str) -> tuple[KeyRule, ...]:
    return PPO_RULES if program == "train_ppo_ray" else offline_rules(program)


def defaults_of(program: str, dotted: bool) -> dict[str, Any]:
    """Returns the defaults of the dotted or flat flags. A flag that exists only in the other style has no default."""
    shared = {
        row.key: row.default
        for row in table_rows("openrlhf", program)
        if row.default is not None and (row.name(dotted) or row.key == "min_lr_ratio")
    }
    defaults: dict[str, Any] = load_tables("openrlhf")["defaults"][program]
    return shared | defaults.get("dotted" if dotted else "flat", defaults)
