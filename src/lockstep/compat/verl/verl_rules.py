"""Conversion rules shared by verl's PPO and SFT trainers, and the rules for `fsdp_sft_trainer` and `sft_trainer`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lockstep.compat.key_table import Conversion, KeyRule
from lockstep.compat.verl.verl_megatron import is_megatron, layout_rule, megatron_optimizer, megatron_precision

# By default verl keeps all checkpoints; this value of `checkpoint.keep_last` has the same effect.
KEEP_ALL = 1_000_000
_TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard")
_CONSOLE = ("console", "file")


def files(value: Any) -> list[str]:
    """Returns one path or a list of paths as a list."""
    return [str(path) for path in (value if isinstance(value, list) else [value])]


def run_name(value: Any) -> str:
    """Returns a valid folder name: characters other than letters, digits, dot, dash and underscore become a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.")
    return name if re.match(r"[A-Za-z0-9]", name) else f"run{name}"


def first_set(done: Conversion, keys: Sequence[str]) -> str:
    """Returns the first of `keys` that the command sets. If the command sets none of `keys`, returns the first key with
    a default, or else the first key."""
    return next((key for key in keys if done.is_set(key)), next((key for key in keys if done[key]), keys[0]))


def trainer_rule(done: Conversion) -> None:
    """Converts name, folder, trackers, devices and length of the run."""
    done.write("run.name", run_name(done["trainer.experiment_name"]), "trainer.experiment_name")
    done.write_text("log.project", "trainer.project_name")
    if done.is_set("trainer.default_local_dir"):
        done.write_text("run.folder", "trainer.default_local_dir")
    else:
        done.write("run.folder", f"checkpoints/{done['trainer.project_name']}", "trainer.project_name")
    _trackers(done)
    if done["trainer.total_training_steps"] is not None:
        done.write_integer("run.steps", "trainer.total_training_steps")
        why = "total_training_steps sets the length of the run; verl stops after total_epochs, if that is earlier"
        done.ignore(why, "trainer.total_epochs")
    else:
        done.write_integer("run.epochs", "trainer.total_epochs")
    if done.integer("trainer.save_freq") > 0:
        done.write_integer("checkpoint.every", "trainer.save_freq")
    else:
        done.ignore(
            "with this value verl saves no checkpoint; lockstep saves a checkpoint and an export at the end",
            "trainer.save_freq",
        )
    if done["trainer.resume_mode"] == "resume_path":
        remedy = "`lockstep migrate CHECKPOINT -o FOLDER` converts its weights: name FOLDER as the model; set disable"
        done.refuse("trainer.resume_mode", "lockstep does not resume from verl's optimizer state", remedy)
    else:
        done.write("run.resume", done.lookup("trainer.resume_mode") or "never", "trainer.resume_mode")
    _devices(done)


def _trackers(done: Conversion) -> None:
    named = done["trainer.logger"]
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    unknown = [name for name in names if name not in (*_TRACKERS, *_CONSOLE)]
    note = f"lockstep does not write to {', '.join(unknown)}; metrics.jsonl in the run folder has every metric"
    done.write(
        "log.track", [name for name in names if name in _TRACKERS], "trainer.logger", note=note if unknown else ""
    )


def _devices(done: Conversion) -> None:
    device = done.lookup("trainer.device")
    if done.is_set("trainer.device") and device is not None:
        done.write("device", device, "trainer.device")
    for key, name in (("trainer.n_gpus_per_node", "devices"), ("trainer.nnodes", "nodes")):
        if not isinstance(done[key], int):
            done.refuse(key, f"{done[key]!r} is not a number of {name}", f"write a number: {key}=8")
            continue
        setattr(done, name, done[key])
        done.ignore(f"the number of {name} is not part of the recipe; the end of the report says what starts", key)


def keep_rule(done: Conversion, key: str) -> None:
    done.write("checkpoint.keep_last", KEEP_ALL if done[key] is None else done.integer(key), key)


