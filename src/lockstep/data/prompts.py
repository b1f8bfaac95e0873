"""The prompts of an online run: RL rows as token ids, with what was counted on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.data.chat import render_prompt
from lockstep.data.dataset import RowCounts, fingerprint
from lockstep.data.questions import read_questions
from lockstep.data.read import RowSet, read_rows
from lockstep.errors import Problem, Refusal, shortened
from lockstep.recipe.schema import Data, Source
from lockstep.types import Message, Prompt, Question


class PromptCounts(RowCounts):
    """Of rows that are asked."""

    def sentence(self) -> str:
        return f"{self.tokens:,} in {self.rows:,} prompts; longest {self.longest}"


@dataclass
class PromptSet:
    """Prompts by source, and where they came from."""

    sources: list[list[Prompt]]
    weights: list[float] | None
    fingerprints: list[dict[str, object]]
    notes: list[str] = field(default_factory=list)
    counts: PromptCounts = field(default_factory=PromptCounts)

    @property
    def data_sources(self) -> list[str]:
        return sorted({prompt.question.data_source for source in self.sources for prompt in source})

    @property
    def questions(self) -> list[Question]:
        return [prompt.question for source in self.sources for prompt in source]


def load_prompts(
    sources: Sequence[Source],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
) -> PromptSet:
    """Read and encode every prompt before anything is generated; all bad rows are told together."""
    rowsets = opened if opened is not None else [read_rows(source.path, reader=data.reader) for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    prompts = PromptSet([], weights or None, [fingerprint(rows) for rows in rowsets])
    problems: list[Problem] = []
    for source, rows in zip(sources, rowsets, strict=True):
        kept: list[Prompt] = []
        try:
            questions = read_questions(rows)
        except Refusal as refusal:
            problems += refusal.problems
            continue
        for question in questions:
            try:
                check_prompt(tokenizer, question)
                prompt = fit_prompt(with_system(question, data.system), tokenizer, limit, data.overlong, prompts.counts)
            except Refusal as refusal:
                problems += refusal.problems
                continue
            finally:
                advance(1)
            if prompt is not None:
                kept.append(prompt)
        prompts.sources.append(kept)
        prompts.notes.append(f"{source.path}: {len(rows):,} rows as prompts")
        if not kept and not problems:
            problems.append(
                Problem(source.path, f"all prompts are over {limit} tokens", "raise data.max_prompt_tokens")
            )
    if problems:
        raise Refusal(shortened(problems, "rows"))
    return prompts


def check_prompt(tokenizer: PreTrainedTokenizerBase, question: Question) -> None:
    """Refuse what a template would answer with an error of its own, or render as something else than was meant."""
    if not tokenizer.chat_template:
        raise Refusal.at(
            str(question.origin),
            "the prompt is a chat, but the tokenizer has no chat template",
            "use a model whose tokenizer has one, or put a chat_template.jinja into its folder",
        )
    for number, message in enumerate(question.prompt, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal.at(
                str(question.origin), f"message {number} of the prompt has no role", "write it as {role, content}"
            )
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise Refusal.at(
                str(question.origin),
                f"message {number} ({message['role']}) is empty or not text",
                "mend or remove the row",
            )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    """The question as the model sees it, up to where its answer begins."""
    text = render_prompt(tokenizer, question.prompt, question.origin)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def fit_prompt(
    question: Question, tokenizer: PreTrainedTokenizerBase, limit: int, overlong: str, counts: PromptCounts
) -> Prompt | None:
    """The prompt within the limit, as `data.overlong` says; None when it is dropped."""
    ids = prompt_ids(tokenizer, question)
    if not ids:
        raise Refusal.at(str(question.origin), "the prompt has no tokens", "mend or remove the row")
    if len(ids) > limit:
        if overlong == "drop":
            counts.dropped += 1
            return None
        if overlong != "truncate_left":
            raise Refusal.at(
                str(question.origin),
                f"the prompt has {len(ids)} tokens, over the limit of {limit}",
                "raise data.max_prompt_tokens, or set data.overlong to drop or truncate_left",
            )
        counts.truncated += 1
        ids = ids[-limit:]
    counts.rows += 1
    counts.tokens += len(ids)
    counts.longest = max(counts.longest, len(ids))
    return Prompt(question, ids)


def with_system(question: Question, system: str | None) -> Question:
    if system is None or any(message["role"] == "system" for message in question.prompt):
        return question
    opening: list[Message] = [{"role": "system", "content": system}]
    values: dict[str, Any] = {**vars(question), "prompt": opening + question.prompt}
    return Question(**values)
