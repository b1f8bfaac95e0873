"""Flags and rules that OpenRLHF's trainers share: optimizer, precision, adapters, folders, trackers, data names."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from lockstep.compat.openrlhf.options import Option, cannot, opt, without_effect
from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, other, part, same
from lockstep.compat.verl.shared import run_name

SPEED = "memory and speed, not results"
BALANCED = "over all tokens of an update; theirs is a mean over micro-batches"
_FILES = re.compile(r"\.(jsonl?|parquet|csv)$")

SHARED: list[Option] = [
    *without_effect(
        "i:zero_stage:ds.zero_stage i:zpg:ds.zpg b:adam_offload:ds.adam_offload b:overlap_comm:ds.overlap_comm "
        "s:grad_accum_dtype:ds.grad_accum_dtype b:deepcompile:ds.deepcompile i:local_rank:local_rank "
        "b:gradient_checkpointing_use_reentrant: b::model.gradient_checkpointing_reentrant "
        "b::actor.gradient_checkpointing_reentrant s::ds.experts_implementation b:disable_trace_cache:",
        f"{SPEED}: weights are sharded by FSDP2 where there are several devices; `lockstep plan` says whether it fits",
    ),
    *without_effect(
        "b:flash_attn: s:attn_implementation:ds.attn_implementation b:use_liger_kernel:ds.use_liger_kernel",
        f"{SPEED}: the device's kernels are taken (model.attention)",
    ),
    *without_effect(
        "i:ring_attn_size:ds.ring_attn_size i:ring_head_stride:ds.ring_attn_head_stride "
        "i:ds_tensor_parallel_size:ds.tensor_parallel_size",
        f"{SPEED}: a sequence and a layer stay whole on a device",
    ),
    *without_effect(
        "b:disable_fast_tokenizer:data.disable_fast_tokenizer b:use_ds_universal_ckpt:ds.use_universal_ckpt "
        "b:disable_ds_ckpt:ckpt.disable_ds b:save_hf_ckpt:ckpt.save_hf f:max_ckpt_mem:ckpt.max_mem "
        "i::data.dataloader_num_workers b:perf:",
        "plumbing: a checkpoint is safetensors, `lockstep export` makes a Hugging Face folder of any",
    ),
    *cannot("b:use_ms:use_ms", "models and rows come from folders or the Hugging Face hub, not from ModelScope"),
    *cannot("b:load_in_4bit:ds.load_in_4bit", "weights are not quantised"),
    opt("f", "aux_loss_coef", "model.aux_loss_coef", other("aux_loss_coef", "model.aux_loss_coef", BALANCED, 0.0)),
    opt("i", "lora_rank", "ds.lora.rank", part("lora_rank", "model.lora.rank", default=0)),
    opt(
        "i", "lora_alpha", "ds.lora.alpha", part("lora_alpha", "model.lora.alpha", default=16, note="16, ours 2 x rank")
    ),
    opt(
        "s*",
        "target_modules",
        "ds.lora.target_modules",
        part("target_modules", "model.lora.targets", default="all-linear"),
    ),
    opt("f", "lora_dropout", "ds.lora.dropout", part("lora_dropout", "model.lora.dropout", default=0.0)),
    opt("b", "bf16", None, part("bf16", "model.dtype", default=False, note="fp32 without it")),
    opt("s", None, "ds.param_dtype", part("ds.param_dtype", "model.dtype", default="bf16")),
    opt("i", "seed", "train.seed", same("seed", "run.seed", 42)),
    opt("b", "full_determinism", "train.full_determinism_enable", same("full_determinism", "run.deterministic", False)),
    opt("s", "save_path", "ckpt.output_dir", part("save_path", "run.folder", "run.name", default="./ckpt")),
    opt("s", "ckpt_path", "ckpt.path", part("ckpt_path", note="checkpoints are in the run's folder")),
    opt("i", "save_steps", "ckpt.save_steps", part("save_steps", "checkpoint.every", default=-1)),
    opt("i", "max_ckpt_num", "ckpt.max_num", same("max_ckpt_num", "checkpoint.keep_last", 3)),
    opt("b", "load_checkpoint", "ckpt.load_enable", part("load_checkpoint", "run.resume", default=False)),
    opt("i", "logging_steps", "logger.logging_steps", same("logging_steps", "log.every", 1)),
    opt(
        "s",
        "use_wandb",
        "logger.wandb.key",
        part("use_wandb", "log.track", note="the key is not stored: log in with `wandb login`"),
    ),
    *without_effect(
        "s:wandb_org:logger.wandb.org s:wandb_group:logger.wandb.group", "set WANDB_ENTITY and WANDB_RUN_GROUP"
    ),
    opt("s", "wandb_project", "logger.wandb.project", part("wandb_project", "log.project")),
    opt("s", "wandb_run_name", "logger.wandb.run_name", part("wandb_run_name", "run.name")),
    opt(
        "s",
        "use_tensorboard",
        "logger.tensorboard_dir",
        part("use_tensorboard", "log.track", note="written into the run's folder"),
    ),
    opt("b", "packing_samples", "ds.packing_samples", part("packing_samples", "batch.tokens", default=False)),
]


def run_rule(settings: Settings, done: Conversion) -> None:
    """The run's folder and name, trackers, checkpoints, precision and adapter."""
    path = PurePosixPath(settings["save_path"])
    done.write(
        "run.folder",
        str(path.parent),
        "save_path",
        note="the run's folder is the save path; the model is in its export/",
    )
    name = "wandb_run_name" if settings.says("wandb_run_name") else "save_path"
    done.write("run.name", run_name(settings[name] if name == "wandb_run_name" else path.name), name)
    if settings.says("ckpt_path"):
        done.ignore("ckpt_path", "checkpoints are in the run's folder")
    track = [name for name, key in (("wandb", "use_wandb"), ("tensorboard", "use_tensorboard")) if settings[key]]
    if track:
        done.write("log.track", track, *[key for key in ("use_wandb", "use_tensorboard") if settings[key]])
    if settings.says("wandb_project") or track:
        done.write("log.project", settings["wandb_project"] or f"openrlhf_{settings.program}", "wandb_project")
    if settings.whole("save_steps") > 0:
        done.write("checkpoint.every", settings.whole("save_steps"), "save_steps")
    elif settings.says("save_steps"):
        done.ignore("save_steps", "a checkpoint and an export at the end")
    resumes = bool(settings["load_checkpoint"])
    done.write("run.resume", "auto" if resumes else "never", "load_checkpoint")
    _precision(settings, done)
    _lora(settings, done)


