"""What the tables of verl's two trainers share: values, and rules about devices, names and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRow, idle, part, refused

# Ours is a limit; theirs is none.
KEEP_ALL = 1_000_000
_TRACKERS = ("wandb", "swanlab", "mlflow", "tensorboard")
_CONSOLE = ("console", "file")

DEVICES = {"cuda", "npu", "cpu"}


def files(value: Any) -> list[str]:
    """One path or a list of them, with the home folder filled in."""
    paths = value if isinstance(value, list) else [value]
    return [str(path) for path in paths]


def run_name(value: Any) -> str:
    """A name that can be a folder's: what is not a letter, digit, dot, dash or underscore becomes a dash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-.")
    return name if re.match(r"[A-Za-z0-9]", name) else f"run{name}"


TRAINER_ROWS: list[KeyRow] = [
    part("trainer.project_name", "log.project", "run.folder"),
    part("trainer.experiment_name", "run.name", note="letters, digits, dots, dashes and underscores are kept"),
    part("trainer.default_local_dir", "run.folder", note="the run's folder is in it, by the name of the experiment"),
    part("trainer.logger", "log.track", default=["console", "wandb"]),
    part("trainer.total_epochs", "run.epochs"),
    part("trainer.total_training_steps", "run.steps", note="steps win over epochs"),
    part("trainer.save_freq", "checkpoint.every", default=-1, note="-1: a checkpoint at the end only"),
    part("trainer.nnodes", note="processes are started by torchrun; the report says how", default=1),
    part("trainer.n_gpus_per_node", note="processes are started by torchrun; the report says how", default=8),
    part("trainer.resume_mode", "run.resume", default="auto"),
    part("trainer.device", "device", default="cuda"),
    *idle("trainer.resume_from_path", "read with resume_mode=resume_path only"),
    *refused("trainer.default_hdfs_dir", "checkpoints go to local folders", off=(None, "null", "")),
    *idle(
        "trainer.balance_batch trainer.use_legacy_worker_impl trainer.esi_redundant_time", "work is always shared out"
    ),
    *idle(
        "trainer.ray_wait_register_center_timeout trainer.del_local_ckpt_after_load ray_init.* ray_kwargs.* "
        "transfer_queue.*",
        "there is no Ray here: torchrun starts the processes",
    ),
    *idle(
        "global_profiler.* trainer.profile_steps trainer.controller_nsight_options.* trainer.worker_nsight_options.*",
        "times of each phase are always measured: metrics timing_s/*",
    ),
]


def trainer_rule(settings: Settings, done: Conversion) -> None:
    """Names, folders, trackers, devices, the end of the run."""
    done.write("run.name", run_name(settings["trainer.experiment_name"]), "trainer.experiment_name")
    done.write("log.project", str(settings["trainer.project_name"]), "trainer.project_name")
    if settings.says("trainer.default_local_dir"):
        done.write("run.folder", str(settings["trainer.default_local_dir"]), "trainer.default_local_dir")
    else:
        done.write("run.folder", f"checkpoints/{settings['trainer.project_name']}", "trainer.project_name")
    _trackers(settings, done)
    steps, epochs = settings["trainer.total_training_steps"], settings["trainer.total_epochs"]
    if steps is not None:
        done.write("run.steps", int(steps), "trainer.total_training_steps")
        if settings.says("trainer.total_epochs"):
            done.ignore("trainer.total_epochs", "total_training_steps ends the run; epochs follow one another")
    else:
        done.write("run.epochs", int(epochs), "trainer.total_epochs")
    if settings.whole("trainer.save_freq") > 0:
        done.write("checkpoint.every", settings.whole("trainer.save_freq"), "trainer.save_freq")
    elif settings.says("trainer.save_freq"):
        done.ignore("trainer.save_freq", "never there; here a checkpoint and an export at the end")
    resume = settings["trainer.resume_mode"]
    if resume not in ("auto", "disable"):
        done.refuse("trainer.resume_mode", f"{resume}: a run goes on from its own folder", "auto, or disable")
    done.write("run.resume", "auto" if resume == "auto" else "never", "trainer.resume_mode")
    _devices(settings, done)


def _trackers(settings: Settings, done: Conversion) -> None:
    named = settings["trainer.logger"]
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    unknown = [name for name in names if name not in (*_TRACKERS, *_CONSOLE)]
    if unknown:
        note = f"{', '.join(unknown)} is not written to; metrics.jsonl in the run's folder holds every number"
        done.write("log.track", [n for n in names if n in _TRACKERS], "trainer.logger", note=note)
    else:
        done.write("log.track", [n for n in names if n in _TRACKERS], "trainer.logger")


