"""verl's SFT trainers: `fsdp_sft_trainer` (0.4) and `sft_trainer` (0.9)."""

from __future__ import annotations

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRow, KeyRule, idle, part, refused, same
from lockstep.compat.verl.online import schedule_rule
from lockstep.compat.verl.shared import (
    TRAINER_ROWS,
    checkpoint_rows,
    files,
    keep_rule,
    lora_rows,
    lora_rule,
    precision_rule,
    template_rule,
    trainer_rule,
)

IMAGES = "rows with images are not trained here"

ROWS: list[KeyRow] = [
    part("data.train_files", "data.train"),
    part("data.val_files", "data.val"),
    same("data.train_batch_size", "batch.rows_per_update", 256, "rows of an update, over all devices", convert=int),
    part("data.micro_batch_size", "batch.rows", note="the older name, over all devices"),
    part("data.micro_batch_size_per_gpu", "batch.rows"),
    part("data.use_dynamic_bsz", "batch.tokens"),
    part("data.max_token_len_per_gpu", "batch.tokens", default=8192),
    part("data.prompt_key", "data.prompt_key"),
    part("data.response_key", "data.response_key"),
    part("data.prompt_dict_keys", "data.prompt_key", note="the inner column, with a dot"),
    part("data.response_dict_keys", "data.response_key", note="the inner column, with a dot"),
    part("data.multiturn.enable", "data.shape", default=False),
    part("data.multiturn.messages_key", "data.messages_key"),
    part("data.messages_key", "data.messages_key"),
    *refused("data.multiturn.tools_key data.tools_key", "the column is called tools: rename it", off=(None, "tools")),
    *refused(
        "data.multiturn.enable_thinking_key data.enable_thinking_key",
        "the chat template is rendered without switches of a row",
        off=(None, "enable_thinking"),
    ),
    part("data.max_length", "data.max_tokens", default=1024),
    part("data.truncation", "data.overlong", default="error"),
    *refused("data.custom_cls.*", "write data.reader, a function that yields the rows"),
    *refused("data.chat_template", "write it to a file and name that with data.template"),
    part("data.apply_chat_template_kwargs.*", "data.template_arguments", note="for every row of the run"),
    *refused("data.image_key data.video_key", IMAGES, off=(None,)),
    *refused("data.train_max_samples data.val_max_samples", "cut the file", off=(None, -1)),
    *idle(
        "data.pad_mode data.balance_dp_token data.num_workers data.ignore_input_ids_mismatch data.use_shm",
        "plumbing",
    ),
    part("model.partial_pretrain", "model.path"),
    part("model.path", "model.path"),
    *lora_rows("model"),
    same("model.enable_gradient_checkpointing", "model.gradient_checkpointing", True, convert=bool),
    same("model.enable_activation_offload", "model.activation_offload", False, convert=bool),
    part("model.fsdp_config.model_dtype", "model.master_weights", default="fp32"),
    part("engine.model_dtype", "model.master_weights", default="fp32"),
    *refused(
        "model.strategy engine.strategy", "Megatron's layout does not exist here", off=(None, "fsdp", "fsdp2", "veomni")
    ),
    *refused("model.external_lib", "code that is imported for its side effects"),
    *refused("model.override_config.*", "a model is taken as its config.json says; edit that file"),
    *idle(
        "model.use_liger model.fsdp_config.* model.use_shm model.use_remove_padding model.use_fused_kernels "
        "engine.* ulysses_sequence_parallel_size use_remove_padding model.tokenizer_path model.hf_config_path",
        "memory and speed, not results: offloading, sharding, kernels",
    ),
    *idle(
        "model.trust_remote_code data.trust_remote_code",
        "code that comes with a model is never run; a model that needs it is refused when it is loaded",
    ),
    same("optim.lr", "optim.lr", convert=float),
    part("optim.betas", "optim.betas"),
    same("optim.weight_decay", "optim.weight_decay", 0.01, "on biases and norms too", convert=float),
    part("optim.warmup_steps_ratio", "optim.warmup"),
    part("optim.lr_warmup_steps_ratio", "optim.warmup"),
    part("optim.lr_warmup_steps", "optim.warmup"),
    part("optim.lr_scheduler", "optim.schedule"),
    part("optim.lr_scheduler_type", "optim.schedule"),
    part("optim.warmup_style", "optim.schedule"),
    part("optim.lr_decay_style", "optim.schedule"),
    part("optim.min_lr_ratio", "optim.min_lr_ratio", default=0.0),
    same("optim.clip_grad", "optim.clip", 1.0, convert=float),
    *refused("optim.optimizer optim.optimizer_impl", "AdamW is the optimizer", off=(None, "AdamW", "torch.optim")),
    *refused("optim.num_cycles", "the cosine has half a cycle", off=(None, 0.5)),
    *idle("optim.total_training_steps", "the run's own steps"),
    *idle("checkpoint.*", "a checkpoint holds weights, optimizer and position; export/ the model"),
    *TRAINER_ROWS,
    same("trainer.seed", "run.seed", 1, convert=int),
    part("trainer.test_freq", "val.every", default=-1),
    *checkpoint_rows("trainer.max_ckpt_to_keep"),
    *idle("trainer.checkpoint.*", "a checkpoint holds weights, optimizer and position; export/ the model"),
]
# Where the two versions differ.
DEFAULTS = {
    "0.4": {
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.lr_scheduler": "cosine",
        "optim.warmup_steps_ratio": 0.1,
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "data.micro_batch_size_per_gpu": 4,
        "data.use_dynamic_bsz": False,
        "data.multiturn.messages_key": "messages",
        "trainer.total_epochs": 4,
        "trainer.project_name": "gsm8k-sft",
        "trainer.experiment_name": "test",
    },
    "0.9": {
        "optim.lr": 1e-3,
        "optim.betas": [0.9, 0.999],
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0.0,
        "data.micro_batch_size_per_gpu": 4,
        "data.use_dynamic_bsz": True,
        "data.messages_key": "messages",
        "trainer.total_epochs": 4,
        "trainer.project_name": "gsm8k-sft",
        "trainer.experiment_name": "test",
    },
}


