"""Reads RL rows: a prompt with a ground truth, which may be the final answer of a worked solution."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lockstep.data.dataset import LoadedRows, RowRequest, load_rows
from lockstep.data.encode.chat import refuse_no_content
from lockstep.data.encode.chat_text import TemplateInputs, render_prompt
from lockstep.data.encode.columns import CHATS, NO_EXTRA_COLUMNS, PROMPTS, ColumnFinder, ExtraColumns, filled, lookup
from lockstep.data.encode.dialogue import SpecialText
from lockstep.data.encode.encoding import OverLimit, after_system, as_chat, formatted, kept_span, written
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import image_placeholder, with_image_surroundings
from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.data.row_reader import Kept, RowCounts
from lockstep.data.sources.read import RowSet
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Origin, Prompt, Question, Row
from lockstep.vision.images import COLUMNS as IMAGE_COLUMNS
from lockstep.vision.spans import cut_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Matches `\boxed{`, an escaped character, or a brace.
_TOKEN = re.compile(r"\\f?boxed\s*\{|\\.|[{}]", re.DOTALL)
MARK = "####"
_NUMBER = re.compile(r"[-+$]?[\d,]+(\.\d+)?")
GSM8K, MATH, MATH_500 = "openai/gsm8k", "lighteval/MATH", "HuggingFaceH4/MATH-500"


@dataclass(frozen=True)
class Truth:
    """The ground truth of a row. `source` is the data set whose answer format was recognised, or empty if none was."""

    value: str
    source: str = ""


def final_answer(worked: str) -> Truth:
    r"""Returns the final answer of a worked solution: after `####` (GSM8K), in `\boxed{...}` (MATH), or the full text.

    `####` must be on the last line. If lines follow, `####` is a Markdown heading and not an answer mark.
    """
    before, mark, final = worked.strip().rpartition(MARK)
    final = final.strip()
    if mark and final and "\n" not in final and not before.endswith("#"):
        return Truth(final.replace(",", "") if _NUMBER.fullmatch(final) else final, GSM8K)
    boxed = last_boxed(worked)
    return Truth(worked.strip()) if boxed is None else Truth(boxed, MATH)


def answer_with_solution(answer: str, solution: object) -> Truth:
    r"""Returns the final answer. If the answer is plain text and the row's solution ends in `\boxed{...}`, the row is
    in the format of MATH-500."""
    truth = final_answer(answer)
    boxed = not truth.source and isinstance(solution, str) and final_answer(solution).source == MATH
    return Truth(truth.value, MATH_500) if boxed else truth


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the `\boxed{...}` that closes last, with balanced braces. Returns None if the text has no
    box."""
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


REWARD_FIELDS = frozenset({"ground_truth", "data_source"})
"""Fields of a row that rewards can read."""
COLUMNS = "columns"
"""A further reward field: all columns of the row, which a reward function with TRL's signature gets."""
# Columns that may hold the ground truth in rows without verl's RL schema, in order of preference.
TRUTHS = ("ground_truth", "answer", "solution")
_SCHEMA_TRUTH = "reward_model.ground_truth"


@dataclass(frozen=True)
class QuestionColumns:
    """Column names of the question (prompt and ground truth) of an RL row."""

    prompt: str = "prompt"
    truth: str = _SCHEMA_TRUTH
    """Column of the ground truth. An empty string means that the rows have no ground truth."""
    source: str = ""
    """The `data_source` of rows that have no `data_source` column."""
    required: frozenset[str] = frozenset()
    """The fields of `REWARD_FIELDS` that a row must have."""
    worked: bool = False
    """Whether the ground truth may be the final answer of a worked solution."""
    extra: ExtraColumns = NO_EXTRA_COLUMNS
    keep: bool = False
    """Whether a question keeps all columns of its row."""

    def description(self) -> str:
        return f"{self.prompt}{self.extra.description()}; " + (
            f"ground truth from {self.truth}" if self.truth else "no ground truth"
        )


