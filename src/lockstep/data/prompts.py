"""RL rows: questions with a checkable answer, and the prompts of an online run as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lockstep.data.chat import render_prompt
from lockstep.data.columns import ColumnFinder, filled, lookup
from lockstep.data.dataset import Kept, LoadedRows, RowCounts, load_rows
from lockstep.data.encoding import as_chat, formatted
from lockstep.data.fit import kept_span
from lockstep.data.read import RowSet
from lockstep.data.tokens import token_ids
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.schema import Data
from lockstep.types import Message, Origin, Prompt, Question, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class QuestionColumns:
    """Where a row holds its question. Without arguments: the RL schema, whose every column must be there."""

    prompt: str | None = None
    truth: str | None = None
    source: str = ""
    """What a row without a `data_source` comes from."""

    @classmethod
    def of(cls, data: Data, source: str) -> QuestionColumns:
        return cls(data.prompt_key, data.label_key, source)


RL_SCHEMA = QuestionColumns()


def read_questions(
    rows: RowSet, limit: int | None = None, columns: QuestionColumns = RL_SCHEMA, *, first: int = 0
) -> list[Question]:
    """`limit` rows (all by default) from the `first` on; rows that do not fit the schema are refused together."""
    questions: list[Question] = []
    problems: list[Problem] = []
    for i in range(first, len(rows) if limit is None else min(first + limit, len(rows))):
        try:
            questions.append(question_of(rows[i], rows.origin(i), columns))
        except Refusal as refusal:
            problems += refusal.problems
    refuse_all(problems, "rows")
    return questions


def question_of(row: Row, origin: Origin, columns: QuestionColumns = RL_SCHEMA) -> Question:
    """A row of the RL schema, or of other columns: a prompt, and a ground truth where one is named."""
    source = row.get("data_source") or columns.source if columns.prompt else lookup(row, "data_source", origin)
    prompt = filled(row, columns.prompt, origin) if columns.prompt else lookup(row, "prompt", origin)
    if columns.prompt and isinstance(prompt, str):
        prompt = as_chat(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise Refusal.at(origin, f"{columns.prompt or 'prompt'} is not a list of chat messages")
    extra = row.get("extra_info")
    return Question(str(source), prompt, _truth(row, origin, columns), origin, extra if isinstance(extra, dict) else {})


def _truth(row: Row, origin: Origin, columns: QuestionColumns) -> str:
    key = columns.truth or (None if columns.prompt else "reward_model.ground_truth")
    if key is None:
        return ""
    truth = lookup(row, key, origin)
    if truth is None or not str(truth).strip():
        raise Refusal.at(origin, f"{key} is empty")
    return str(truth)


class PromptCounts(RowCounts):
    """Of rows that are asked."""

    def sentence(self) -> str:
        return f"{self.tokens:,} in {self.rows:,} prompts; longest {self.longest}"


@dataclass
class PromptSet(LoadedRows[Prompt]):
    """The prompts of an online run."""

    WHAT: ClassVar[str] = "prompts"
    LIMIT: ClassVar[str] = "data.max_prompt_tokens"

    counts: PromptCounts = field(default_factory=PromptCounts)

    @property
    def data_sources(self) -> list[str]:
        return sorted({question.data_source for question in self.questions})

    @property
    def questions(self) -> list[Question]:
        return [prompt.question for prompt in self.items]


class PromptRows:
    """The rows of one source as prompts."""

    split_rows = 0

    def __init__(self, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase, limit: int):
        self.tokenizer, self.limit, self.data = tokenizer, limit, finder.data
        self.columns = QuestionColumns(
            finder.setting("prompt_key") or None, finder.setting("label_key") or None, finder.source.path
        )

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Prompt] | None]:
        question = question_of(row, origin, self.columns)
        check_prompt(self.tokenizer, question, self.data)
        asked = with_system(question, self.data.system)
        return [fit_prompt(asked, self.tokenizer, self.limit, self.data.overlong, self.data)]

    def found(self) -> str:
        return "prompts"


load_prompts = partial(load_rows, PromptSet, PromptRows)


def check_prompt(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> None:
    """Refuse what a template would answer with an error of its own, or render as something else than was meant."""
    if data is not None and data.template == "none":
        if data.system is not None:
            raise Refusal.at("data.system", "prompts without a chat template have no place for it", "remove it")
        if len(question.prompt) != 1:
            raise Refusal.at(
                question.origin, "the prompt is a chat of several turns, and data.template is none", "set it to auto"
            )
    elif not tokenizer.chat_template:
        raise Refusal.at(
            question.origin,
            "the prompt is a chat, but the tokenizer has no chat template",
            "use a model whose tokenizer has one, or put a chat_template.jinja into its folder",
        )
    for number, message in enumerate(question.prompt, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal.at(
                question.origin, f"message {number} of the prompt has no role", "write it as {role, content}"
            )
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise Refusal.at(
                question.origin, f"message {number} ({message['role']}) is empty or not text", "mend or remove the row"
            )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> list[int]:
    """The question as the model sees it, up to where its answer begins."""
    if data is not None and data.template == "none":
        return list(tokenizer(formatted(str(question.prompt[0]["content"]), data.prompt_format))["input_ids"])
    text = render_prompt(tokenizer, question.prompt, question.origin)
    return token_ids(tokenizer, text)


def fit_prompt(
    question: Question, tokenizer: PreTrainedTokenizerBase, limit: int, overlong: str, data: Data | None = None
) -> Kept[Prompt] | None:
    """The prompt within the limit, as `data.overlong` says; None when it is dropped. Its end is never cut."""
    ids = prompt_ids(tokenizer, question, data)
    if not ids:
        raise Refusal.at(question.origin, "the prompt has no tokens", "mend or remove the row")
    over = Refusal.at(
        question.origin,
        f"the prompt has {len(ids)} tokens, over the limit of {limit}",
        "raise data.max_prompt_tokens, or set data.overlong to drop or truncate_left",
    )
    span = kept_span(len(ids), limit, "error" if overlong == "truncate_right" else overlong, over)
    if span is None:
        return None
    kept = ids[span]
    return Kept(Prompt(question, kept), (len(kept),), truncated=len(kept) < len(ids))


def with_system(question: Question, system: str | None) -> Question:
    if system is None or any(message["role"] == "system" for message in question.prompt):
        return question
    opening: list[Message] = [{"role": "system", "content": system}]
    return replace(question, prompt=opening + question.prompt)
