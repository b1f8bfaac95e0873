"""Runs OpenRLHF's `batch_inference`: generates answers to prompts, or scores answers with a reward model.

The next command of an OpenRLHF script reads the output file, so its rows have OpenRLHF's columns (`input`, `output`
and, after scoring, `reward`). Texts are rendered as in OpenRLHF.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.compat.openrlhf.openrlhf_inference import BatchOrder
from lockstep.compat.openrlhf.openrlhf_rules import sources
from lockstep.data.encode.chat_text import render_prompt
from lockstep.data.prepare.generated import write_rows
from lockstep.data.prepare.sampled import TEMPLATE
from lockstep.data.sources.read import read_rows
from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.errors import Refusal
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.reward.model import load_reward_model, normalized_by_config
from lockstep.rollout.generator import Generator
from lockstep.run.console import Console
from lockstep.run.folder import refuse_unwritable
from lockstep.serve.model_server import stored_dtype
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Message, Origin, Prompt, Question, Row, Sampling, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_batch(order: BatchOrder) -> None:
    """Generates or scores answers, and writes the output file."""
    device, explanation = explain("auto")
    out = Path(order.out)
    with joined(device) as world:
        console = Console.open() if world.main else Console.silent()
        console.say(explanation)
        rows = _rows(order)
        if world.main:
            out.parent.mkdir(parents=True, exist_ok=True)
            refuse_unwritable(out, "--output_path")
        if order.task == "rm":
            output = _scored(order, rows, device, world, console)
        else:
            output = _generated(order, rows, device, world, console)
        if world.main:
            write_rows(out, output)
            console.say(f"wrote {out}: {len(output):,} rows")


def _rows(order: BatchOrder) -> list[tuple[Row, Origin]]:
    """Returns up to `max_samples` rows of all data sets; with `--iter`, only the slice of that iteration."""
    most = order["max_samples"]
    parts: list[Iterable[tuple[Row, Origin]]] = []
    for source in sources(",".join(order.sources), None, "train"):
        table = read_rows(source["path"])
        parts.append((table[i], table.origin(i)) for i in range(min(most, len(table))))
    rows = chain.from_iterable(parts)
    if order.task == "rm" or order["iter"] is None:
        kept = list(islice(rows, most))
    else:
        first = order["iter"] * order["rollout_batch_size"]
        kept = list(islice(rows, first, first + order["rollout_batch_size"]))
    if not kept:
        raise Refusal.at(
            "--iter" if order["iter"] is not None else "--dataset", "there are no rows left in the data", code="no-rows"
        )
    return kept


# Answers -----------------------------------------------------------------------------------------------------------


class _NoScorer:
    """A scorer that scores nothing, because another command scores the answers."""

    def submit(self, question: Question, text: str, trajectory: Trajectory | None = None) -> Future[Score | Failure]:
        future: Future[Score | Failure] = Future()
        future.set_result(Score(0.0, {}))
        return future

    def flush(self) -> None:
        """Does nothing."""


def _generated(
    order: BatchOrder, rows: Sequence[tuple[Row, Origin]], device: Device, world: World, console: Console
) -> list[dict[str, Any]]:
    folder = model_folder(order.model)
    tokenizer = load_tokenizer(folder)
    texts = [prompt_of(order, tokenizer, row, origin) for row, origin in rows]
    limit, cut = order["prompt_max_len"], 0
    prompts = []
    for text, (_, origin) in zip(texts, rows, strict=True):
        ids = list(tokenizer(text, add_special_tokens=_opens(order, tokenizer, text))["input_ids"])
        if not ids:
            raise Refusal.at(origin, "the prompt has no tokens", "correct or remove the row", code="empty-prompt")
        cut += len(ids) > limit
        # A prompt that is too long loses its beginning.
        prompts.append(Prompt(Question("", [], "", origin), ids[-limit:]))
    if cut:
        console.warn(f"{cut:,} prompts were truncated on the left to --prompt_max_len {limit}")
    config = load_config(folder)
    _refuse_context(config, max(len(prompt.ids) for prompt in prompts), order["max_new_tokens"])
    dtype = "bf16" if order["bf16"] else stored_dtype(config)
    generator = Generator.load(folder, tokenizer, dtype, device, world, RolloutSettings(free_cache=False))
    sampling = Sampling(
        order["max_new_tokens"],
        0.0 if order["greedy_sampling"] else order["temperature"],
        order["top_p"],
        repetition_penalty=order["repetition_penalty"],
        stop_ids=generator.stop_ids,
        seed=order["seed"],
    )
    n = order["best_of_n"]
    with console.task("Generating", len(prompts) * n) as task:
        made = generator.generate(
            prompts,
            range(len(prompts)),
            n,
            sampling,
            _NoScorer(),
            advance=lambda done: task.advance(done * world.size),
        )
    # As in OpenRLHF, texts of the task `generate_vllm` keep special tokens, and texts of `generate` do not.
    skip = order.task == "generate"
    answers = {(one.prompt_index, one.sample): tokenizer.decode(one.ids, skip_special_tokens=skip) for one in made}
    # The order is OpenRLHF's: the first answer of every prompt, then the second of every prompt.
    return [
        {"input": texts[place], "output": answers[place, sample]} for sample in range(n) for place in range(len(texts))
    ]


def prompt_of(order: BatchOrder, tokenizer: PreTrainedTokenizerBase, row: Row, origin: Origin) -> str:
    """Returns the prompt of a row as text, as the model gets it."""
    content = _column(row, order["input_key"], origin, "--input_key")
    if order["apply_chat_template"]:
        chat: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        text = _rendered(tokenizer, chat, origin, open_turn=True)
    else:
        text = _plain(order, content, origin)
    return text + order["csft_prompt"].strip() + " " if order["enable_csft"] else text


def _opens(order: BatchOrder, tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Returns whether to prepend a BOS token: only for `generate_vllm`, if the text does not start with one."""
    return order.task == "generate_vllm" and not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def _refuse_context(config: Any, longest: int, answer: int) -> None:
    context = getattr(text_config(config), "max_position_embeddings", None)
    if context is not None and longest + answer > context:
        raise Refusal.at(
            "--max_new_tokens",
            f"a prompt of {longest} tokens and an answer of {answer} are over the model's context of {context}",
            f"set --max_new_tokens to {context - longest} or less, or lower --prompt_max_len",
            code="over-context",
        )


