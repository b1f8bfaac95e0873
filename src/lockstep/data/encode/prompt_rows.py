"""RL rows: prompts with a checkable answer, and the final answer of a worked solution."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lockstep.data.dataset import Kept, LoadedRows, RowCounts, load_rows
from lockstep.data.encode.chat import refuse_no_content, render_prompt
from lockstep.data.encode.columns import CHATS, NOTHING, PROMPTS, Beside, ColumnFinder, filled, lookup
from lockstep.data.encode.dialogue import SpecialText
from lockstep.data.encode.encoding import OverLimit, after_system, as_chat, formatted, kept_span, written
from lockstep.data.encode.template_checks import refuse_vanished
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.data.sources.read import RowSet
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Origin, Prompt, Question, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The final answer of a worked one: GSM8K's after `####`, MATH's in `\boxed{...}`.

# An opening box, an escaped character (which opens and closes nothing), or a brace.
_TOKEN = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
MARK = "####"
_NUMBER = re.compile(r"[-+$]?[\d,]+(\.\d+)?")
GSM8K, MATH, MATH_500 = "openai/gsm8k", "lighteval/MATH", "HuggingFaceH4/MATH-500"


@dataclass(frozen=True)
class Truth:
    """What a right answer says, and the data set whose rows are written so; empty where nothing shows it."""

    value: str
    source: str = ""


def final_answer(worked: str) -> Truth:
    """The answer at the end of a worked one; a text without such an end is the answer itself.

    The mark stands on the last line, alone with the answer: with lines after it, it is a heading.
    """
    before, mark, final = worked.strip().rpartition(MARK)
    final = final.strip()
    if mark and final and "\n" not in final and not before.endswith("#"):
        return Truth(final.replace(",", "") if _NUMBER.fullmatch(final) else final, GSM8K)
    boxed = last_boxed(worked)
    return Truth(worked.strip()) if boxed is None else Truth(boxed, MATH)


def answer_beside(answer: str, solution: object) -> Truth:
    r"""An answer, worked or bare; beside a solution that ends in `\boxed{...}` it is written as those of MATH-500."""
    truth = final_answer(answer)
    boxed = not truth.source and isinstance(solution, str) and final_answer(solution).source == MATH
    return Truth(truth.value, MATH_500) if boxed else truth


def last_boxed(text: str) -> str | None:
    r"""What stands in the `\boxed{...}` that closes last, braces within it being paired. None without one."""
    found = None
    starts: list[int | None] = []
    for token in _TOKEN.finditer(text):
        if token.group() == "{":
            starts.append(None)
        elif token.group() == "}":
            start = starts.pop() if starts else None
            found = found if start is None else text[start : token.start()].strip()
        elif token.group().endswith("{") and token.group() != r"\{":
            starts.append(token.end())
    return found or None


# RL rows: questions with a checkable answer, and the prompts of an online run as token ids.

ASKED = frozenset({"ground_truth", "data_source"})
# Names of the ground truth in rows that are not of the RL schema, looked for in this order.
TRUTHS = ("ground_truth", "answer", "solution")
_SCHEMA_TRUTH = "reward_model.ground_truth"


@dataclass(frozen=True)
class QuestionColumns:
    """Where a row holds its question."""

    prompt: str = "prompt"
    truth: str = _SCHEMA_TRUTH
    """Empty where there is none."""
    source: str = ""
    """What a row without a `data_source` comes from."""
    asked: frozenset[str] = frozenset()
    """Those of `ground_truth` and `data_source` that a row must have."""
    worked: bool = False
    """Whether the ground truth may be the end of a worked answer."""
    beside: Beside = NOTHING

    def told(self) -> str:
        return f"{self.prompt}{self.beside.told()}; " + (
            f"ground truth from {self.truth}" if self.truth else "no ground truth"
        )


def find_question_columns(finder: ColumnFinder, asked: frozenset[str] = ASKED) -> QuestionColumns:
    """The columns that settings name, else the RL schema's, else those that other projects' rows have.

    `asked` is what the rewards read of a row.
    """
    prompt, truth = finder.setting("prompt_key"), finder.setting("label_key")
    named = frozenset({"ground_truth"} if truth else ())  # what a setting names must be there
    path, schema = finder.source.path, bool({"data_source", "reward_model"} & set(finder.available))
    if prompt:
        return QuestionColumns(prompt, truth, path, named, beside=finder.beside(prompt, truth))
    prompt = "prompt" if schema else finder.known((*PROMPTS, *CHATS))
    if not prompt:
        raise finder.unknown("hold the prompts", "set data.prompt_key, and data.label_key for the ground truth")
    worked = False
    if not truth and "reward_model" in finder.available:
        truth = _SCHEMA_TRUTH
    elif not truth:
        truth, worked = finder.known(TRUTHS), True
    if not truth and "ground_truth" in asked:
        raise finder.unknown("hold the ground truth, which the rewards read", "set data.label_key")
    must = named | (asked if schema else asked - {"data_source"})
    return QuestionColumns(prompt, truth, path, must, worked, finder.beside(prompt, truth))


def read_questions(
    rows: RowSet,
    limit: int | None = None,
    columns: QuestionColumns | None = None,
    *,
    first: int = 0,
) -> list[Question]:
    """`limit` rows (all by default) from the `first` on; rows that do not fit are refused together. Without `columns`
    they are found by the names that rows have, and nothing can be set."""
    columns = columns or _named_columns(rows)
    questions: list[Question] = []
    problems: list[Problem] = []
    for i in range(first, len(rows) if limit is None else min(first + limit, len(rows))):
        try:
            questions.append(question_of(rows[i], rows.origin(i), columns))
        except Refusal as refusal:
            problems += refusal.problems
    refuse_all(problems, "rows")
    return questions


def _named_columns(rows: RowSet) -> QuestionColumns:
    source = Source(path=rows.files[0].name)
    try:
        return find_question_columns(ColumnFinder(source, Data(train=[source]), rows.columns))
    except Refusal as refusal:
        # A recipe of an offline method has no keys for them.
        remedy = f"name that of the prompts prompt, and that of the ground truth one of {', '.join(TRUTHS)}"
        raise Refusal([Problem(p.where, p.why, remedy) for p in refusal.problems]) from refusal


def question_of(row: Row, origin: Origin, columns: QuestionColumns) -> Question:
    """A row as a question: a prompt, and a ground truth where there is one."""
    return _question(row, origin, columns)[0]


def _question(row: Row, origin: Origin, columns: QuestionColumns) -> tuple[Question, Truth]:
    turns = columns.beside.prompt(filled(row, columns.prompt, origin), columns.prompt, row, origin)
    truth = _truth(row, origin, columns)
    source = row.get("data_source")
    if source is None and "data_source" in columns.asked:
        source = lookup(row, "data_source", origin)
    extra = row.get("extra_info")
    if not isinstance(extra, dict):
        extra = {"answer": str(row[columns.truth])} if truth.source else {}
    tools = columns.beside.tools_of(row, origin) or ()
    named = str(source or truth.source or columns.source)
    return Question(named, as_chat(turns), truth.value, origin, extra, tools), truth


def _truth(row: Row, origin: Origin, columns: QuestionColumns) -> Truth:
    if not columns.truth:
        return Truth("")
    try:
        value = lookup(row, columns.truth, origin)
        # What is not a number is how tables write that there is nothing.
        if value is None or not str(value).strip() or value != value:
            raise Refusal.at(origin, f"{columns.truth} is empty", "remove the row or fill it in")
    except Refusal:
        if "ground_truth" in columns.asked:
            raise
        return Truth("")
    if columns.worked and isinstance(value, str):
        return answer_beside(value, row.get("solution") if columns.truth != "solution" else None)
    # Lists and objects reach a reward as JSON, which it can read, as all that is text.
    return Truth(json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value))


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
    """The rows of one source as prompts. `asked` is what the rewards read of a row."""

    split_rows = unusable = special_rows = unseparated_rows = 0

    def __init__(
        self,
        finder: ColumnFinder,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        *,
        asked: frozenset[str] = ASKED,
    ):
        self.tokenizer, self.limit, self.data, self.finder = tokenizer, limit, finder.data, finder
        self.special_text = SpecialText(tokenizer)
        self.columns = find_question_columns(finder, asked)
        self.tally: Counter[str] = Counter()
        """Rows by the data set whose way of writing a worked answer they have."""

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Prompt] | None]:
        question, truth = _question(row, origin, self.columns)
        self.tally[truth.source] += 1
        check_prompt(self.tokenizer, question, self.data)
        if self.data.template != "none":
            self.special_rows += self.special_text.inside([question.prompt])
        asked = with_format(with_system(question, self.data.system), self.data)
        return [fit_prompt(asked, self.tokenizer, self.limit, self.data.overlong, self.data)]

    def found(self) -> str:
        several = len(self.tally) > 1
        how = "".join(
            f", {_WORKED[kind]}" + (f" in {count:,} rows" if several else "") + (f" (as {kind})" if kind else "")
            for kind, count in sorted(self.tally.items())
            if kind or several
        )
        columns = self.columns
        read = (columns.prompt, columns.truth, *columns.beside.columns, "data_source", "reward_model", "extra_info")
        return f"prompts ({columns.told()}{how}){self.finder.unread(*read)}"


_WORKED = {
    "": "whole",
    GSM8K: f"after its {MARK}",
    MATH: r"in its last \boxed{}",
    MATH_500: r"whole, beside a solution with \boxed{}",
}


def load_prompts(
    sources: Sequence[Source],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
    *,
    asked: frozenset[str] = ASKED,
) -> PromptSet:
    """The prompts of all sources; `asked` is what the rewards read of a row."""
    return load_rows(PromptSet, partial(PromptRows, asked=asked), sources, data, tokenizer, limit, advance, opened)


def check_prompt(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> None:
    """Refuse what a template would answer with an error of its own, or render as something else than was meant."""
    if data is not None and data.template == "none":
        if data.system is not None:
            raise Refusal.at("data.system", "prompts without a chat template have no place for it", "remove it")
        if len(question.prompt) != 1 or question.tools:
            what = "has tools" if question.tools else "is a chat of several turns"
            raise Refusal.at(question.origin, f"the prompt {what}, and data.template is none", "set it to auto")
    elif not tokenizer.chat_template:
        raise Refusal.at(
            question.origin,
            "the prompt is a chat, but the tokenizer has no chat template",
            "name one with data.template, or use a model whose tokenizer has one",
        )
    if question.prompt[-1]["role"] == "assistant":
        raise Refusal.at(
            question.origin, "the prompt ends with the assistant, who would answer itself", "mend or remove the row"
        )
    for number, message in enumerate(question.prompt, 1):
        refuse_no_content(message, number, question.origin)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> list[int]:
    """The question as the model sees it, up to where its answer begins."""
    if data is not None and data.template == "none":
        return list(tokenizer(formatted(str(question.prompt[0]["content"]), data.prompt_format))["input_ids"])
    text = render_prompt(tokenizer, question.prompt, question.origin, question.tools)
    refuse_vanished(text, question.prompt, question.tools, question.origin)
    return token_ids(tokenizer, text)


def fit_prompt(
    question: Question, tokenizer: PreTrainedTokenizerBase, limit: int, overlong: str, data: Data | None = None
) -> Kept[Prompt] | None:
    """The prompt within the limit, as `data.overlong` says; None when it is dropped. Its end is never cut."""
    ids = prompt_ids(tokenizer, question, data)
    if not ids:
        raise Refusal.at(question.origin, "the prompt has no tokens", "mend or remove the row")
    # Without the key the limit is what the response leaves of the model's context or of batch.tokens.
    is_set = data is not None and data.max_prompt_tokens is not None
    way = "raise data.max_prompt_tokens" if is_set else "lower rollout.max_tokens, which the prompt shares a limit with"
    over = OverLimit.at(
        question.origin,
        f"the prompt has {len(ids)} tokens, over the limit of {limit}",
        f"{way}, or set data.overlong to drop or truncate_left",
    )
    span = kept_span(len(ids), limit, "error" if overlong == "truncate_right" else overlong, over)
    if span is None:
        return None
    kept = ids[span]
    return Kept(Prompt(question, kept), (len(kept),), truncated=len(kept) < len(ids))


def with_system(question: Question, system: str | None) -> Question:
    return replace(question, prompt=after_system(question.prompt, system))


def with_format(question: Question, data: Data | None) -> Question:
    """The question in the text of `data.prompt_format`; without a chat template it is written when it is encoded."""
    if data is None or data.prompt_format is None or data.template == "none":
        return question
    return replace(question, prompt=written(question.prompt, data.prompt_format, question.origin))
