"""OpenRLHF's trainers on rows: SFT, DPO, KTO, reward model, process reward model, distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.compat.openrlhf.options import Option, cannot, opt, without_effect
from lockstep.compat.openrlhf.shared import SHARED, data_rule, run_rule, schedule_rule, template_rule
from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, part, same

OVERLONG = "longer rows lose the end of their answer; theirs are dropped when the prompt alone fills max_len"
CHAT = "with --apply_chat_template and no --output_key: the chat, of which every assistant turn is trained"

COMMON: list[Option] = [
    *SHARED,
    opt("s", "pretrain", "model.model_name_or_path", part("pretrain", "model.path")),
    opt("s", "dataset", "data.dataset", part("dataset", "data.train")),
    opt("s", "dataset_probs", "data.dataset_probs", part("dataset_probs", "data.train", note="weights of the sources")),
    opt("s", "dataset_split", "data.dataset_split", part("dataset_split", "data.train", default="train")),
    *without_effect("s:train_split:", "dataset_split rules"),
    opt("s", "eval_dataset", "eval.dataset", part("eval_dataset", "data.val")),
    opt("s", "eval_split", "eval.split", part("eval_split", "data.val")),
    opt("i", "eval_steps", "eval.steps", part("eval_steps", "val.every", default=-1)),
    opt("i", "max_samples", "data.max_samples", part("max_samples", "data.train", note="rows of a source")),
    opt(
        "b",
        "apply_chat_template",
        "data.apply_chat_template",
        part("apply_chat_template", "data.template", default=False),
    ),
    opt("s", "input_template", "data.input_template", part("input_template", "data.prompt_format")),
    *cannot(
        "s:tokenizer_chat_template:data.tokenizer_chat_template",
        "put the template into the model's folder: chat_template.jinja",
    ),
    opt("i", "max_len", "data.max_len", part("max_len", "data.max_tokens", "data.overlong")),
    opt("i", "train_batch_size", "train.batch_size", same("train_batch_size", "batch.rows_per_update", 128)),
    opt(
        "i",
        "micro_train_batch_size",
        "train.micro_batch_size",
        part("micro_train_batch_size", "batch.rows", "batch.tokens"),
    ),
    opt("i", "max_epochs", "train.max_epochs", part("max_epochs", "run.epochs")),
    opt("f", "learning_rate", "adam.lr", part("learning_rate", "optim.lr")),
    opt("s", "lr_scheduler", "lr_scheduler", part("lr_scheduler", "optim.schedule", default="cosine_with_min_lr")),
    opt("f", "lr_warmup_ratio", "lr_warmup_ratio", part("lr_warmup_ratio", "optim.warmup", default=0.03)),
    opt("f", None, "min_lr_ratio", part("min_lr_ratio", "optim.min_lr_ratio", default=0.1)),
    opt("ff", "adam_betas", "adam.betas", same("adam_betas", "optim.betas", [0.9, 0.95])),
    opt("f", None, "adam.eps", same("adam.eps", "optim.eps", 1e-8)),
    opt("f", "l2", "adam.weight_decay", same("l2", "optim.weight_decay", 0.0)),
    opt("f", "max_norm", "max_norm", same("max_norm", "optim.clip", 1.0)),
    *cannot("s::optim", "AdamW is the optimizer", (None, "adam")),
    *without_effect(
        "f::muon.lr f::muon.momentum i::muon.ns_steps b::muon.nesterov b::muon.no_nesterov", "read with muon only"
    ),
    opt(
        "b",
        "gradient_checkpointing",
        "model.gradient_checkpointing_enable",
        same("gradient_checkpointing", "model.gradient_checkpointing", False),
    ),
]
_INPUT = opt(
    "s", "input_key", "data.input_key", part("input_key", "data.prompt_key", "data.messages_key", default="input")
)
_OUTPUT = opt("s", "output_key", "data.output_key", part("output_key", "data.response_key"))
_TEXTS = [_INPUT, _OUTPUT]
_PAIRS = [
    opt("s", "prompt_key", "data.prompt_key", part("prompt_key", "data.prompt_key")),
    opt("s", "chosen_key", "data.chosen_key", part("chosen_key", "data.chosen_key", default="chosen")),
    opt("s", "rejected_key", "data.rejected_key", part("rejected_key", "data.rejected_key", default="rejected")),
]
_LABEL = opt("s", "label_key", None, same("label_key", "data.label_key", "label"))
_TEMPLATE = "User: {}\nAssistant: "


@dataclass(frozen=True)
class Trainer:
    """A program: its method here, flags and defaults of its own, and its rule."""

    method: str
    options: list[Option]
    rule: Callable[[Settings, Conversion], None]
    defaults: dict[str, Any] = field(default_factory=dict)
    compares: bool = False


def _sft(settings: Settings, done: Conversion) -> None:
    if settings["pretrain_mode"]:
        done.write("data.shape", "text", "pretrain_mode")
        done.write("data.text_key", str(settings["input_key"]), "input_key")
        return
    _texts(settings, done)


def _texts(settings: Settings, done: Conversion) -> None:
    if settings["output_key"]:
        done.write("data.shape", "prompt_response", "output_key")
        done.write("data.prompt_key", str(settings["input_key"]), "input_key")
        done.write("data.response_key", str(settings["output_key"]), "output_key")
    elif settings["apply_chat_template"]:
        note = (
            ""
            if settings["multiturn"]
            else "every assistant turn is trained; theirs is the last one without --multiturn"
        )
        done.write("data.shape", "messages", "input_key", note=note)
        done.write("data.messages_key", str(settings["input_key"]), "input_key")
    else:
        done.refuse(
            "output_key", "is not set: there would be no answer to train", "name its column, e.g. --output_key output"
        )


def _dpo(settings: Settings, done: Conversion) -> None:
    _pairs(settings, done)
    done.write("preference.beta", settings.number("beta"), "beta")
    if settings["ipo"]:
        done.write("preference.loss", "ipo", "ipo")
        done.write("preference.average", False, "ipo")
        if settings["label_smoothing"]:
            done.refuse("label_smoothing", "the ipo loss has none", "remove it, or --ipo")
    else:
        done.write("preference.label_smoothing", settings.number("label_smoothing"), "label_smoothing")
    done.write("preference.nll", settings.number("nll_loss_coef"), "nll_loss_coef")
    if settings["ref_pretrain"]:
        done.write("preference.reference", str(settings["ref_pretrain"]), "ref_pretrain")


def _pairs(settings: Settings, done: Conversion) -> None:
    if settings["prompt_key"]:
        done.write("data.prompt_key", str(settings["prompt_key"]), "prompt_key")
    done.write("data.chosen_key", str(settings["chosen_key"]), "chosen_key")
    done.write("data.rejected_key", str(settings["rejected_key"]), "rejected_key")


def _kto(settings: Settings, done: Conversion) -> None:
    if not settings["output_key"]:
        done.refuse("output_key", "is not set: there would be no answer to judge", "name its column")
        return
    done.write("data.prompt_key", str(settings["input_key"]), "input_key")
    done.write("data.response_key", str(settings["output_key"]), "output_key")
    for ours, theirs in (
        ("beta", "beta"),
        ("desirable", "desirable_loss_weight"),
        ("undesirable", "undesirable_loss_weight"),
    ):
        done.write(f"preference.{ours}", settings.number(theirs), theirs)


def _rm(settings: Settings, done: Conversion) -> None:
    _pairs(settings, done)
    done.write("rm.loss", "sigmoid" if settings["loss"] == "sigmoid" else "logexp", "loss")
    if not settings["margin_loss"]:
        done.remarks.append("a column `margin` would be used here; rename it where the command has no --margin_loss.")


def _prm(settings: Settings, done: Conversion) -> None:
    done.write("data.text_key", str(settings["input_key"]), "input_key")
    if settings["placeholder_token"]:
        done.write("prm.placeholder", str(settings["placeholder_token"]), "placeholder_token")
    else:
        done.refuse("placeholder_token", "is not set", "the text where a step is judged")
    if settings["reward_tokens"]:
        done.write("prm.tokens", list(settings["reward_tokens"]), "reward_tokens")
    else:
        done.refuse("reward_tokens", "is not set: the words are then read from the labels", "--reward_tokens + -")


def _kd(settings: Settings, done: Conversion) -> None:
    _texts(settings, done)
    if not settings["teacher_model"]:
        done.refuse("teacher_model", "is not set", "name the teacher")
        return
    done.write("distill.teacher", str(settings["teacher_model"]), "teacher_model")
    done.write("distill.coefficient", settings.number("kd_coef"), "kd_coef")
    done.write("distill.divergence", "forward")


TRAINERS: dict[str, Trainer] = {
    "train_sft": Trainer(
        "sft",
        [
            *COMMON,
            *_TEXTS,
            opt("b", "multiturn", "data.multiturn", part("multiturn", "data.shape", note=CHAT)),
            opt(
                "b", "pretrain_mode", "model.pretrain_mode_enable", part("pretrain_mode", "data.shape", "data.text_key")
            ),
        ],
        _sft,
        {
            "learning_rate": 5e-6,
            "max_epochs": 2,
            "max_len": 2048,
            "micro_train_batch_size": 8,
            "eval_split": "train",
            "input_template": _TEMPLATE,
        },
    ),
    "train_dpo": Trainer(
        "dpo",
        [
            *COMMON,
            *_PAIRS,
            opt("f", "beta", "model.beta", part("beta", "preference.beta", default=0.1)),
            opt("b", "ipo", "model.ipo_enable", part("ipo", "preference.loss", "preference.average", default=False)),
            opt(
                "f",
                "label_smoothing",
                "model.label_smoothing",
                part("label_smoothing", "preference.label_smoothing", default=0.0),
            ),
            opt("f", "nll_loss_coef", "model.nll_loss_coef", part("nll_loss_coef", "preference.nll", default=0.0)),
            opt("s", "ref_pretrain", "ref.model_name_or_path", part("ref_pretrain", "preference.reference")),
            *without_effect(
                "b:ref_offload:ref.offload", "memory, not results; preference.precompute needs no reference at all"
            ),
        ],
        _dpo,
        {"learning_rate": 1e-5, "max_epochs": 1, "max_len": 512, "micro_train_batch_size": 8, "eval_split": "test"},
        compares=True,
    ),
    "train_kto": Trainer(
        "kto",
        [
            *COMMON,
            *_TEXTS,
            _LABEL,
            opt("f", "beta", None, part("beta", "preference.beta", default=0.01)),
            opt("f", "desirable_loss_weight", None, part("desirable_loss_weight", "preference.desirable", default=1.0)),
            opt(
                "f",
                "undesirable_loss_weight",
                None,
                part("undesirable_loss_weight", "preference.undesirable", default=1.0),
            ),
            *without_effect("b:ref_offload:", "memory, not results"),
        ],
        _kto,
        {
            "learning_rate": 1e-5,
            "max_epochs": 1,
            "max_len": 2048,
            "micro_train_batch_size": 8,
            "eval_split": "test",
            "input_template": _TEMPLATE,
        },
    ),
    "train_rm": Trainer(
        "rm",
        [
            *COMMON,
            *_PAIRS,
            opt(
                "s",
                "loss",
                "model.loss_type",
                part("loss", "rm.loss", default="sigmoid", note="all but sigmoid is logexp"),
            ),
            opt(
                "b",
                "margin_loss",
                "model.margin_loss_enable",
                part("margin_loss", note="a column `margin` is used where there is one", default=False),
            ),
            *without_effect("b:compute_fp32_loss:model.compute_fp32_loss_enable", "the loss is always fp32"),
            *without_effect("s:value_head_prefix:ds.value_head_prefix", "the head is called score, as in transformers"),
        ],
        _rm,
        {"learning_rate": 9e-6, "max_epochs": 1, "max_len": 512, "micro_train_batch_size": 1, "eval_split": "train"},
        compares=True,
    ),
    "train_prm": Trainer(
        "prm",
        [
            *COMMON,
            _INPUT,
            _LABEL,
            opt("s", "placeholder_token", None, part("placeholder_token", "prm.placeholder")),
            opt("s*", "reward_tokens", None, part("reward_tokens", "prm.tokens", note="the first is the good one")),
        ],
        _prm,
        {"learning_rate": 1e-6, "max_epochs": 1, "max_len": 2048, "micro_train_batch_size": 1, "eval_split": "test"},
    ),
    "train_kd": Trainer(
        "distill",
        [
            *COMMON,
            *_TEXTS,
            opt("s", "teacher_model", None, part("teacher_model", "distill.teacher")),
            opt("f", "kd_coef", None, part("kd_coef", "distill.coefficient", default=0.4)),
            *without_effect(
                "b:teacher_offload:", "memory, not results; distill.top_k needs no teacher beside the student"
            ),
            *cannot("b:pretrain_mode:", "distillation on plain text: name the columns of a prompt and an answer"),
        ],
        _kd,
        {
            "learning_rate": 5e-6,
            "max_epochs": 2,
            "max_len": 2048,
            "micro_train_batch_size": 8,
            "eval_split": "test",
            "output_key": "output",
            "input_template": _TEMPLATE,
        },
    ),
}


def rules_of(trainer: Trainer) -> tuple[Callable[[Settings, Conversion], None], ...]:
    def rows_rule(settings: Settings, done: Conversion) -> None:
        done.write("method", trainer.method)
        if not settings["pretrain"]:
            done.refuse("pretrain", "is not set", "name the model")
            return
        done.write("model.path", str(settings["pretrain"]), "pretrain")
        data_rule(settings, done, "data.train", "dataset", "dataset_probs", "dataset_split")
        _validation(settings, done)
        # A process reward model reads whole texts; plain text has no prompt either.
        if trainer.method != "prm" and not settings["pretrain_mode"]:
            template_rule(settings, done)
        done.write("run.epochs", settings.whole("max_epochs"), "max_epochs")
        done.write("optim.lr", settings.number("learning_rate"), "learning_rate")
        _batch(settings, done, trainer)

    return (run_rule, schedule_rule, rows_rule, trainer.rule)


def _validation(settings: Settings, done: Conversion) -> None:
    if not settings["eval_dataset"]:
        for key in ("eval_steps", "eval_split"):
            if settings.says(key):
                done.ignore(key, "there is no eval_dataset")
        return
    from lockstep.compat.openrlhf.shared import sources

    found = [source["path"] for source in sources(settings["eval_dataset"], None, settings["eval_split"])]
    done.write("data.val", found, "eval_dataset", *(["eval_split"] if settings.says("eval_split") else []))
    if settings.whole("eval_steps") > 0:
        done.write("val.every", settings.whole("eval_steps"), "eval_steps")
    elif settings.says("eval_steps"):
        done.ignore("eval_steps", "validated at the end; theirs at the end of each epoch")


def _batch(settings: Settings, done: Conversion, trainer: Trainer) -> None:
    longest, rows = settings.whole("max_len"), settings.whole("micro_train_batch_size")
    done.write("data.max_tokens", longest, "max_len")
    done.write("data.overlong", "truncate_right", "max_len", note=OVERLONG)
    if settings["packing_samples"]:
        each = longest * (2 if trainer.compares else 1)
        done.write("batch.tokens", rows * each, "micro_train_batch_size", "packing_samples")
    else:
        done.write("batch.rows", rows, "micro_train_batch_size")