def find_question_columns(finder: ColumnFinder, reward_fields: frozenset[str] = REWARD_FIELDS) -> QuestionColumns:
    """Finds the columns of RL rows: by the keys of the recipe, else by verl's RL schema, else by common column names.

    `reward_fields` are the fields that the rewards read.
    """
    prompt, truth = finder.setting("prompt_key"), finder.setting("label_key")
    named = frozenset({"ground_truth"} if truth else ())  # a column that the recipe names is required
    path, schema = finder.source.path, bool({"data_source", "reward_model"} & set(finder.available))
    if prompt:
        extra = finder.extra_columns(prompt, truth)
        return QuestionColumns(prompt, truth, path, named, extra=extra, keep=COLUMNS in reward_fields)
    prompt = "prompt" if schema else finder.first_column((*PROMPTS, *CHATS))
    if not prompt:
        raise finder.unknown("hold the prompts", "set data.prompt_key, and data.label_key for the ground truth")
    worked = False
    if not truth and "reward_model" in finder.available:
        truth = _SCHEMA_TRUTH
    elif not truth:
        truth, worked = finder.first_column(TRUTHS), True
    if not truth and "ground_truth" in reward_fields:
        raise finder.unknown("hold the ground truth, which the rewards read", "set data.label_key")
    required = named | (reward_fields & REWARD_FIELDS if schema else reward_fields & {"ground_truth"})
    extra = finder.extra_columns(prompt, truth)
    return QuestionColumns(prompt, truth, path, required, worked, extra, COLUMNS in reward_fields)


def read_questions(
    rows: RowSet,
    limit: int | None = None,
    columns: QuestionColumns | None = None,
    *,
    first: int = 0,
    images: RowImages | None = None,
) -> list[Question]:
    """Reads `limit` rows (default: all) starting at row `first`. All invalid rows are reported together. If `columns`
    is None, the columns are found by name. Without `images`, rows with images are refused."""
    columns = columns or _named_columns(rows)
    questions: list[Question] = []
    problems: list[Problem] = []
    for i in range(first, len(rows) if limit is None else min(first + limit, len(rows))):
        try:
            questions.append(_question(rows[i], rows.origin(i), columns, images)[0])
        except Refusal as refusal:
            problems += refusal.problems
    refuse_all(problems, "rows")
    return questions


def _named_columns(rows: RowSet) -> QuestionColumns:
    source = Source(path=rows.files[0].name)
    try:
        return find_question_columns(ColumnFinder(source, Data(train=[source]), rows.columns))
    except Refusal as refusal:
        # A recipe of an offline method has no keys for the columns of RL rows, so the remedy is to rename columns.
        remedy = f"rename the prompt column to prompt, and the ground truth column to one of {', '.join(TRUTHS)}"
        raise Refusal([Problem(p.where, p.why, remedy, code=p.code) for p in refusal.problems]) from refusal


def _question(
    row: Row, origin: Origin, columns: QuestionColumns, images: RowImages | None = None
) -> tuple[Question, Truth]:
    """Returns the question of a row: a prompt with its images, and a ground truth if there is one."""
    kept = {**row, "prompt": filled(row, columns.prompt, origin)} if columns.keep else {}
    row, refs = (row, []) if images is None else images.read(row, columns.extra.prompts(columns.prompt), origin)
    asked = filled(row, columns.prompt, origin)
    turns = columns.extra.prompt(asked, columns.prompt, row, origin)
    truth = _truth(row, origin, columns)
    source = row.get("data_source")
    if source is None and "data_source" in columns.required:
        source = lookup(row, "data_source", origin)
    extra = row.get("extra_info")
    if not isinstance(extra, dict):
        extra = {"answer": str(row[columns.truth])} if truth.source else {}
    inputs = columns.extra.inputs(row, origin)
    named = str(source or truth.source or columns.source)
    tools, arguments = inputs.tools or (), inputs.arguments
    return Question(named, as_chat(turns), truth.value, origin, extra, tools, arguments, kept, tuple(refs)), truth


def _truth(row: Row, origin: Origin, columns: QuestionColumns) -> Truth:
    if not columns.truth:
        return Truth("")
    try:
        value = lookup(row, columns.truth, origin)
        # Table formats such as parquet may store a missing value as NaN, and NaN != NaN.
        if value is None or not str(value).strip() or value != value:
            raise Refusal.at(
                origin, f"{columns.truth} is empty", "remove the row or fill in the value", code="empty-field"
            )
    except Refusal:
        if "ground_truth" in columns.required:
            raise
        return Truth("")
    if columns.worked and isinstance(value, str):
        return answer_with_solution(value, row.get("solution") if columns.truth != "solution" else None)
    # Lists and objects are passed to rewards as JSON text.
    return Truth(json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value))


