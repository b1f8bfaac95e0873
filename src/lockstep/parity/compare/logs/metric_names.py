"""Maps metric names of other frameworks to verl's names, which lockstep uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from lockstep.errors import Problem, Refusal
from lockstep.parity.compare.logs.table_logs import VALUE

# Maps a metric name in the log (without a leading `train/`) to lockstep's metric name. `eval_` and `eval/` before a
# name become `val/`.
NAMES: dict[str, str] = {
    # transformers, TRL
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "epoch": "train/epoch",
    "step_time": "timing_s/step",
    # metric names of TRL's DPO, KTO and reward trainers
    "rewards/accuracies": "train/pair_accuracy",
    "rewards/margins": "train/margin",
    "rewards/chosen": "train/chosen",
    "rewards/rejected": "train/rejected",
    "accuracy": "train/pair_accuracy",
    "margin": "train/margin",
    # metric names of OpenRLHF's SFT, reward and DPO trainers, and of DeepSpeed
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

# MindSpeed-RL: the metric names of scores start with the method (GRPO, DAPO, and PPO of older versions). Newer versions
# of PPO use verl's names.
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
_MINDSPEED_RL_MARKS = ("timing/all", *(f"{method}/{what}/mean" for method in _METHODS for what in ("rewards", "score")))


# Maps the name of a metric to a table like NAMES. If a log contains this metric, the entries of its table have priority
# over NAMES.
KINDS: dict[str, dict[str, str]] = {
    # metric names of TRL's online trainers such as GRPO and RLOO, and of OpenRLHF's PPO family
    "reward": {
        "reward": "critic/rewards/mean",
        "loss": "actor/loss",
        "epoch": "training/epoch",
        "policy_loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "actor_lr": "actor/lr",
        "actor_grad_norm": "actor/grad_norm",
        # The mean KL per token against the reference model. If the KL penalty is part of the reward, map `kl` to
        # `actor/reward_kl_penalty` with --names.
        "kl": "actor/kl",
        "entropy": "actor/entropy",
        # OpenRLHF's name for the mean entropy, which is not multiplied by the entropy coefficient.
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
        # OpenRLHF's progress bars
        "act_loss": "actor/pg_loss",
        "act_lr": "actor/lr",
        "gen_len": "response_length/mean",
    },
    # Names in the progress bars of older OpenRLHF versions
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
    # metric names of OpenRLHF's KTO and process reward trainers
    "kto_loss": {"kto_loss": "train/loss", "kl": "train/kl"},
    "prm_loss": {"prm_loss": "train/loss", "acc": "train/step_accuracy"},
    **dict.fromkeys(_MINDSPEED_RL_MARKS, _MINDSPEED_RL),
    # TRL's KTO trainer
    "logps/KL": {"kl": "train/kl", "rewards/accuracies": "train/label_accuracy"},
}

_EVAL = ("eval_", "eval/")
_TAG = re.compile(r"-tag-(.+?)(?: ?\(\d+\))?$")


def map_names(written: Iterable[str], verl_names: bool, names: Mapping[str, str]) -> dict[str, str]:
    """Returns a mapping from lockstep's metric names to the names in the log. `names` overrides the built-in tables. No
    table is used if `verl_names` is true, because lockstep uses verl's names.

    If two metrics of the log map to one name, the first metric gets that name, and the second keeps its name in the
    log.
    """
    listed = list(written)
    table = {} if verl_names else _table(listed)
    mapped = {name: names.get(name) or _translated(name, table) for name in listed}
    found: dict[str, str] = {}
    # Metrics that keep their name are added first, so that no renamed metric takes their name.
    for name in sorted(listed, key=lambda name: mapped[name] != name):
        target = mapped[name] if mapped[name] not in found else name
        while target in found:
            target += " (again)"
        found[target] = name
    return {target: found[target] for target in sorted(found, key=lambda target: listed.index(found[target]))}


def read_names(path: str | Path) -> dict[str, str]:
    """Reads a YAML file of names for --names: one line `name in the log: lockstep's name` per metric."""
    where = str(path)
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal.at(
            where, f"cannot be read: {error.strerror}", "give the path of a YAML file of names", code="unreadable"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        why = f"not YAML: {' '.join(str(error).split())}"
        raise Refusal.at(where, why, "write lines like `their_name: train/loss`", code="invalid-yaml") from None
    if not isinstance(table, dict) or not table:
        raise Refusal.at(where, "contains no names", "write lines like `their_name: train/loss`", code="empty-value")
    problems = [
        Problem(
            f"{where}, {name!r}",
            f"has the value {target!r}",
            "a line must map a name to a name; put both names in quotes",
            code="wrong-type",
        )
        for name, target in table.items()
        if not (isinstance(name, str) and isinstance(target, str) and name and target)
    ]
    if problems:
        raise Refusal(problems)
    return table


def tensorboard_csv_names(path: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Returns `names` with an entry for the column `Value` of a tensorboard csv export. If `names` has no entry for
    this column, the metric name comes from the file name."""
    if VALUE in names:
        return dict(names)
    tag = _TAG.search(path.stem)
    metric = name_of_file(tag.group(1) if tag else path.stem) or (tag.group(1) if tag else None)
    if metric is None:
        raise Refusal.at(
            path,
            f"a csv export of tensorboard, which does not contain the metric name of its column {VALUE}",
            "set the metric name with --value (for example --value train/loss), or name the file as tensorboard does: "
            "run-X-tag-NAME.csv",
            code="unnamed-metric",
        )
    return {**names, VALUE: metric}


def name_of_file(flat: str) -> str | None:
    """Returns the known metric name that equals `flat` after `/` is replaced by `_`, or None if no table contains such
    a name."""
    tables = (NAMES, *KINDS.values())
    here = {name.replace("/", "_"): name for table in tables for name in table.values()}
    theirs = {name.replace("/", "_"): name for table in tables for name in table}
    if flat in here:
        return here[flat]
    for prefix, group in (("", ""), ("train_", "train/"), ("eval_", "eval/"), ("val_", "eval/")):
        if flat.startswith(prefix) and (name := theirs.get(flat.removeprefix(prefix))):
            return next(iter(map_names([group + name], False, {})))
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
            target = table.get(name.removeprefix(prefix), "")
            return "val/" + target.removeprefix("train/") if target.startswith("train/") else name
    return table.get(name.removeprefix("train/"), name)
