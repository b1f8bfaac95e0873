"""A command of verl's as a conversion: which program, which version, which keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.compat.hydra import ParsedOverrides, parse_overrides
from lockstep.compat.settings import Setting, Settings
from lockstep.compat.table import Conversion, KeyRow, KeyRule, converted
from lockstep.compat.verl import online, online_keys, sft
from lockstep.compat.writing import own_defaults
from lockstep.errors import Refusal

# What can be started, by the name in a command or the last part of the module's.
PROGRAMS: dict[str, str] = {
    "main_ppo": "main_ppo",
    "main_dapo": "main_ppo",
    "sft": "sft",
    "fsdp_sft_trainer": "sft",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
}
ELSEWHERE: dict[str, str] = {
    "main_generation": "lockstep sample MODEL DATA OUT.parquet --n N --temperature T",
    "main_generation_server": "lockstep sample MODEL DATA OUT.parquet --n N --temperature T",
    "main_eval": "lockstep eval MODEL DATA",
    "model_merger": "lockstep migrate CHECKPOINT -o FOLDER",
}
_PLAIN_CONFIGS = (None, "ppo_trainer", "ppo_trainer.yaml", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
_ONLY_09 = (
    "reward.", "algorithm.rollout_correction", "trainer.v1.", "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.clip_grad", "actor_rollout_ref.actor.optim.betas", "trainer.use_legacy_worker_impl",
    "reward_model.use_reward_loop", "actor_rollout_ref.rollout.checkpoint_engine",
)  # fmt: skip


def convert_verl(program: str, words: Sequence[str], wheres: Sequence[str] = ()) -> Conversion:
    """`program` is a name of PROGRAMS; `wheres` says of each word where it stands."""
    name = program.rsplit(".", 1)[-1]
    if name in ELSEWHERE:
        raise Refusal.at(f"verl {name}", "is no training", f"use: {ELSEWHERE[name]}")
    if name not in PROGRAMS:
        raise Refusal.at(f"verl {name}", "is not known", f"one of {', '.join(PROGRAMS)}")
    trains_rows = PROGRAMS[name] == "sft"
    rows: list[KeyRow] = sft.ROWS if trains_rows else online_keys.ROWS
    rules: tuple[KeyRule, ...] = sft.RULES_IN_ORDER if trains_rows else online.RULES_IN_ORDER
    defaults = {row.key: row.default for row in rows if row.default is not None}
    said = parse_overrides(words, wheres, defaults)
    given = said.given if trains_rows else renamed(said.given)
    version = "0.9" if _is_09(name, given) else "0.4"
    defaults |= sft.DEFAULTS[version] if trains_rows else _online_defaults(version)
    settings = Settings(f"verl {version}", PROGRAMS[name], given, defaults)
    done = converted(settings, rows, rules, own_defaults)
    done.problems[:0] = said.problems + _config_problems(said)
    return done


def renamed(given: dict[str, Setting]) -> dict[str, Setting]:
    """0.9's names of keys in 0.4's words."""
    found = {}
    for key, value in given.items():
        old = next((name for name in online_keys.RENAMED if key == name or key.startswith(name)), None)
        found[key if old is None else online_keys.RENAMED[old] + key[len(old) :]] = value
    return found


def _is_09(program: str, given: dict[str, Setting]) -> bool:
    if program.startswith("sft_trainer"):
        return True
    return program != "fsdp_sft_trainer" and any(key.startswith(_ONLY_09) for key in given)


def _online_defaults(version: str) -> dict[str, Any]:
    names = {"trainer.project_name": "verl_examples", "trainer.experiment_name": "gsm8k", "trainer.total_epochs": 30}
    return {**names, "actor_rollout_ref.model.use_remove_padding": version == "0.9"}


def _config_problems(said: ParsedOverrides) -> list[Any]:
    if said.config in _PLAIN_CONFIGS:
        return []
    megatron = "megatron" in str(said.config)
    why = online_keys.MEGATRON if megatron else "is a configuration of your own, whose keys are not on the command line"
    remedy = "" if megatron else "print it whole with `--cfg job --resolve`, and give its keys as overrides"
    return Refusal.at(f"--config-name {said.config}", why, remedy).problems