class PromptCounts(RowCounts):
    """Row counts of prompts."""

    def sentence(self) -> str:
        return f"{self.tokens:,} in {self.rows:,} prompts; longest {self.longest}"


@dataclass
class PromptSet(LoadedRows[Prompt]):
    """The prompts of an online run."""

    WHAT: ClassVar[str] = "prompts"
    LIMIT: ClassVar[str] = "data.max_prompt_tokens"

    counts: PromptCounts = field(default_factory=PromptCounts)
    added: int = 0
    """The number of tokens that an environment adds to a prompt: tool schemas and messages, measured on one row."""

    @property
    def longest(self) -> int:
        return super().longest if self.streamed else self.counts.longest + self.added

    @property
    def sentence(self) -> str:
        more = f", and {self.added} for tools and messages of the environment" if self.added else ""
        return super().sentence + more

    @property
    def data_sources(self) -> list[str]:
        return sorted({question.data_source for question in self.questions})

    @property
    def questions(self) -> list[Question]:
        return [prompt.question for prompt in self.items]


class PromptRows:
    """Reads the rows of one source as prompts. `reward_fields` are the fields that the rewards read. `images` is the
    model folder whose image processor reads the images of the rows (`model.vision`)."""

    split_rows = unusable = special_rows = unseparated_rows = 0

    def __init__(
        self,
        finder: ColumnFinder,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        *,
        reward_fields: frozenset[str] = REWARD_FIELDS,
        images: str | None = None,
    ):
        self.tokenizer, self.limit, self.data, self.finder = tokenizer, limit, finder.data, finder
        self.special_text = SpecialText(tokenizer)
        self.images = None if images is None else RowImages(images, tokenizer, finder.source.path)
        self.columns = find_question_columns(finder, reward_fields)
        self.tally: Counter[str] = Counter()
        """Number of rows per answer format. A format is named by the data set that uses it, such as GSM8K."""

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Prompt] | None]:
        question, truth = _question(row, origin, self.columns, self.images)
        self.tally[truth.source] += 1
        check_prompt(self.tokenizer, question, self.data)
        if self.data.template != "none":
            texts = question.prompt if self.images is None else self.images.without_placeholders(question.prompt)
            self.special_rows += self.special_text.inside([texts])
        formatted_question = with_format(with_system(question, self.data.system), self.data)
        overlong = self.data.overlong
        return [fit_prompt(formatted_question, self.tokenizer, self.limit, overlong, self.data, self.images)]

    def found(self) -> str:
        several = len(self.tally) > 1
        how = "".join(
            f", {_WORKED[kind]}" + (f" in {count:,} rows" if several else "") + (f" (as {kind})" if kind else "")
            for kind, count in sorted(self.tally.items())
            if kind or several
        )
        columns = self.columns
        read = (columns.prompt, columns.truth, *columns.extra.columns, "data_source", "reward_model", "extra_info")
        read += () if self.images is None else IMAGE_COLUMNS
        unread = "" if columns.keep else self.finder.unread(*read)  # a TRL reward function gets all columns
        return f"prompts ({columns.description()}{how}){unread}"


_WORKED = {
    "": "full text",
    GSM8K: f"after its {MARK}",
    MATH: r"in its last \boxed{}",
    MATH_500: r"the full text, in rows with a solution in \boxed{}",
}


def load_prompts(
    sources: Sequence[Source],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
    *,
    reward_fields: frozenset[str] = REWARD_FIELDS,
    images: str | None = None,
) -> PromptSet:
    """Returns the prompts of all sources. `reward_fields` and `images` are those of `PromptRows`."""
    open_rows = partial(PromptRows, reward_fields=reward_fields, images=images)
    return load_rows(RowRequest(PromptSet, open_rows, sources, data, tokenizer, limit), advance, opened)


