"""Rules that all OpenRLHF trainers share, and rules of its offline trainers (SFT, DPO, KTO, RM, PRM, distillation)."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from lockstep.compat.key_table import Conversion, KeyRule
from lockstep.compat.offload_keys import frozen_offload_rule, offload_rule, uses_lora
from lockstep.compat.verl.verl_rules import run_name

_FILES = re.compile(r"\.(jsonl?|parquet|csv)$")
_OVERLONG = "lockstep truncates the end of longer answers; OpenRLHF drops rows if the prompt alone fills max_len"


def is_dotted_command(done: Conversion) -> bool:
    return done.version == "0.11"


def run_rule(done: Conversion) -> None:
    """Converts folder and name of the run, trackers, checkpoints, precision and adapter."""
    path = PurePosixPath(done["save_path"])
    note = "the run folder is the save path; the trained model is in its subfolder export/"
    done.write("run.folder", str(path.parent), "save_path", note=note)
    if done.is_set("wandb_run_name"):
        done.write("run.name", run_name(done["wandb_run_name"]), "wandb_run_name")
    else:
        done.write("run.name", run_name(path.name), "save_path")
    done.ignore("checkpoints are in the run folder", "ckpt_path")
    track = {"use_wandb": "wandb", "use_tensorboard": "tensorboard"}
    keys = [key for key in track if done[key]]
    if keys:
        done.write("log.track", [track[key] for key in keys], *keys)
    if done.is_set("wandb_project") or keys:
        project = done["wandb_project"] or f"openrlhf_{done.settings.program}"
        done.write("log.project", project, "wandb_project")
    if done.integer("save_steps") > 0:
        done.write_integer("checkpoint.every", "save_steps")
    else:
        done.ignore("lockstep saves a checkpoint and an export at the end", "save_steps")
    done.write("run.resume", "auto" if done["load_checkpoint"] else "never", "load_checkpoint")
    if is_dotted_command(done):
        done.write_text("model.dtype", "ds.param_dtype")
    else:
        done.write("model.dtype", "bf16" if done["bf16"] else "fp32", "bf16")
    if done["lora_rank"]:
        done.write_integer("model.lora.rank", "lora_rank")
        done.write_number("model.lora.alpha", "lora_alpha")
        done.write_number("model.lora.dropout", "lora_dropout")
        targets = done["target_modules"]
        done.write("model.lora.targets", "all-linear" if targets == ["all-linear"] else targets, "target_modules")


def schedule_rule(done: Conversion) -> None:
    if done.write_lookup("optim.schedule", "lr_scheduler") is None:
        return
    share = done.number("lr_warmup_ratio")
    if done["lr_scheduler"] == "constant":
        done.ignore("the scheduler constant has no warmup; constant_with_warmup has one", "lr_warmup_ratio")
        share = 0.0
    else:
        done.write("optim.warmup", share, "lr_warmup_ratio")
    if share:
        done.write("optim.warmup_start", 0.0, "lr_warmup_ratio")
        done.write("optim.warmup_rounding", "up", "lr_warmup_ratio")
    if done["lr_scheduler"] == "cosine_with_min_lr":
        done.write_number("optim.min_lr_ratio", "min_lr_ratio")


def optimizer_rule(done: Conversion, prefix: str, adam_lr: str) -> None:
    """Converts the optimizer. With Muon, OpenRLHF has a learning rate of the matrices, and one of Adam for the other
    parameters."""
    kind, rate, momentum = f"{prefix}optim", f"{prefix}muon.lr", f"{prefix}muon.momentum"
    if not is_dotted_command(done) or done.write_lookup("optim.name", kind) != "muon":
        done.write_number("optim.lr", adam_lr)
        done.ignore("OpenRLHF reads this flag only with the muon optimizer", rate, momentum)
        return
    if done["max_norm"]:
        why = "with muon, OpenRLHF clips the orthogonalised update, and lockstep clips the gradient before it"
        done.refuse("max_norm", why, "set max_norm to 0")
        return
    done.write("optim.clip", None, "max_norm")
    done.write_number("optim.lr", rate)
    done.write_number("optim.momentum", momentum)
    done.write("optim.adjust_lr", "original", kind)
    note = "as in OpenRLHF with muon, weight decay also applies to biases and norms"
    done.write("optim.decay_all", True, kind, note=note)
    if not done["lora_rank"]:  # an adapter has matrices only
        # DeepSpeed uses Adam for vectors, and for matrices whose names contain `embed` or `lm_head`.
        group = {"match": "embed|lm_head|norm|bias", "name": "adam", "lr": done.number(adam_lr)}
        done.write("optim.groups", [group], adam_lr)


def dataset_names(names: Any) -> list[str]:
    return [name.strip() for name in str(names).split(",") if name.strip()]


def sources(names: str, probs: str | None, split: str) -> list[dict[str, Any]]:
    """Returns data sources from names such as `a,b` and weights such as `0.4,0.6`. A name that is no file is a hub data
    set."""
    paths = dataset_names(names)
    weights = [float(weight) for weight in probs.split(",")] if probs else []
    found: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        local = path.startswith(("/", "./", "../", "~", "$")) or _FILES.search(path)
        source: dict[str, Any] = {"path": path if local else f"hub:{path}::{split}"}
        if len(paths) > 1 and weights:
            source["weight"] = weights[number]
        found.append(source)
    return found


def source_paths(done: Conversion, names: str, split: str) -> list[str]:
    return [source["path"] for source in sources(done[names], None, done[split])]


def data_rule(done: Conversion, names: str, probs: str, split: str) -> None:
    """Converts the training data. `names`, `probs` and `split` are the flags that hold data sets, weights and split."""
    if not done.require(names, "give the training data"):
        return
    if "@" in str(done[names]):
        done.refuse(names, "lockstep does not read a folder inside a data set (NAME@FOLDER)", "give file paths")
        return
    weights, count = done[probs], len(dataset_names(done[names]))
    try:
        if weights and count > 1 and len(weights.split(",")) != count:
            raise ValueError
        found = sources(done[names], weights, done[split])
    except ValueError:
        done.refuse(probs, f"{weights!r}: give one number for each of {count} data sets", "write for example 0.4,0.6")
        return
    keys, note = [names, *(key for key in (probs, split) if done.is_set(key))], ""
    if done.is_set("max_samples"):
        keys.append("max_samples")
        found = [{**source, "rows": done.integer("max_samples")} for source in found]
        if count > 1:
            note = "lockstep uses the first rows of each data set; OpenRLHF uses the first rows of the mixture"
    done.write(
        "data.train", [source["path"] if set(source) == {"path"} else source for source in found], *keys, note=note
    )
    if count == 1:
        done.ignore("there is only one data set", probs)
    done.write("data.drop_last", True)


def template_rule(done: Conversion) -> None:
    """Converts how a prompt becomes text: by the tokenizer's chat template, a format string, or unchanged."""
    form = done["input_template"]
    if done["apply_chat_template"]:
        done.write("data.template", "auto", "apply_chat_template")
        done.ignore("apply_chat_template takes precedence", "input_template")
        return
    done.write("data.template", "none", "apply_chat_template")
    done.remarks.append("lockstep starts plain rows with the tokenizer's BOS token, if it has one; OpenRLHF does not.")
    if form and "{}" in form:
        done.write("data.prompt_format", form, "input_template")
    elif form:
        done.ignore("the template has no {} for the prompt; OpenRLHF ignores such a template, too", "input_template")