def _devices(settings: Settings, done: Conversion) -> None:
    device = settings["trainer.device"]
    if device not in DEVICES:
        done.refuse("trainer.device", f"{device!r} is no device here", f"one of {', '.join(sorted(DEVICES))}")
    if settings.says("trainer.device"):
        done.write("device", device, "trainer.device")
    for key, name in (("trainer.n_gpus_per_node", "devices"), ("trainer.nnodes", "nodes")):
        value = settings[key]
        if not isinstance(value, int):
            done.refuse(key, f"{value!r} is not a number of {name}", f"write it: {key}=8")
            continue
        setattr(done, name, value)
        done.ignore(key, f"the number of {name} is torchrun's: see the end of the report")


def checkpoint_rows(*limits: str) -> list[KeyRow]:
    return [part(key, "checkpoint.keep_last", note="all are kept where nothing is said") for key in limits]


def keep_rule(settings: Settings, done: Conversion, key: str) -> None:
    kept = settings[key]
    done.write("checkpoint.keep_last", KEEP_ALL if kept is None else int(kept), key)


def template_rule(settings: Settings, done: Conversion) -> None:
    """Arguments of the chat template, each a key of its own there."""
    group = "data.apply_chat_template_kwargs"
    given = settings.below(group)
    if given:
        done.write("data.template_arguments", {key[len(group) + 1 :]: settings[key] for key in given}, *given)


def lora_rows(prefix: str) -> list[KeyRow]:
    return [
        part(f"{prefix}.lora_rank", "model.lora.rank", default=0, note="0 trains all weights"),
        part(f"{prefix}.lora_alpha", "model.lora.alpha", default=16, note="16 there, 2 x rank here"),
        part(f"{prefix}.target_modules", "model.lora.targets", default="all-linear"),
        part(f"{prefix}.lora.rank", "model.lora.rank", default=0),
        part(f"{prefix}.lora.alpha", "model.lora.alpha", default=32),
        part(f"{prefix}.lora.dropout", "model.lora.dropout", default=0.0),
        *idle(
            f"{prefix}.lora.lora_A_init_method {prefix}.lora.lora_B_init_method {prefix}.lora.dropout_position "
            f"{prefix}.lora.merge {prefix}.lora.type {prefix}.lora.dtype",
            "the adapter is PEFT's: A drawn evenly (kaiming), B zero",
        ),
        part(f"{prefix}.exclude_modules", "model.lora.exclude", note="names, or a regular expression"),
        part(f"{prefix}.lora_adapter_path", "model.lora.adapter", note="rank, alpha and layers are the adapter's own"),
    ]


def lora_rule(settings: Settings, done: Conversion, prefix: str) -> None:
    plain = bool(settings[f"{prefix}.lora_rank"])
    rank, alpha = (
        (f"{prefix}.lora_rank", f"{prefix}.lora_alpha") if plain else (f"{prefix}.lora.rank", f"{prefix}.lora.alpha")
    )
    adapter, exclude = f"{prefix}.lora_adapter_path", f"{prefix}.exclude_modules"
    if settings[adapter] is not None:
        done.write("model.lora.adapter", str(settings[adapter]), adapter)
        for key in (rank, alpha, f"{prefix}.target_modules", exclude):
            if settings.says(key):
                done.ignore(key, "the adapter that training starts from says it")
        return
    if not settings[rank]:
        return
    if settings[exclude] is not None:
        done.write("model.lora.exclude", settings[exclude], exclude)
    targets = settings[f"{prefix}.target_modules"]
    done.write("model.lora.rank", settings.whole(rank), rank)
    done.write("model.lora.alpha", settings.number(alpha), alpha)
    done.write("model.lora.targets", targets if isinstance(targets, list) else str(targets), f"{prefix}.target_modules")
    if not plain and settings[f"{prefix}.lora.dropout"]:
        done.write("model.lora.dropout", settings.number(f"{prefix}.lora.dropout"), f"{prefix}.lora.dropout")
    if isinstance(targets, str) and targets != "all-linear":
        done.write("model.lora.targets", [targets], f"{prefix}.target_modules")


def precision_rule(settings: Settings, done: Conversion, dtypes: Sequence[str]) -> None:
    """FSDP keeps fp32 weights and computes in bf16, unless the model itself is loaded in bf16."""
    said = [key for key in dtypes if settings.says(key)]
    low = any("16" in str(settings[key]) for key in said)
    done.write("model.dtype", "bf16", *said)
    done.write("model.master_weights", not low, *said)