def check_prompt(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> None:
    """Refuses prompts that a chat template would reject or render wrongly."""
    if data is not None and data.template == "none":
        if data.system is not None:
            raise Refusal.at(
                "data.system",
                "is set, but prompts without a chat template cannot have a system message",
                "remove it",
                code="no-chat-template",
            )
        if len(question.prompt) != 1 or question.tools or question.template_arguments:
            what = "is a chat of several turns" if len(question.prompt) != 1 else "has tools or template arguments"
            raise Refusal.at(
                question.origin,
                f"the prompt {what}, but data.template is none",
                "set data.template to auto",
                code="no-chat-template",
            )
    elif not tokenizer.chat_template:
        raise Refusal.at(
            question.origin,
            "the prompt is a chat, but the tokenizer has no chat template",
            "set data.template, or use a model whose tokenizer has a chat template",
            code="no-chat-template",
        )
    if question.prompt[-1]["role"] == "assistant":
        raise Refusal.at(
            question.origin,
            "the prompt ends with an assistant turn, so the model would answer its own turn",
            "fix or remove the row",
            code="prompt-ends-with-assistant",
        )
    for number, message in enumerate(question.prompt, 1):
        refuse_no_content(message, number, question.origin)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None) -> list[int]:
    """Returns the token ids of the prompt, ending with the generation prompt."""
    if data is not None and data.template == "none":
        text = formatted(str(question.prompt[0]["content"]), data.prompt_format)
        return list(tokenizer(with_image_surroundings(tokenizer, text))["input_ids"])
    inputs = TemplateInputs(question.tools, question.template_arguments)
    text = render_prompt(tokenizer, question.prompt, question.origin, inputs)
    refuse_dropped_by_template(text, question.prompt, question.tools, question.origin, image_placeholder(tokenizer))
    return token_ids(tokenizer, text)


def encoded_prompt(
    tokenizer: PreTrainedTokenizerBase, question: Question, data: Data | None = None, images: RowImages | None = None
) -> Prompt:
    """Returns the prompt of a question, with the placeholder tokens of its images."""
    ids = prompt_ids(tokenizer, question, data)
    return Prompt(question, ids) if images is None else images.prompt(question, ids)


def fit_prompt(
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    overlong: str,
    data: Data | None = None,
    images: RowImages | None = None,
) -> Kept[Prompt] | None:
    """Applies `data.overlong` to a prompt over the token limit. Returns None if the prompt is dropped. The end of a
    prompt is never cut, and no image is cut."""
    prompt = encoded_prompt(tokenizer, question, data, images)
    ids = prompt.ids
    if not ids:
        raise Refusal.at(question.origin, "the prompt has no tokens", "fix or remove the row", code="empty-prompt")
    # Without data.max_prompt_tokens, the limit is the model's context or batch.tokens, minus the response length.
    is_set = data is not None and data.max_prompt_tokens is not None
    way = (
        "raise data.max_prompt_tokens"
        if is_set
        else "lower rollout.max_tokens, because prompt and response share one limit"
    )
    over = OverLimit.at(
        question.origin,
        f"the prompt has {len(ids)} tokens, over the limit of {limit}",
        f"{way}, or set data.overlong to drop or truncate_left",
        code="row-too-long",
    )
    span = kept_span(len(ids), limit, "error" if overlong == "truncate_right" else overlong, over)
    if span is None:
        return None
    if any(image.start < span.start for image in prompt.images):
        raise OverLimit.at(
            question.origin,
            f"the prompt has {len(ids)} tokens, and {overlong} to {limit} tokens would cut an image",
            f"{way}, or set data.overlong to drop",
            code="row-too-long",
        )
    kept = ids[span]
    fitted = Prompt(question, kept, cut_images(prompt.images, span))
    return Kept(fitted, (len(kept),), truncated=len(kept) < len(ids))


def with_system(question: Question, system: str | None) -> Question:
    return replace(question, prompt=after_system(question.prompt, system))


def with_format(question: Question, data: Data | None) -> Question:
    """Apply `data.prompt_format`. Without a chat template, `prompt_ids` applies `data.prompt_format` instead."""
    if data is None or data.prompt_format is None or data.template == "none":
        return question
    return replace(question, prompt=written(question.prompt, data.prompt_format, question.origin))
