"""Converts a command of verl to a recipe: finds the program and the verl version, applies the key table and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.compat.command_grammar import ParsedOverrides, parse_overrides
from lockstep.compat.conversion_output import lockstep_defaults, program_name
from lockstep.compat.key_table import Conversion, Setting, Settings, convert, load_tables, table_rows
from lockstep.compat.verl.verl_main_ppo import PPO_RULES
from lockstep.compat.verl.verl_rules import SFT_RULES
from lockstep.errors import Problem, Refusal

_RULES = {"main_ppo": PPO_RULES, "sft": SFT_RULES}
_CONFIGS = (None, "ppo_trainer", "ppo_trainer.yaml", "sft_trainer", "sft_trainer_engine", "dapo_trainer")


def convert_verl(program: str, words: Sequence[str], locations: Sequence[str] = ()) -> Conversion:
    """Converts `verl PROGRAM WORDS`. `locations` has the script line of each word."""
    tables = load_tables("verl")
    name = program_name("verl", program, tables)
    trainer = tables["programs"][name]
    rows = table_rows("verl", trainer)
    defaults = {row.key: row.default for row in rows if row.default is not None}
    parsed = parse_overrides(words, locations, defaults)
    given = renamed(parsed.given) if trainer == "main_ppo" else parsed.given
    version = "0.9" if _is_09(name, given) else "0.4"
    defaults |= tables["defaults"][trainer][version]
    done = convert(Settings(f"verl {version}", trainer, given, defaults), rows, _RULES[trainer], lockstep_defaults)
    done.problems[:0] = parsed.problems + _config_problems(parsed)
    return done


def renamed(given: dict[str, Setting]) -> dict[str, Setting]:
    """Renames keys of verl 0.9 to their names in verl 0.4."""
    names: dict[str, str] = load_tables("verl")["renamed"]
    settings = {}
    for key, value in given.items():
        new = next((name for name in names if key == name or key.startswith(name)), None)
        settings[key if new is None else names[new] + key[len(new) :]] = value
    return settings


def _is_09(program: str, given: dict[str, Setting]) -> bool:
    if program.startswith("sft_trainer"):
        return True
    new = tuple(load_tables("verl")["since_0.9"])
    return program != "fsdp_sft_trainer" and any(key.startswith(new) for key in given)


def _config_problems(parsed: ParsedOverrides) -> list[Problem]:
    if parsed.config in _CONFIGS:
        return []
    why: Any = "is a custom configuration file, and its keys are not on the command line"
    remedy = "print the configuration with `--cfg job --resolve`, and pass its keys as overrides"
    if "megatron" in str(parsed.config):
        why, remedy = "lockstep has no Megatron backend", "convert the FSDP variant of the script"
    return Refusal.at(f"--config-name {parsed.config}", why, remedy, code="unsupported-setting").problems
