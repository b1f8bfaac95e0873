"""What other projects call our metrics. verl's names are ours, so its logs need no table.

Steps are brought to one count: the first update is 1, and what is measured before it is at 0. transformers, TRL, verl,
DeepSpeed and OpenRLHF count so themselves; wandb's own `_step` starts at 0 (see `table.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from lockstep.errors import Problem, Refusal

# Foreign name, without a leading `train/` -> ours. `eval_` and `eval/` before a name lead to `val/`.
NAMES: dict[str, str] = {
    # transformers, TRL
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "epoch": "train/epoch",
    "step_time": "timing_s/step",
    # TRL's DPO, KTO and reward trainers
    "rewards/accuracies": "train/pair_accuracy",
    "rewards/margins": "train/margin",
    "rewards/chosen": "train/chosen",
    "rewards/rejected": "train/rejected",
    "accuracy": "train/pair_accuracy",
    "margin": "train/margin",
    # OpenRLHF's SFT, reward and DPO trainers; DeepSpeed
    "gpt_loss": "train/loss",
    "lr": "train/lr",
    "acc": "train/pair_accuracy",
    "chosen_reward": "train/chosen",
    "reject_reward": "train/rejected",
    # Megatron, MindSpeed
    "lm loss": "train/loss",
    "lm_loss": "train/loss",
    "grad norm": "train/grad_norm",
    "learning rate": "train/lr",
}

# MindSpeed-RL: GRPO and DAPO name their scores after themselves, so did PPO at first; now PPO has verl's names.
_METHODS = ("grpo", "dapo", "ppo")
_MINDSPEED_RL = {
    **{
        f"{method}/{what}/{how}": f"critic/{what}/{how}"
        for method in _METHODS
        for what in ("rewards", "score")
        for how in ("mean", "max", "min")
    },
    **{f"{method}/lr": "actor/lr" for method in _METHODS},
    "grad_norm": "actor/grad_norm",
    "timing/all": "timing_s/step",
    "timing/rollout": "timing_s/gen",
    "timing/update": "timing_s/update_actor",
    "timing/update_critic": "timing_s/update_critic",
}
_MARKS = ("timing/all", *(f"{method}/{what}/mean" for method in _METHODS for what in ("rewards", "score")))
_OF_MINDSPEED_RL = dict.fromkeys(_MARKS, _MINDSPEED_RL)

# A log with the first name is of one kind of training, where some names mean something else or something more.
KINDS: dict[str, dict[str, str]] = {
    # TRL's GRPO, RLOO and the like; OpenRLHF's PPO family
    "reward": {
        "reward": "critic/rewards/mean",
        "loss": "actor/loss",
        "epoch": "training/epoch",
        "policy_loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "actor_lr": "actor/lr",
        "actor_grad_norm": "actor/grad_norm",
        # Of a token, against the reference. Where the divergence is a part of the reward, ours is
        # `actor/reward_kl_penalty`: say so with a table of your own.
        "kl": "actor/kl",
        "entropy": "actor/entropy",
        # OpenRLHF's name for the mean entropy itself, before its weight.
        "entropy_loss": "actor/entropy",
        "ppo_kl": "actor/ppo_kl",
        "ppo_clip_ratio": "actor/pg_clipfrac",
        "clip_ratio/region_mean": "actor/pg_clipfrac",
        "critic_loss": "critic/vf_loss",
        "critic_lr": "critic/lr",
        "critic_grad_norm": "critic/grad_norm",
        "values": "critic/values/mean",
        "return": "critic/returns/mean",
        "response_length": "response_length/mean",
        "completions/mean_length": "response_length/mean",
        "completions/max_length": "response_length/max",
        "completions/min_length": "response_length/min",
        "completions/clipped_ratio": "response_length/clip_ratio",
        "truncated": "response_length/clip_ratio",
        "timing/generation": "timing_s/gen",
        "timing/step_total": "timing_s/step",
        # The short names behind OpenRLHF's bars
        "act_loss": "actor/pg_loss",
        "act_lr": "actor/lr",
        "gen_len": "response_length/mean",
    },
    # Older bars of OpenRLHF
    "rm": {
        "rm": "critic/rewards/mean",
        "pg": "actor/pg_loss",
        "kl": "actor/kl",
        "ret": "critic/returns/mean",
        "glen": "response_length/mean",
        "act_lr": "actor/lr",
        "cri": "critic/vf_loss",
        "vals": "critic/values/mean",
        "cri_lr": "critic/lr",
    },
    # OpenRLHF's KTO and process reward trainers
    "kto_loss": {"kto_loss": "train/loss", "kl": "train/kl"},
    "prm_loss": {"prm_loss": "train/loss", "acc": "train/step_accuracy"},
    **_OF_MINDSPEED_RL,
    # TRL's KTO trainer
    "logps/KL": {"kl": "train/kl", "rewards/accuracies": "train/label_accuracy"},
}

_EVAL = ("eval_", "eval/")


def aligned(written: Iterable[str], own: bool, names: Mapping[str, str]) -> dict[str, str]:
    """Our name -> the log's, for each metric. `own`: the log speaks our names already; `names` go before any table.

    Of two that would get the same name the first has it, and the other keeps its own.
    """
    listed = list(written)
    table = {} if own else _table(listed)
    ours = {name: names.get(name) or _translated(name, table) for name in listed}
    found: dict[str, str] = {}
    # Names that stay as they are come first: nothing may be moved onto them.
    for name in sorted(listed, key=lambda name: ours[name] != name):
        target = ours[name] if ours[name] not in found else name
        while target in found:
            target += " (again)"
        found[target] = name
    return {ours_: found[ours_] for ours_ in sorted(found, key=lambda target: listed.index(found[target]))}


def read_names(path: str | Path) -> dict[str, str]:
    """A table of your own, foreign name -> ours, from YAML: `my_loss: train/loss`, a line for each."""
    where = str(path)
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal.at(where, f"cannot be read: {error.strerror}", "name a YAML file of names") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise Refusal.at(where, f"not YAML: {' '.join(str(error).split())}", "a line is `their_name: ours`") from None
    if not isinstance(table, dict) or not table:
        raise Refusal.at(where, "holds no table of names", "write lines like `their_name: train/loss`")
    problems = [
        Problem(f"{where}, {name!r}", f"is given as {ours!r}", "both sides are names; put them in quotes")
        for name, ours in table.items()
        if not (isinstance(name, str) and isinstance(ours, str) and name and ours)
    ]
    if problems:
        raise Refusal(problems)
    return table


def known_name(flat: str) -> str | None:
    """Our name of a metric whose `/` were written as `_`, as in the name of a file; None for one that no table has."""
    tables = (NAMES, *KINDS.values())
    ours = {name.replace("/", "_"): name for table in tables for name in table.values()}
    theirs = {name.replace("/", "_"): name for table in tables for name in table}
    if flat in ours:
        return ours[flat]
    for prefix, group in (("", ""), ("train_", "train/"), ("eval_", "eval/"), ("val_", "eval/")):
        if flat.startswith(prefix) and (name := theirs.get(flat.removeprefix(prefix))):
            return next(iter(aligned([group + name], False, {})))
    return None


def _table(listed: list[str]) -> dict[str, str]:
    bare = {name.removeprefix("train/") for name in listed}
    table = dict(NAMES)
    for mark, kind in KINDS.items():
        if mark in bare:
            table |= kind
    return table


def _translated(name: str, table: Mapping[str, str]) -> str:
    for prefix in _EVAL:
        if name.startswith(prefix):
            ours = table.get(name.removeprefix(prefix), "")
            return "val/" + ours.removeprefix("train/") if ours.startswith("train/") else name
    return table.get(name.removeprefix("train/"), name)