# Scores ------------------------------------------------------------------------------------------------------------


def _scored(
    order: BatchOrder, rows: Sequence[tuple[Row, Origin]], device: Device, world: World, console: Console
) -> list[dict[str, Any]]:
    model = normalized_by_config(load_reward_model(order.model, device.torch_device(world.local_rank)))
    if order["bf16"]:
        import torch

        model.model.to(torch.bfloat16)
    texts = [answer_of(order, model.tokenizer, row, origin) for row, origin in rows]
    encoded = [encoded_answer(model.tokenizer, *text, order["max_len"]) for text in texts]
    kept = [number for number, ids in enumerate(encoded) if ids]
    if len(kept) < len(texts):
        why = f"prompt or answer is empty, or the answer does not fit into --max_len {order['max_len']}"
        console.warn(f"{len(texts) - len(kept):,} rows are skipped: {why}")
    if not kept:
        raise Refusal.at(
            "--dataset", "no row can be scored", "check --input_key, --output_key and --max_len", code="no-rows"
        )
    mine = kept[world.rank :: world.size]
    with console.task("Scoring", None):
        scores = dict(zip(mine, model.score([encoded[number] or [] for number in mine]), strict=True))
    scores = {number: score for part in world.gather(scores) for number, score in part.items()}
    scored: list[dict[str, Any]] = [{"input": texts[n][0], "output": texts[n][1], "reward": scores[n]} for n in kept]
    rewards = [row["reward"] for row in scored]
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    console.say(f"rewards: mean {statistics.fmean(rewards):.4f}, standard deviation {deviation:.4f}")
    return processed(order["post_processor"], scored, order["reward_template"], order["normalize_reward"])