def group_rule(done: Conversion, to: str, group: str) -> None:
    """Converts all keys `group.NAME` of the command to one mapping of NAME to value, for the recipe key `to`."""
    if keys := done.below(group):
        done.write(to, {key[len(group) + 1 :]: done[key] for key in keys}, *keys)


def lora_rule(done: Conversion, prefix: str) -> None:
    plain = bool(done[f"{prefix}.lora_rank"])
    rank, alpha = (f"{prefix}.lora{'_' if plain else '.'}{name}" for name in ("rank", "alpha"))
    modules, exclude = f"{prefix}.target_modules", f"{prefix}.exclude_modules"
    adapter, dropout = f"{prefix}.lora_adapter_path", f"{prefix}.lora.dropout"
    kind = f"{prefix}.lora.type"
    if done[adapter] is not None:
        done.write_text("model.lora.adapter", adapter)
        done.ignore("training starts from an adapter, whose config has this value", rank, alpha, modules, exclude)
        return
    if not done[rank]:
        return
    if done[exclude] is not None:
        done.write("model.lora.exclude", done[exclude], exclude)
    done.write_integer("model.lora.rank", rank)
    done.write_number("model.lora.alpha", alpha)
    targets = done[modules]
    if isinstance(targets, str) and targets != "all-linear":
        targets = [targets]
    done.write("model.lora.targets", targets if isinstance(targets, list) else str(targets), modules)
    if not plain and done[dropout]:
        done.write_number("model.lora.dropout", dropout)
    if str(done[kind]) == "dora":
        done.write("model.lora.dora", True, kind)
    elif done.is_set(kind):
        done.ignore("the layers of PEFT have separate adapters for each projection", kind)


def precision_rule(done: Conversion, dtypes: Sequence[str]) -> None:
    """Converts the precision: verl's FSDP has fp32 weights and bf16 compute, unless the model is loaded in 16 bits."""
    keys = [key for key in dtypes if done.is_set(key)]
    done.write("model.dtype", "bf16", *keys)
    done.write("model.master_weights", not any("16" in str(done[key]) for key in keys), *keys)


def schedule_rule(done: Conversion, group: str) -> None:
    old, names = f"{group}.lr_scheduler", ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    style = first_set(done, [f"{group}.{name}" for name in names])
    if done[old] is not None:
        done.ignore("fsdp_sft_trainer reads lr_scheduler", style)
        style = old
    if done.write_lookup("optim.schedule", style) is None:
        return
    if done[style] != "constant":
        floor = f"{group}.min_lr_ratio"
        done.write("optim.min_lr_ratio", done.number(floor) if done[floor] else 0.0, floor)
    steps = f"{group}.lr_warmup_steps"
    # In 0.9 the ratio applies instead of 0 steps.
    # The engines read 0 as "not set". SFT uses them since 0.6, PPO since 0.8.
    fewest = 1 if done.since("0.6" if done.settings.program == "sft" else "0.8") else 0
    if done[steps] is not None and done.is_set(steps) and done.integer(steps) >= fewest:
        _write_warmup(done, done.integer(steps), steps)
        return
    ratios = [f"{group}.lr_warmup_steps_ratio", f"{group}.warmup_steps_ratio"]
    set_here = [key for key in ratios if done.is_set(key)]
    ratio = next(iter([*set_here, *(key for key in ratios if done[key] is not None)]), ratios[0])
    _write_warmup(done, done.number(ratio), ratio)


def _write_warmup(done: Conversion, length: float, key: str) -> None:
    """Writes verl's warm-up: the first learning rate is 0. With a cosine schedule of 0.4 and 0.5 it is the minimum."""
    done.write("optim.warmup", length, key)
    if length:
        low = done.recipe.get("optim.min_lr_ratio") if done.since("0.4") and not done.since("0.6") else None
        done.write("optim.warmup_start", 0.0 if low is None else low.value, key)
        done.write("optim.warmup_rounding", "down", key)


# The optimizers of verl that lockstep has, by class name.
_OPTIMIZERS = {"AdamW": "adamw", "adamw": "adamw", "_AdamW": "adamw", "AdamW8bit": "adamw8bit"}
_OPTIMIZER_MODULES = ("torch.optim", "torchao.optim", "bitsandbytes.optim")