def rows_rule(settings: Settings, done: Conversion) -> None:
    done.write("method", "sft")
    if settings["data.train_files"] is None:
        done.refuse("data.train_files", "is not set", "name the training rows")
        return
    done.write("data.train", files(settings["data.train_files"]), "data.train_files")
    if settings["data.val_files"] is not None:
        done.write("data.val", files(settings["data.val_files"]), "data.val_files")
        if settings.whole("trainer.test_freq") > 0:
            done.write("val.every", settings.whole("trainer.test_freq"), "trainer.test_freq")
    done.write("data.drop_last", True)
    done.write("data.max_tokens", settings.whole("data.max_length"), "data.max_length")
    cut = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    if settings["data.truncation"] in cut:
        done.write("data.overlong", cut[settings["data.truncation"]], "data.truncation")
    else:
        done.refuse("data.truncation", f"{settings['data.truncation']} is not here", f"one of {', '.join(cut)}")
    _columns(settings, done)
    template_rule(settings, done)


def _columns(settings: Settings, done: Conversion) -> None:
    chats = settings["data.multiturn.enable"] or settings.defaults.get("data.messages_key")
    if chats:
        key = "data.multiturn.messages_key" if settings["data.multiturn.enable"] else "data.messages_key"
        done.write("data.shape", "messages", "data.multiturn.enable" if settings["data.multiturn.enable"] else key)
        done.write("data.messages_key", str(settings[key]), key)
        return
    done.write("data.shape", "prompt_response")
    for name in ("prompt", "response"):
        column, inner = str(settings[f"data.{name}_key"]), settings[f"data.{name}_dict_keys"]
        inner = [inner] if isinstance(inner, str) else inner or []
        keys = (f"data.{name}_key", *([f"data.{name}_dict_keys"] if inner else []))
        done.write(f"data.{name}_key", ".".join([column, *map(str, inner)]), *keys)


def model_rule(settings: Settings, done: Conversion) -> None:
    key = "model.partial_pretrain" if settings.says("model.partial_pretrain") else "model.path"
    if settings[key] is None:
        done.refuse(key, "is not set", "name the model")
        return
    done.write("model.path", str(settings[key]), key)
    lora_rule(settings, done, "model")
    precision_rule(settings, done, ("model.fsdp_config.model_dtype", "engine.model_dtype"))
    done.write("optim.betas", [float(beta) for beta in settings["optim.betas"]], "optim.betas")
    done.write("optim.decay_all", True, "optim.weight_decay")
    schedule_rule(settings, done, "optim")


def batch_rule(settings: Settings, done: Conversion) -> None:
    if settings["data.use_dynamic_bsz"]:
        tokens = max(settings.whole("data.max_token_len_per_gpu"), settings.whole("data.max_length"))
        done.write("batch.tokens", tokens, "data.max_token_len_per_gpu", "data.use_dynamic_bsz")
        for key in ("data.micro_batch_size_per_gpu", "data.micro_batch_size"):
            if settings.says(key):
                done.ignore(key, "use_dynamic_bsz counts tokens instead")
        return
    overall = settings.says("data.micro_batch_size") and not settings.says("data.micro_batch_size_per_gpu")
    key = "data.micro_batch_size" if overall else "data.micro_batch_size_per_gpu"
    done.write("batch.rows", settings.whole(key), key)


def last_rule(settings: Settings, done: Conversion) -> None:
    keep_rule(settings, done, "trainer.max_ckpt_to_keep")


RULES_IN_ORDER: tuple[KeyRule, ...] = (trainer_rule, rows_rule, model_rule, batch_rule, last_rule)
