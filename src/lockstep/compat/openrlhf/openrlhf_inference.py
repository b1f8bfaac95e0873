"""Parses command lines of OpenRLHF's `batch_inference` and `serve_rm`: flags, defaults and checks.

`batch_inference` exists only in OpenRLHF 0.7, `serve_rm` in 0.7 and 0.11.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.compat.command_grammar import Flag, is_dotted, parse_flags
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.run.output import write

_TEXTS = (
    "eval_task pretrain dataset dataset_probs input_key output_key input_template output_path post_processor "
    "reward_template csft_prompt value_head_prefix"
)
_NUMBERS = "temperature top_p repetition_penalty"
_COUNTS = (
    "zero_stage local_rank seed max_len max_samples prompt_max_len max_new_tokens micro_batch_size best_of_n tp_size "
    "max_num_seqs iter rollout_batch_size"
)
_SWITCHES = (
    "bf16 flash_attn disable_fast_tokenizer apply_chat_template greedy_sampling enable_prefix_caching normalize_reward "
    "enable_csft full_determinism use_ms"
)
_BATCH = {
    **{name: Flag(name) for name in _TEXTS.split()},
    **{name: Flag(name, float) for name in _NUMBERS.split()},
    **{name: Flag(name, int) for name in _COUNTS.split()},
    **{name: Flag(name, bool, "switch") for name in _SWITCHES.split()},
}
_SERVED_FLAT = {
    **{name: Flag(name) for name in ("reward_pretrain", "host", "value_head_prefix")},
    **{name: Flag(name, int) for name in ("port", "max_len", "batch_size")},
    **{
        name: Flag(name, bool, "switch")
        for name in ("normalize_reward", "load_in_4bit", "bf16", "flash_attn", "disable_fast_tokenizer", "use_ms")
    },
}
# The dotted flags of `serve_rm` (0.11), with their flat names (0.7).
_SERVED_DOTTED = {
    "reward.model_name_or_path": Flag("reward_pretrain"),
    "reward.normalize_enable": Flag("normalize_reward", bool, "switch"),
    "ds.value_head_prefix": Flag("value_head_prefix"),
    "data.max_len": Flag("max_len", int),
    "port": Flag("port", int),
    "host": Flag("host"),
    "ds.load_in_4bit": Flag("load_in_4bit", bool, "switch"),
    "ds.param_dtype": Flag("param_dtype"),
    "ds.attn_implementation": Flag("flash_attn"),
    "ds.experts_implementation": Flag("experts_implementation"),
    "data.disable_fast_tokenizer": Flag("disable_fast_tokenizer", bool, "switch"),
    "ds.packing_samples": Flag("packing_samples", bool, "switch"),
    "batch_size": Flag("batch_size", int),
    "use_ms": Flag("use_ms", bool, "switch"),
}
# Flags that are ignored, because they affect only memory and speed, not results.
_IDLE = {
    *("zero_stage", "local_rank", "flash_attn", "disable_fast_tokenizer", "micro_batch_size", "tp_size"),
    *("max_num_seqs", "enable_prefix_caching", "full_determinism", "batch_size", "packing_samples"),
    "experts_implementation",
}
TASKS = ("generate", "generate_vllm", "rm")
PROCESSORS = ("rs", "csft", "iter_dpo")


@dataclass(frozen=True)
class BatchOrder:
    """A parsed `batch_inference` command with its defaults."""

    task: str
    model: str
    sources: tuple[str, ...]
    out: str
    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given[name]


_DEFAULTS: dict[str, Any] = {
    "input_key": "input",
    "output_key": None,
    "input_template": None,
    "apply_chat_template": False,
    "max_len": 2048,
    "max_samples": 100_000_000,
    "prompt_max_len": 1024,
    "max_new_tokens": 1024,
    "greedy_sampling": False,
    "top_p": 1.0,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "best_of_n": 1,
    "iter": None,
    "rollout_batch_size": 2048,
    "seed": 1234,
    "bf16": False,
    "post_processor": None,
    "normalize_reward": False,
    "reward_template": None,
    "enable_csft": False,
    "csft_prompt": "<rm_score>: 5.00",
}


def refuse_training(program: str, words: Sequence[str], locations: Sequence[str] = ()) -> None:
    """Raises a `Refusal`: the command does not train, so it has no recipe; names the command that runs it."""
    parsed = parse_flags(words, _flags(program, words), locations)
    remedy = f"run the command itself: python -m lockstep.compat.openrlhf {program} ..."
    raise Refusal([*parsed.problems, Problem(f"openrlhf {program}", "does not train", remedy, code="not-training")])


def batch_order(words: Sequence[str]) -> BatchOrder:
    """Returns the parsed `batch_inference` command, or raises a `Refusal` with all its problems."""
    given, problems = _given("batch_inference", words)
    task = given.get("eval_task", "")
    if task not in TASKS:
        why = f"{task} is not supported" if task else "is not set"
        problems.append(Problem("--eval_task", why, f"one of {', '.join(TASKS)}", code="unknown-name"))
    problems += [
        Problem(f"--{name}", "is not set", code="not-set")
        for name in ("pretrain", "dataset", "output_path")
        if not given.get(name)
    ]
    names = [name.strip() for name in str(given.get("dataset", "")).split(",") if name.strip()]
    if any("@" in name for name in names):
        problems.append(
            Problem(
                "--dataset",
                "lockstep does not read a folder inside a data set (NAME@FOLDER)",
                "give file paths",
                code="unsupported-setting",
            )
        )
    if len(names) > 1 and given.get("dataset_probs"):
        why = "lockstep does not mix data sets by probability in batch_inference"
        problems.append(
            Problem(
                "--dataset_probs",
                why,
                "remove the flag; the data sets are then used one after the other",
                code="unsupported-setting",
            )
        )
    kind = given.get("post_processor")
    if kind not in (None, "null", *PROCESSORS):
        problems.append(
            Problem(
                "--post_processor", f"{kind} is not supported", f"one of {', '.join(PROCESSORS)}", code="unknown-name"
            )
        )
    for name, low in (("best_of_n", 1), ("max_new_tokens", 1), ("prompt_max_len", 1), ("max_len", 4)):
        if given.get(name, low) < low:
            problems.append(Problem(f"--{name}", f"{given[name]} is below {low}", code="out-of-range"))
    template = given.get("reward_template")
    if template is not None and not ("{input}" in template and "{reward}" in template):
        problems.append(Problem("--reward_template", "must contain {input} and {reward}", code="missing-placeholder"))
    refuse_all(problems)
    return BatchOrder(task, given["pretrain"], tuple(names), given["output_path"], {**_DEFAULTS, **given})


def rewards_served(words: Sequence[str]) -> tuple[Any, Any, Any]:
    """Returns the arguments of `lockstep.serve.model_server.serve` for a `serve_rm` command."""
    from lockstep.http_server.http_api import ListenAddress, ServeLimits, is_loopback
    from lockstep.serve.model_server import ServeRmOptions, ServeSettings

    given, problems = _given("serve_rm", words)
    if not given.get("reward_pretrain"):
        flag = "reward.model_name_or_path" if is_dotted(words) else "reward_pretrain"
        problems.append(Problem(f"--{flag}", "is not set", code="not-set"))
    dtype = given.get("param_dtype", "bf16") if is_dotted(words) else "bf16" if given.get("bf16") else "auto"
    if dtype not in ("auto", "bf16", "fp16"):
        problems.append(Problem("--ds.param_dtype", f"{dtype} is not one of bf16, fp16", code="unknown-name"))
    refuse_all(problems)
    key, host = os.environ.get("LOCKSTEP_API_KEY"), given.get("host")
    if host is None:
        host = "127.0.0.1" if key is None else "0.0.0.0"
    if key is None and not is_loopback(host):
        why = "OpenRLHF's clients send no key, so everyone who reaches this host could use the model"
        remedy = "remove --host and use a tunnel to 127.0.0.1, or set LOCKSTEP_API_KEY"
        raise Refusal.at(f"--host {host}", why, remedy, code="open-server")
    serving = ServeSettings(
        given["reward_pretrain"],
        dtype=dtype,
        max_length=given.get("max_len", 2048),
        serve_rm=ServeRmOptions(append_eos=not is_dotted(words), normalize=bool(given.get("normalize_reward"))),
    )
    return serving, ListenAddress(host, given.get("port", 5000), key), ServeLimits(queue=4096, body_bytes=256 * 2**20)


def _given(program: str, words: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    parsed = parse_flags(words, _flags(program, words))
    given = {name: setting.value for name, setting in parsed.given.items()}
    problems = list(parsed.problems)
    if given.get("use_ms"):
        problems.append(
            Problem(
                "--use_ms",
                "lockstep loads from folders and the Hugging Face hub",
                "remove it",
                code="unsupported-setting",
            )
        )
    if given.get("load_in_4bit"):
        problems.append(
            Problem("--load_in_4bit", "lockstep does not quantize weights", "remove it", code="unsupported-setting")
        )
    if idle := [f"--{name}" for name in given if name in _IDLE]:
        write(f"ignored flags (they affect memory and speed, not results): {', '.join(idle)}", error=True)
    if "value_head_prefix" in given and given["value_head_prefix"] != "score":
        why = "the head of a sequence classification model is `score`; weights that have only "
        write(f"--value_head_prefix: {why}{given['value_head_prefix']} are refused", error=True)
    return given, problems


def _flags(program: str, words: Sequence[str]) -> dict[str, Flag]:
    if program == "batch_inference":
        return _BATCH
    return _SERVED_DOTTED if is_dotted(words) else _SERVED_FLAT