def optimizer_rule(done: Conversion, group: str) -> None:
    """Converts the optimizer class, which verl imports from a module."""
    name, module = f"{group}.optimizer", f"{group}.optimizer_impl"
    keys = [key for key in (name, module) if done.is_set(key) and done[key] is not None]
    for key, known in ((name, _OPTIMIZERS), (module, _OPTIMIZER_MODULES)):
        if key in keys and done[key] not in known:
            remedy = "use AdamW, or AdamW8bit of torchao.optim or bitsandbytes.optim"
            done.refuse(key, f"lockstep does not have the optimizer {done[key]}", remedy)
            return
    if keys:
        done.write("optim.name", _OPTIMIZERS[done[name] or "AdamW"], *keys)


def sft_data_rule(done: Conversion) -> None:
    done.write("method", "sft")
    if not done.require("data.train_files", "give the paths of the training files"):
        return
    done.write("data.train", files(done["data.train_files"]), "data.train_files")
    if done["data.val_files"] is not None:
        done.write("data.val", files(done["data.val_files"]), "data.val_files")
        if done.integer("trainer.test_freq") > 0:
            done.write_integer("val.every", "trainer.test_freq")
    done.write("data.drop_last", True)
    done.write_integer("data.max_tokens", "data.max_length")
    done.write_lookup("data.overlong", "data.truncation")
    _sft_columns(done)
    group_rule(done, "data.template_arguments", "data.apply_chat_template_kwargs")


def _sft_columns(done: Conversion) -> None:
    multiturn = bool(done["data.multiturn.enable"])
    if multiturn or done.settings.defaults.get("data.messages_key"):
        key = "data.multiturn.messages_key" if multiturn else "data.messages_key"
        done.write("data.shape", "messages", "data.multiturn.enable" if multiturn else key)
        done.write_text("data.messages_key", key)
        return
    done.write("data.shape", "prompt_response")
    for name in ("prompt", "response"):
        inner = done[f"data.{name}_dict_keys"]
        inner = inner if isinstance(inner, list) else [inner] if inner else []
        keys = (f"data.{name}_key", *([f"data.{name}_dict_keys"] if inner else []))
        done.write(f"data.{name}_key", ".".join([str(done[f"data.{name}_key"]), *map(str, inner)]), *keys)


def sft_model_rule(done: Conversion) -> None:
    key = "model.partial_pretrain" if done.is_set("model.partial_pretrain") else "model.path"
    if not done.require(key, "give the path of the model"):
        return
    done.write_text("model.path", key)
    lora_rule(done, "model")
    if is_megatron(done, "engine", "engine.strategy"):
        megatron_precision(done, "engine")
        megatron_optimizer(done, "optim")
        layout_rule(done, "engine", "optim")
        return
    precision_rule(done, ("model.fsdp_config.model_dtype", "engine.model_dtype"))
    done.write("optim.betas", done.numbers("optim.betas"), "optim.betas")
    done.write("optim.decay_all", True, "optim.weight_decay")
    optimizer_rule(done, "optim")
    schedule_rule(done, "optim")


def sft_batch_rule(done: Conversion) -> None:
    overall, per_device, most = "data.micro_batch_size", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"
    if done["data.use_dynamic_bsz"]:
        tokens = max(done.integer(most), done.integer("data.max_length"))
        done.write("batch.tokens", tokens, most, "data.use_dynamic_bsz")
        done.ignore("use_dynamic_bsz counts tokens instead of rows", per_device, overall)
        return
    done.write_integer(
        "batch.micro_batch_size", overall if done.is_set(overall) and not done.is_set(per_device) else per_device
    )


def sft_keep_rule(done: Conversion) -> None:
    keep_rule(done, "trainer.max_ckpt_to_keep")


SFT_RULES: tuple[KeyRule, ...] = (trainer_rule, sft_data_rule, sft_model_rule, sft_batch_rule, sft_keep_rule)