def _precision(settings: Settings, done: Conversion) -> None:
    if "ds.param_dtype" in settings.defaults:
        done.write("model.dtype", str(settings["ds.param_dtype"]), "ds.param_dtype")
    else:
        done.write("model.dtype", "bf16" if settings["bf16"] else "fp32", "bf16")


def _lora(settings: Settings, done: Conversion) -> None:
    if not settings["lora_rank"]:
        return
    targets = settings["target_modules"]
    if isinstance(targets, list) and len(targets) == 1 and targets[0] == "all-linear":
        targets = "all-linear"
    done.write("model.lora.rank", settings.whole("lora_rank"), "lora_rank")
    done.write("model.lora.alpha", settings.number("lora_alpha"), "lora_alpha")
    done.write("model.lora.dropout", settings.number("lora_dropout"), "lora_dropout")
    done.write("model.lora.targets", targets, "target_modules")


def schedule_rule(settings: Settings, done: Conversion, prefix: str = "") -> None:
    """`cosine_with_min_lr` and its like; a dotted PPO command has one for each model."""
    key, share, floor = f"{prefix}lr_scheduler", f"{prefix}lr_warmup_ratio", f"{prefix}min_lr_ratio"
    known = {
        "cosine_with_min_lr": "cosine",
        "cosine": "cosine",
        "linear": "linear",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }
    kind = settings[key]
    if kind not in known:
        done.refuse(key, f"{kind} is not here", f"one of {', '.join(known)}")
        return
    done.write("optim.schedule", known[kind], key)
    done.write(
        "optim.warmup",
        settings.number(share),
        share,
        note="rises from lr / steps; theirs from 0" if settings.says(share) else "",
    )
    if kind == "cosine_with_min_lr":
        done.write("optim.min_lr_ratio", settings.number(floor), floor)


def sources(names: str, probs: str | None, split: str) -> list[dict[str, Any]]:
    """`a,b` with `0.4,0.6` as sources of ours. A name that is no file's is the hub's."""
    paths = [name.strip() for name in names.split(",") if name.strip()]
    weights = [float(weight) for weight in probs.split(",")] if probs else []
    found: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        local = path.startswith(("/", "./", "../", "~", "$")) or _FILES.search(path)
        source: dict[str, Any] = {"path": path if local else f"hub:{path}::{split}"}
        if len(paths) > 1 and weights:
            source["weight"] = weights[number]
        found.append(source)
    return found


def data_rule(settings: Settings, done: Conversion, to: str, names: str, probs: str, split: str) -> None:
    """`to` is data.train; the keys are those of the command."""
    if not settings[names]:
        done.refuse(names, "is not set", "name the rows")
        return
    if "@" in str(settings[names]):
        done.refuse(names, "a folder inside a data set (NAME@FOLDER) is not read", "name the files")
        return
    weights = settings[probs]
    count = len([name for name in settings[names].split(",") if name.strip()])
    try:
        if weights and count > 1 and len(weights.split(",")) != count:
            raise ValueError
        found = sources(settings[names], weights, settings[split])
    except ValueError:
        done.refuse(probs, f"{weights!r} is not a number for each of {count} data sets", "0.4,0.6")
        return
    if settings.says("max_samples"):
        for source in found:
            source["rows"] = settings.whole("max_samples")
        note = "the first of each data set; theirs are the first of the mixture" if count > 1 else ""
        done.write(
            to,
            found,
            names,
            *([probs] if settings.says(probs) else []),
            *([split] if settings.says(split) else []),
            "max_samples",
            note=note,
        )
    else:
        plain = [source["path"] if set(source) == {"path"} else source for source in found]
        done.write(
            to, plain, names, *([probs] if settings.says(probs) else []), *([split] if settings.says(split) else [])
        )
    if count == 1 and settings.says(probs):
        done.ignore(probs, "there is one data set")
    done.write("data.drop_last", True)


def template_rule(settings: Settings, done: Conversion) -> None:
    """How a prompt becomes text: the tokenizer's chat template, a format of its own, or as it is."""
    form = settings["input_template"]
    if settings["apply_chat_template"]:
        done.write("data.template", "auto", "apply_chat_template")
        if settings.says("input_template"):
            done.ignore("input_template", "apply_chat_template rules")
        return
    done.write("data.template", "none", "apply_chat_template")
    done.remarks.append("Plain rows open with the tokenizer's BOS token, where it has one; theirs do not.")
    if form and "{}" in form:
        done.write("data.prompt_format", form, "input_template")
    elif form:
        done.ignore("input_template", "has no {} for the prompt, and is then not used there either")