# Offline trainers ----------------------------------------------------------------------------------------------------


def _sft(done: Conversion) -> None:
    if done["pretrain_mode"]:
        done.write("data.shape", "text", "pretrain_mode")
        done.write_text("data.text_key", "input_key")
        return
    _texts(done)


def _texts(done: Conversion) -> None:
    if done["output_key"]:
        done.write("data.shape", "prompt_response", "output_key")
        _prompt_and_response(done)
    elif done["apply_chat_template"]:
        done.write("data.shape", "messages", "input_key")
        if not done["multiturn"]:
            done.write("data.turns", "last")
        done.write_text("data.messages_key", "input_key")
    else:
        remedy = f"set the answer's column: {done.settings.spelling('output_key')} output"
        done.require("output_key", remedy, "is not set: no answer to train on")


def _prompt_and_response(done: Conversion) -> None:
    done.write_text("data.prompt_key", "input_key")
    done.write_text("data.response_key", "output_key")


def _dpo(done: Conversion) -> None:
    _pairs(done)
    done.write_number("preference.beta", "beta")
    if done["ipo"]:
        done.write("preference.loss", "ipo", "ipo")
        done.write("preference.average", False, "ipo")
        if done["label_smoothing"]:
            done.refuse("label_smoothing", "the ipo loss has no label smoothing", "remove --label_smoothing or --ipo")
    else:
        done.write_number("preference.label_smoothing", "label_smoothing")
    done.write_number("preference.nll", "nll_loss_coef")
    if done["ref_pretrain"]:
        done.write_text("preference.reference", "ref_pretrain")


