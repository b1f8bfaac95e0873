"""Converts a command of verl to a recipe: finds the program and the verl version, applies the key table and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.compat.command_grammar import ParsedOverrides, parse_overrides
from lockstep.compat.conversion_output import lockstep_defaults, program_name
from lockstep.compat.key_table import Conversion, Setting, Settings, convert, load_tables, table_rows
from lockstep.compat.verl.verl_main_ppo import PPO_RULES
from lockstep.compat.verl.verl_offload import sft_offload_rule
from lockstep.compat.verl.verl_rules import SFT_RULES
from lockstep.errors import Problem, Refusal

_RULES = {"main_ppo": PPO_RULES, "sft": (*SFT_RULES, sft_offload_rule)}
_MEGATRON = ("lockstep has no Megatron backend", "convert the FSDP variant of the script")
_CONFIGS = (None, "ppo_trainer", "ppo_trainer.yaml", "sft_trainer", "sft_trainer_engine", "dapo_trainer")


def convert_verl(program: str, words: Sequence[str], locations: Sequence[str] = ()) -> Conversion:
    """Converts `verl PROGRAM WORDS`. `locations` has the script line of each word."""
    tables = load_tables("verl")
    name = program_name("verl", program, tables)
    trainer = tables["programs"][name]
    rows = table_rows("verl", trainer)
    defaults = {row.key: row.default for row in rows if row.default is not None}
    base, problems = config_settings(parse_overrides(words))
    parsed = parse_overrides(words, locations, defaults, base)
    given = renamed(parsed.given) if trainer == "main_ppo" else parsed.given
    version = "0.9" if _is_09(name, given) else "0.4"
    defaults |= tables["defaults"][trainer][version]
    done = convert(Settings(f"verl {version}", trainer, given, defaults), rows, _RULES[trainer], lockstep_defaults)
    done.problems[:0] = parsed.problems + problems
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


def config_settings(parsed: ParsedOverrides) -> tuple[dict[str, Setting], list[Problem]]:
    """Returns the settings of the configuration file that the command names, unless it is one of verl's own."""
    if parsed.config in _CONFIGS:
        return {}, []
    where, name = f"--config-name {parsed.config}", str(parsed.config)
    file = Path(parsed.folder or ".") / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not file.is_file():
        why = "is a custom configuration file, and its keys are not on the command line"
        remedy = f"convert where {file} exists, or print the configuration with `--cfg job --resolve` and pass its keys"
        if "megatron" in name:
            why, remedy = _MEGATRON
        return {}, Refusal.at(where, why, remedy, code="unsupported-setting").problems
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = f"{file} is not YAML: {' '.join(str(error).split())}"
        return {}, Refusal.at(where, why, "fix the file", code="invalid-yaml").problems
    if not isinstance(values, dict):
        return {}, Refusal.at(where, f"{file} has no keys", "fix the file", code="invalid-yaml").problems
    problems = [problem for entry in values.pop("defaults", []) for problem in _default_problems(entry, where)]
    values.pop("hydra", None)
    return {key: Setting(value, file.name) for key, value in _flat(values).items()}, problems


def _default_problems(entry: Any, where: str) -> list[Problem]:
    """Returns a problem if a configuration file includes a file that is not a default of verl's trainer."""
    if entry in (*_CONFIGS, "_self_"):
        return []
    why, remedy = f"includes {entry}", "print the configuration with `--cfg job --resolve`, and pass its keys"
    if "megatron" in str(entry):
        why, remedy = _MEGATRON
    return Refusal.at(where, why, remedy, code="unsupported-setting").problems


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat
