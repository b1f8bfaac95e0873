"""The old names of recipe keys, and the names of the same settings in other trainers. An old key name works for one
release, with a warning. Stored recipes are converted. A name of another trainer is refused with the recipe key."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from lockstep.errors import Problem, RenamedKey

# Maps the old name of a recipe key to its new name. The old and the new key are in the same group.
RENAMED = {
    "run.stop_early": "run.early_stopping",
    "data.reader_limit": "data.reader_timeout",
    "batch.rows": "batch.micro_batch_size",
    "rollout.hand_over": "rollout.weight_sync",
    "rollout.truncated": "rollout.truncated_sampling",
    "rollout.function_limit": "rollout.function_timeout",
    "rollout.server.start_limit": "rollout.server.start_timeout",
    "rollout.server.answer_limit": "rollout.server.request_timeout",
    "algorithm.function_limit": "algorithm.function_timeout",
    "algorithm.cov_share": "algorithm.cov_ratio",
    "algorithm.kl.compared": "algorithm.kl.before_baseline",
    "algorithm.correction": "algorithm.rollout_correction",
    "algorithm.dynamic_sampling.rounds": "algorithm.dynamic_sampling.max_gen_batches",
    "algorithm.filtration": "algorithm.pf_ppo",
    "algorithm.overlong.cut": "algorithm.overlong.truncated_reward",
    "algorithm.overlong.skip": "algorithm.overlong.mask_truncated",
    "rm.centre": "rm.center_rewards_coef",
    "parallel.context": "parallel.context_parallel",
    "parallel.tensor": "parallel.tensor_parallel",
}
# Groups that contain a renamed key. The search for old names skips groups that are not listed here.
_GROUPS = {".".join(parts[:end]) for parts in (old.split(".") for old in RENAMED) for end in range(1, len(parts))}

# Key names of other trainers, mapped to recipe keys.
OTHER_TRAINERS = {
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "pretrain", "base_model"), "model.path"),
    **dict.fromkeys(("dataset", "dataset_name", "dataset_path", "train_file", "train_files"), "data.train"),
    **dict.fromkeys(("eval_dataset", "val_files", "validation_file"), "data.val"),
    **dict.fromkeys(("output_dir", "save_path", "default_local_dir"), "run.folder"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "mixed_precision"), "model.dtype"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_style"), "optim.schedule"),
    "logging_steps": "log.every",
    "learning_rate": "optim.lr",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "batch_size": "batch.rows_per_update",
    "train_batch_size": "batch.rows_per_update",
    "micro_batch_size": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.rows_per_update",
    "num_train_epochs": "run.epochs",
    "total_epochs": "run.epochs",
    "max_steps": "run.steps",
    "lora_rank": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "max_grad_norm": "optim.clip",
    "grad_clip": "optim.clip",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.best",
    "load_best_model_at_end": "checkpoint.best",
    "early_stopping_patience": "run.early_stopping.patience",
    "early_stopping_threshold": "run.early_stopping.min_delta",
    "eval_steps": "val.every",
    "report_to": "log.track",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "generate_max_len": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "adv_estimator": "algorithm.advantage",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.aggregation",
    "entropy_coeff": "algorithm.entropy",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "beta": "preference.beta, or online algorithm.kl.coefficient",
    "label_smoothing": "preference.label_smoothing",
    "f_divergence_type": "preference.divergence",
    "f_alpha_divergence_coef": "preference.alpha, which is 1 minus TRL's value",
    "rpo_alpha": "preference.nll",
    "nll_loss_coef": "preference.nll",
    "simpo_gamma": "preference.gamma",
    "cpo_alpha": "preference.nll",
    "loss_type": "preference.loss",
    "answer_key": "data.label_key, or offline data.response_key",
    "input_key": "data.prompt_key",
    "output_key": "data.response_key",
    "system_prompt": "data.system",
    "input_template": "data.prompt_format",
    "chat_template": "data.template",
    "chat_template_kwargs": "data.template_arguments",
    "apply_chat_template_kwargs": "data.template_arguments",
    "roles_to_train": "data.train_roles",
    "assistant_only_loss": "data.train_roles",
    "multiturn": "data.turns",
    "mask_history": "data.turns",
    "ref_model": "preference.reference",
    "ref_pretrain": "preference.reference",
    "precompute_ref_log_probs": "preference.precompute",
    "desirable_weight": "preference.desirable",
    "undesirable_weight": "preference.undesirable",
    "center_rewards_coefficient": "rm.center_rewards_coef",
    "placeholder_token": "prm.placeholder",
    "reward_tokens": "prm.tokens",
    "teacher_model": "distill.teacher",
    "kd_coef": "distill.coefficient",
    "lmbda": "distill.coefficient",
    "use_kl_loss": "algorithm.kl.where",
    "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "batch.prompts_per_update",
    "reward_funcs": "reward.function",
    "custom_reward_function": "reward.function",
}
# Keys of other trainers that lockstep does not have, and what to do instead.
ABSENT = {
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bnb_4bit_quant_type"),
        "use model.quantize=nf4 (4 bits) or model.quantize=int8 with an adapter: model.lora.rank=16",
    ),
    **dict.fromkeys(
        ("zero_stage", "stage", "deepspeed", "fsdp"),
        "weights, gradients and optimizer state are sharded over all processes; parallel.offload saves more memory",
    ),
}


def current_key(key: str) -> str:
    """Returns the dotted key with its new name."""
    old = _old_name(key)
    return key if old is None else RENAMED[old] + key[len(old) :]


def with_current_names(values: dict[str, Any], group: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """Returns nested values with the new names of keys, and warns about each old name.

    `group`: the dotted key of the group that contains the values. Also returns a problem for each key that is set by
    both its old and its new name.
    """
    found: list[str] = []
    renamed = _renamed(values, group, found)
    problems = [_both(old) for old in found if _contains(values, RENAMED[old], group)]
    for old in found:
        warn_renamed(old)
    return renamed, problems


def stored_recipe(values: Any) -> Any:
    """Renames the old keys in the stored recipe of a run, checkpoint or tape, and returns this recipe. A value that is
    not a dict is returned unchanged."""
    return _renamed(values, "", []) if isinstance(values, dict) else values


def both_names(keys: Iterable[str]) -> list[Problem]:
    """Returns one problem for each key whose old and new name are both among the given dotted keys."""
    given = list(keys)
    old_names = {old for key in given if (old := _old_name(key)) is not None}
    return [_both(old) for old in sorted(old_names) if any(_within(key, RENAMED[old]) for key in given)]


def warn_renamed(key: str) -> None:
    """Warns if the dotted key, or a group that contains it, is an old name."""
    if (old := _old_name(key)) is not None:
        note = f"{old} is now {RENAMED[old]}; the old name works until the next release"
        # All warnings are raised on this line, because Python shows a warning with the same text and line only once.
        warnings.warn(note, RenamedKey, stacklevel=1)


def new_attribute(name: str, fields: Iterable[str]) -> str | None:
    """Returns the current name of the field that had the old name `name`, or None if no field of `fields` had this
    name."""
    names = [new.rpartition(".")[2] for old, new in RENAMED.items() if old.rpartition(".")[2] == name]
    return next((new for new in names if new in fields), None)


def _renamed(values: dict[str, Any], group: str, found: list[str]) -> dict[str, Any]:
    """Returns the values with new key names and adds the old names to `found`. If both names of a key are set, the
    value of the new name is used."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{group}.{name}" if group else str(name)
        new = name
        if key in RENAMED:
            found.append(key)
            key = RENAMED[key]
            new = key.rpartition(".")[2]
            if new in values:
                continue
        result[new] = _renamed(value, key, found) if key in _GROUPS and isinstance(value, dict) else value
    return result


def _old_name(key: str) -> str | None:
    return next((old for old in RENAMED if _within(key, old)), None)


def _within(key: str, group: str) -> bool:
    return key == group or key.startswith(f"{group}.")


def _contains(values: Any, key: str, group: str) -> bool:
    for part in key.removeprefix(f"{group}.").split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _both(old: str) -> Problem:
    return Problem(
        RENAMED[old], f"both this key and its old name {old} are given", f"remove {old}", code="conflicting-keys"
    )