def _pairs(done: Conversion) -> None:
    for name in ("prompt", "chosen", "rejected"):
        if done[f"{name}_key"] or name != "prompt":
            done.write_text(f"data.{name}_key", f"{name}_key")


def _kto(done: Conversion) -> None:
    if not done.require("output_key", f"set the answer's column: {done.settings.spelling('output_key')} output"):
        return
    _prompt_and_response(done)
    done.write_number("preference.beta", "beta")
    done.write_number("preference.desirable", "desirable_loss_weight")
    done.write_number("preference.undesirable", "undesirable_loss_weight")


def _rm(done: Conversion) -> None:
    _pairs(done)
    done.write("rm.loss", "sigmoid" if done["loss"] == "sigmoid" else "logexp", "loss")
    if not done["margin_loss"]:
        done.remarks.append("lockstep always uses a column `margin`; rename it if the command has no --margin_loss.")


def _prm(done: Conversion) -> None:
    done.write_text("data.text_key", "input_key")
    if done.require("placeholder_token", "give the text that marks a step: --placeholder_token"):
        done.write_text("prm.placeholder", "placeholder_token")
    if done.require("reward_tokens", "write for example --reward_tokens + -"):
        done.write("prm.tokens", list(done["reward_tokens"]), "reward_tokens")


def _kd(done: Conversion) -> None:
    _texts(done)
    if done.require("teacher_model", "give the path of the teacher"):
        done.write_text("distill.teacher", "teacher_model")
        done.write_number("distill.coefficient", "kd_coef")
        done.write("distill.divergence", "forward")


# For each program of OpenRLHF: the method of lockstep, and the conversion rule.
OFFLINE: dict[str, tuple[str, KeyRule]] = {
    "train_sft": ("sft", _sft),
    "train_dpo": ("dpo", _dpo),
    "train_kto": ("kto", _kto),
    "train_rm": ("rm", _rm),
    "train_prm": ("prm", _prm),
    "train_kd": ("distill", _kd),
}


def offline_rules(program: str) -> tuple[KeyRule, ...]:
    method, rule = OFFLINE[program]

    def rows_rule(done: Conversion) -> None:
        done.write("method", method)
        if not done.require("pretrain", "give the path of the model"):
            return
        done.write_text("model.path", "pretrain")
        data_rule(done, "dataset", "dataset_probs", "dataset_split")
        _validation(done)
        # Rows of process reward models and plain text have no prompt, so no template applies.
        if method != "prm" and not done["pretrain_mode"]:
            template_rule(done)
        done.write_integer("run.epochs", "max_epochs")
        optimizer_rule(done, "", "learning_rate")
        _batch(done, sequences_per_row=2 if method in ("dpo", "rm") else 1)

    return (run_rule, schedule_rule, rows_rule, rule, _offload)


def _offload(done: Conversion) -> None:
    offload_rule(done, "parallel.offload", optimizer=["adam_offload"])
    reference = done.settings.program in ("train_dpo", "train_kto") and not uses_lora(done)
    frozen_offload_rule(done, "parallel.offload_reference", ["ref_offload"], "reference model", reference)
    teacher = "distill.teacher" in done.recipe
    frozen_offload_rule(done, "parallel.offload_teacher", ["teacher_offload"], "teacher", teacher)


def _validation(done: Conversion) -> None:
    if not done["eval_dataset"]:
        done.ignore("there is no eval_dataset", "eval_steps", "eval_split")
        return
    keys = ["eval_dataset", *(["eval_split"] if done.is_set("eval_split") else [])]
    done.write("data.val", source_paths(done, "eval_dataset", "eval_split"), *keys)
    if done.integer("eval_steps") > 0:
        done.write_integer("val.every", "eval_steps")
    else:
        done.ignore("lockstep validates at the end, OpenRLHF after each epoch", "eval_steps")


def _batch(done: Conversion, sequences_per_row: int) -> None:
    longest, rows = done.integer("max_len"), done.integer("micro_train_batch_size")
    done.write("data.max_tokens", longest, "max_len")
    done.write("data.overlong", "truncate_right", "max_len", note=_OVERLONG)
    if done["packing_samples"]:
        tokens = rows * longest * sequences_per_row
        done.write("batch.tokens", tokens, "micro_train_batch_size", "packing_samples")
    else:
        done.write("batch.micro_batch_size", rows, "micro_train_batch_size")