def answer_of(order: BatchOrder, tokenizer: PreTrainedTokenizerBase, row: Row, origin: Origin) -> tuple[str, str]:
    """Returns prompt and answer. If there is no answer column, the last message of the chat is the answer."""
    content = _column(row, order["input_key"], origin, "--input_key")
    key = order["output_key"] or "output"
    answer = row.get(key)
    if answer is None and (order["output_key"] or not (order["apply_chat_template"] and isinstance(content, list))):
        raise Refusal.at(
            origin, f"has no column {key}", "name the answer column with --output_key", code="missing-column"
        )
    if not order["apply_chat_template"]:
        return _plain(order, content, origin), str(answer)
    if answer is None:
        chat, messages = content[:-1], content
    else:
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
        messages = [*chat, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
    prompt = _rendered(tokenizer, chat, origin, open_turn=True)
    text = _rendered(tokenizer, messages, origin, open_turn=False)
    if not text.startswith(prompt):
        raise Refusal.at(
            origin, "the chat template renders the prompt differently when an answer follows", code="template-unstable"
        )
    return prompt, text[len(prompt) :]


def encoded_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, limit: int) -> list[int] | None:
    """Returns at most `limit` tokens: the first tokens of prompt and answer, then an EOS. Returns None if no answer
    token fits."""
    if not prompt or not answer or len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) >= limit - 2:
        return None
    text, end = (prompt + answer).rstrip("\n"), str(tokenizer.eos_token)
    if not text.endswith(end):
        text += f" {end}"
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])[:limit]
    return [*ids[:-1], int(tokenizer.eos_token_id)]


def _column(row: Row, key: str, origin: Origin, flag: str) -> Any:
    if row.get(key) is None:
        raise Refusal.at(
            origin,
            f"has no column {key}; the existing columns are {', '.join(row)}",
            f"name the column with {flag}",
            code="missing-column",
        )
    return row[key]


def _plain(order: BatchOrder, content: Any, origin: Origin) -> str:
    if not isinstance(content, str):
        raise Refusal.at(origin, f"{order['input_key']} is not text", "set --apply_chat_template", code="not-text")
    form = order["input_template"]
    return form.replace("{}", content, 1) if form and "{}" in form else content


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: list[Message], origin: Origin, *, open_turn: bool) -> str:
    if not tokenizer.chat_template:
        raise Refusal.at(
            "--apply_chat_template", "the tokenizer has no chat template", "remove it", code="no-chat-template"
        )
    return render_prompt(tokenizer, chat, origin, open_turn=open_turn)


# Post-processors --------------------------------------------------------------------------------------------------

ScoredAnswer = Mapping[str, Any]
"""A row with the keys `input`, `output` and `reward`."""


def processed(
    kind: str | None, rows: Sequence[ScoredAnswer], template: str | None, normalize: bool
) -> list[dict[str, Any]]:
    if kind == "rs":
        return [
            {"input": best["input"], "output": best["output"], "reward": best["reward"]}
            for best, _ in _best_and_worst(rows)
        ]
    if kind == "iter_dpo":
        return [
            {
                "prompt": best["input"],
                "chosen": best["output"],
                "chosen_reward": best["reward"],
                "rejected": worst["output"],
                "rejected_reward": worst["reward"],
            }
            for best, worst in _best_and_worst(rows)
        ]
    if kind == "csft":
        return _conditional(_normalized(rows) if normalize else rows, template or TEMPLATE)
    return [dict(row) for row in rows]


def _best_and_worst(rows: Sequence[ScoredAnswer]) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Returns the best and the worst answer of each prompt; of answers with equal rewards, the first."""
    by_prompt: dict[str, list[ScoredAnswer]] = {}
    for row in rows:
        by_prompt.setdefault(row["input"], []).append(row)
    return [
        (max(group, key=lambda row: row["reward"]), min(group, key=lambda row: row["reward"]))
        for group in by_prompt.values()
    ]


def _normalized(rows: Sequence[ScoredAnswer]) -> list[dict[str, Any]]:
    """Normalizes rewards to mean 0 and standard deviation 1 (computed with the divisor n - 1)."""
    rewards = [row["reward"] for row in rows]
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
    if deviation == 0:
        raise Refusal.at(
            "--normalize_reward", "all rewards are equal, so the deviation is 0", "remove it", code="equal-rewards"
        )
    return [{**row, "reward": (row["reward"] - mean) / deviation} for row in rows]


def _conditional(rows: Sequence[ScoredAnswer], template: str) -> list[dict[str, Any]]:
    return [
        # The prompt is inserted last, so that a `{reward}` in the prompt is not replaced.
        {**row, "input": template.replace("{reward}", f"{row['reward']:.2f}").replace("{input}", row["input"])}
        for row in rows
    ]
