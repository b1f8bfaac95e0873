"""KTO rows: responses labelled desirable or undesirable. A preference pair gives one response of each label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.builtin_templates import version_note
from lockstep.data.encode.columns import CHATS, NO_EXTRA_COLUMNS, PROMPTS, ColumnFinder, ExtraColumns, filled, lookup
from lockstep.data.encode.dialogue import as_turns, divide
from lockstep.data.encode.encoding import Encoding, fit_responses, last_trained, refuse_equal
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.preference_rows import (
    RankingColumns,
    find_pair_columns,
    pair_names,
    pair_of,
    prompt_description,
)
from lockstep.data.encode.responses import ResponseEncoder, ResponseRows
from lockstep.data.row_reader import Kept
from lockstep.errors import Refusal
from lockstep.types import Example, LabeledResponse, Origin, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RESPONSES = ("completion", "response", "output")
# Accepted labels. 1 == 1.0 == True in Python, so the booleans are accepted, too.
VERDICTS: dict[Any, bool] = {1: True, 0: False, -1: False}
SPELLED = {"true": True, "false": False, "1": True, "+1": True, "0": False, "-1": False}


@dataclass(frozen=True)
class JudgedColumns:
    """The column of the label, and the columns of prompt and response, or of a chat that ends with the response."""

    label: str
    prompt: str = ""
    response: str = ""
    messages: str = ""
    extra: ExtraColumns = NO_EXTRA_COLUMNS

    @property
    def prompts(self) -> tuple[str, ...]:
        """The columns of the prompt."""
        return self.extra.prompts(self.prompt)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.label, self.prompt, self.response, self.messages, *self.extra.columns)


def find_judged_columns(finder: ColumnFinder) -> JudgedColumns | RankingColumns:
    """Finds the columns, by settings or by name: of labelled responses, of labelled chats, or of preference pairs."""
    label = finder.find("label_key", ("label", "kto_tag"))
    pair = find_pair_columns(finder)
    if pair and (not label or finder.setting("chosen_key")):
        return pair
    for key in ("chosen_key", "rejected_key"):
        if finder.setting(key):
            raise finder.unknown("hold the pairs", "set both data.chosen_key and data.rejected_key")
    prompt, response = finder.find("prompt_key", PROMPTS), finder.find("response_key", RESPONSES)
    messages = finder.find("messages_key", CHATS)
    wants_chat = bool(finder.setting("messages_key")) and not finder.setting("response_key")
    if label and prompt and response and not wants_chat:
        return JudgedColumns(
            label, prompt=prompt, response=response, extra=finder.extra_columns(prompt, response, label)
        )
    if label and messages:
        return JudgedColumns(label, messages=messages, extra=finder.extra_columns(messages, label))
    if pair:
        return pair
    raise finder.unknown("hold the labelled responses", "set data.prompt_key, data.response_key and data.label_key")


class LabeledRows(ResponseRows):
    """Reads the rows of one source as labelled responses, and counts the labels."""

    unusable = 0

    def __init__(
        self, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: str | None = None
    ):
        """`images` is the model folder whose image processor reads the images of the rows (`model.vision`)."""
        self.columns, self.limit, self.overlong = find_judged_columns(finder), limit, finder.data.overlong
        self.encode = ResponseEncoder(Encoding(tokenizer, finder.data), RowImages.of(images, finder, tokenizer))
        self.finder = finder
        self.tally: Counter[str] = Counter()

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[LabeledResponse] | None]:
        columns = self.columns
        if isinstance(columns, RankingColumns):
            row, refs = self.read_images(row, columns.prompts, columns.pair, "", origin)
            names, responses = pair_of(row, columns, origin)
            divided = self.encode.as_chats(*columns.divided(row, responses, names, origin), self.tally)
            examples = self.encode(*divided, origin, columns.extra.inputs(row, origin), self.tally)
            examples = self.with_images(examples, refs)
            refuse_equal(examples, names)
            verdicts = [True, False]
        else:
            names, verdicts = [columns.response or columns.messages], [verdict(row, columns.label, origin)]
            row, refs = self.read_images(row, columns.prompts, [columns.messages or columns.response], "", origin)
            prompt, response = _answered(row, columns, origin)
            divided = divide(prompt, [response], names, origin)
            examples = self.encode(*divided, origin, columns.extra.inputs(row, origin), self.tally)
            examples = self.with_images(examples, refs)
        kept = [self._kept(*parts) for parts in zip(examples, names, verdicts, strict=True)]
        self.tally.update("desirable" if entry.item.desirable else "undesirable" for entry in kept if entry is not None)
        return kept

    def _kept(self, example: Example, name: str, desirable: bool) -> Kept[LabeledResponse] | None:
        fitted = fit_responses([example], [name], self.limit, self.overlong)
        if fitted is None:
            return None
        return Kept.of(LabeledResponse(fitted[0], desirable), len(fitted[0]) < len(example), (last_trained(example),))

    def found(self) -> str:
        return self._found() + self.finder.unread(*self.columns.names) + version_note(self.tally)

    def _found(self) -> str:
        columns = self.columns
        verdicts = f"{self.tally['desirable']:,} desirable, {self.tally['undesirable']:,} undesirable"
        if isinstance(columns, RankingColumns):
            prompt = prompt_description(columns, self.tally)
            return f"pairs ({prompt}, {pair_names(columns)}), each split into two labelled responses: {verdicts}"
        parts = (columns.messages or f"{columns.prompt}, {columns.response}") + columns.extra.description()
        return f"labelled responses ({parts}; label from {columns.label}): {verdicts}"


def verdict(row: Row, key: str, origin: Origin) -> bool:
    """Returns whether the label of the row is desirable."""
    label = lookup(row, key, origin)
    if isinstance(label, str):
        found = SPELLED.get(label.strip().lower())
    else:
        found = VERDICTS.get(label) if isinstance(label, bool | int | float) else None
    if found is None:
        raise Refusal.at(
            origin,
            f"{key} is {label!r}, which is not a label",
            "write the label as true or false, 1 or 0, or 1 or -1",
            code="invalid-label",
        )
    return found


def _answered(row: Row, columns: JudgedColumns, origin: Origin) -> tuple[Any, Any]:
    """Returns the prompt and the labelled response, from two columns or from a chat that ends with the response."""
    if not columns.messages:
        prompt = columns.extra.prompt(filled(row, columns.prompt, origin), columns.prompt, row, origin)
        return prompt, lookup(row, columns.response, origin)
    chat = as_turns(filled(row, columns.messages, origin), columns.messages, origin)
    if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise Refusal.at(
            origin,
            f"{columns.messages} must be a chat that ends with the labelled assistant turn",
            "fix or remove the row",
            code="no-answer",
        )
    return columns.extra.chat(chat[:-1], row, origin), chat[-1:]
