"""OpenRLHF's `batch_inference` and `serve_rm`, which train nothing: the commands here that do the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from lockstep.compat.flags import Flag, parse_flags
from lockstep.errors import Problem, Refusal

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
_SERVED = "name the reward model's folder as reward.model: it is loaded beside the policy, and no server is needed"
_SCHEMA = "its rows in the RL schema: see `lockstep sample --help`"


def refuse_inference(program: str, words: Sequence[str], wheres: Sequence[str] = ()) -> None:
    """Always refuses, with the command that does it here and the values of the one that was given."""
    if program == "serve_rm":
        raise Refusal.at("openrlhf serve_rm", "is no training", _SERVED)
    said = parse_flags(words, _BATCH, wheres)
    given = {name: setting.value for name, setting in said.given.items()}
    task = str(given.get("eval_task", ""))
    if task in ("generate", "generate_vllm"):
        problem = Problem("openrlhf batch_inference", "is no training", f"use: {_sample(given)} ({_SCHEMA})")
    elif task == "rm":
        problem = _judge(given)
    else:
        why = f"--eval_task {task} is not known" if task else "--eval_task is not set"
        problem = Problem("openrlhf batch_inference", why, "generate, generate_vllm or rm")
    raise Refusal([*said.problems, problem])


def _sample(given: Mapping[str, Any]) -> str:
    """`lockstep sample` with the settings of a generation."""
    out = PurePosixPath(str(given.get("output_path", "OUT"))).with_suffix(".parquet")
    words = ["lockstep", "sample", str(given.get("pretrain", "MODEL")), str(given.get("dataset", "DATA")), str(out)]
    words += ["--n", str(given.get("best_of_n", 1))]
    words += ["--temperature", "0" if given.get("greedy_sampling") else str(given.get("temperature", 1.0))]
    if given.get("top_p", 1.0) != 1.0:
        words += ["--top-p", str(given["top_p"])]
    words += ["--max-new-tokens", str(given.get("max_new_tokens", 1024))]
    if "iter" in given:
        first = given["iter"] * given.get("rollout_batch_size", 2048)
        size = given.get("rollout_batch_size", 2048)
        return f"{shlex.join(words)}, on the rows from {first} to {first + size - 1}"
    if "max_samples" in given:
        words += ["--rows", str(given["max_samples"])]
    return shlex.join(words)


def _judge(given: Mapping[str, Any]) -> Problem:
    """Scores of a reward model: here they are given while responses are sampled, and `pairs` chooses among them."""
    kinds = {"rs": "sft", "iter_dpo": "pairs"}
    kind = given.get("post_processor")
    if kind not in kinds:
        why = "conditional SFT (csft) is not here" if kind == "csft" else "is no training"
        remedy = "" if kind == "csft" else f"use: lockstep eval {given.get('pretrain', 'MODEL')} DATA"
        return Problem("openrlhf batch_inference", why, remedy)
    rows = PurePosixPath(str(given.get("dataset", "OUT"))).with_suffix(".parquet")
    out = given.get("output_path", "ROWS.jsonl")
    scored = f"add --reward-model {given.get('pretrain', 'DIR')} to the `lockstep sample` that writes {rows}"
    chosen = shlex.join(["lockstep", "pairs", str(rows), str(out), "--kind", kinds[kind]])
    return Problem("openrlhf batch_inference", "is no training", f"{scored}, then: {chosen}")
