"""Finds the columns of SFT rows and encodes the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.builtin_templates import version_note
from lockstep.data.encode.chat_text import TemplateInputs
from lockstep.data.encode.columns import CHATS, NO_EXTRA_COLUMNS, ColumnFinder, ExtraColumns, filled
from lockstep.data.encode.dialogue import SpecialText, as_turns
from lockstep.data.encode.encoding import Encoding, as_chat, fit, last_trained, split_text, written
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import refuse_not_text
from lockstep.data.row_reader import Kept
from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Data
from lockstep.types import Example, Origin, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Common (prompt, response) column names, in order of preference. These names are used when the recipe names no columns.
PAIR_COLUMNS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("query", "response"),
    ("problem", "solution"),
)
TEXT_COLUMNS = ("text", "content")
# Keys of the tally: chats, their messages of the trained roles, and how many of these messages are trained.
_CHATS, _TURNS, _TRAINED = "chats", "turns", "trained turns"


@dataclass(frozen=True)
class SupervisedColumns:
    """The column name of each field of an SFT row. An empty string means that rows of this shape do not have the
    field."""

    shape: str
    messages: str = ""
    prompt: str = ""
    response: str = ""
    text: str = ""
    extra: ExtraColumns = NO_EXTRA_COLUMNS

    def __str__(self) -> str:
        keys = " + ".join(key for key in (self.messages, self.prompt, self.response, self.text) if key)
        return f"{self.shape} ({keys}{self.extra.description()})"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.messages, self.prompt, self.response, self.text, *self.extra.columns)


def find_columns(finder: ColumnFinder) -> SupervisedColumns:
    """Finds the columns of SFT rows: by the keys of the source, else by the keys of the recipe, else by common
    names."""
    data = finder.data
    shape = finder.source.shape or (None if data.shape == "auto" else data.shape)
    keys = ("messages_key", "prompt_key", "response_key", "text_key")
    messages, prompt, response, text = map(finder.setting, keys)
    if shape is None:
        shape = "messages" if messages else "prompt_response" if prompt or response else "text" if text else None
    chat, plain = finder.first_column(CHATS), finder.first_column(TEXT_COLUMNS)
    pair = finder.first_pair(PAIR_COLUMNS)
    if shape is None:
        shape = "messages" if chat else "prompt_response" if pair else "text" if plain else None
    if shape == "messages" and (messages or chat):
        return SupervisedColumns(shape, messages=messages or chat, extra=finder.extra_columns(messages or chat))
    if shape == "prompt_response" and (pair or (prompt and response)):
        by_name = pair or ("", "")
        prompt, response = prompt or by_name[0], response or by_name[1]
        return SupervisedColumns(shape, prompt=prompt, response=response, extra=finder.extra_columns(prompt, response))
    if shape == "text" and (text or plain):
        return SupervisedColumns(shape, text=text or plain)
    wanted = {
        "messages": "data.messages_key",
        "prompt_response": "data.prompt_key and data.response_key",
        "text": "data.text_key",
    }
    general = "set data.shape and its keys, for example data.prompt_key and data.response_key"
    raise finder.unknown("to train on", f"set {wanted[shape]}" if shape else general)


class Encoder:
    """Encodes the rows of one source as examples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: SupervisedColumns,
        data: Data,
        images: RowImages | None = None,
    ):
        self.images = images
        self.encoding = Encoding(tokenizer, data)
        self.columns = columns
        self.split_rows = self.special_rows = 0
        self.tally: Counter[str] = Counter()
        self.special_text = SpecialText(tokenizer)
        if data.system and columns.shape == "text":
            raise Refusal.at(
                "data.system",
                "rows of plain text have no chat template, so they cannot have a system message",
                "remove it",
                code="no-chat-template",
            )
        if data.prompt_format is not None and columns.shape != "prompt_response":
            raise Refusal.at(
                "data.prompt_format",
                f"rows of shape {columns.shape} have no separate prompt",
                "remove it",
                code="unused-key",
            )
        if columns.shape == "messages" and data.template == "none":
            raise Refusal.at(
                "data.template",
                f"is none, but the rows are chats (column {columns.messages})",
                "set data.template to auto, or use data.prompt_key and data.response_key",
                code="no-chat-template",
            )
        if columns.shape == "messages" and not tokenizer.chat_template:
            raise Refusal.at(
                "data.shape",
                "rows are chats, but the tokenizer has no chat template",
                "set data.template, or use data.prompt_key and data.response_key",
                code="no-chat-template",
            )

    def __call__(self, row: Row, origin: Origin) -> list[Example]:
        """Encodes a row as one or more examples (`data.turns`). The error for an invalid row names the row."""
        if self.images is None:
            return self._encoded(row, origin)
        columns = self.columns
        keys = (columns.messages, *columns.extra.prompts(columns.prompt), columns.response, columns.text)
        row, refs = self.images.read(row, keys, origin)
        every = self.encoding.turns == "all"
        return [self.images.written(one, refs, all_turns=every) for one in self._encoded(row, origin)]

    def _encoded(self, row: Row, origin: Origin) -> list[Example]:
        shape = self.columns.shape
        if shape == "text":
            refuse_not_text(row, "the row", origin)
            text = self._text(filled(row, self.columns.text, origin), self.columns.text, origin)
            examples = [self.encoding.text(text, origin)]
        elif shape == "messages":
            extra, key = self.columns.extra, self.columns.messages
            messages = as_turns(filled(row, key, origin), key, origin)
            if isinstance(messages, str):
                raise Refusal.at(
                    origin,
                    f"{key} is text, not a list of messages",
                    "set data.text_key to train on plain text, or write the messages as JSON",
                    code="invalid-chat",
                )
            examples = self._chat(extra.chat(messages, row, origin), origin, extra.inputs(row, origin))
        else:
            examples = self._pair(row, origin)
        return [self.encoding.checked(example) for example in examples]

    def _chat(self, messages: Any, origin: Origin, inputs: TemplateInputs) -> list[Example]:
        encoded = self.encoding.chat(messages, origin, inputs)
        texts = messages if self.images is None else self.images.without_placeholders(messages)
        self.special_rows += self.special_text.inside([texts])
        self.split_rows += any(one.split for one in encoded)
        roles = self.encoding.train_roles
        self.tally[_CHATS] += 1
        self.tally[_TURNS] += sum([turn["role"] in roles for turn in messages])
        for version in {one.spans.version for one in encoded} - {""}:
            self.tally[version] += 1
        return [one.example for one in encoded]

    def _pair(self, row: Row, origin: Origin) -> list[Example]:
        columns, extra = self.columns, self.columns.extra
        question = extra.prompt(filled(row, columns.prompt, origin), columns.prompt, row, origin)
        response = as_turns(filled(row, columns.response, origin), columns.response, origin)
        inputs = extra.inputs(row, origin)
        if isinstance(question, str) and isinstance(response, str) and not inputs and not self.encoding.templated:
            return [self.encoding.joined(question, response, origin)]
        prompt = as_chat(written(question, self.encoding.prompt_format, origin))
        # A response that is itself a list of messages continues the prompt's chat.
        answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        return self._chat([*prompt, *answer], origin, inputs)

    def _text(self, value: Any, key: str, origin: Origin) -> str:
        if not isinstance(value, str):
            raise Refusal.at(origin, f"{key} is {type(value).__name__}, not text", code="not-text")
        return value


class SupervisedRows:
    """Reads one example per row, or several if the row is a long text and `data.long_text` is `split`."""

    unusable = 0

    def __init__(
        self, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase, limit: int, *, images: str | None = None
    ):
        """`images` is the model folder whose image processor reads the images of the rows (`model.vision`)."""
        self.encoder = Encoder(tokenizer, find_columns(finder), finder.data, RowImages.of(images, finder, tokenizer))
        self.finder = finder
        self.limit, self.overlong = limit, finder.data.overlong
        self.splits = finder.data.long_text == "split" and self.encoder.columns.shape == "text"

    @property
    def tally(self) -> Counter[str]:
        """Counts of chats and turns, and of long texts that were split and their pieces."""
        return self.encoder.tally

    @tally.setter
    def tally(self, tally: Counter[str]) -> None:
        self.encoder.tally = tally

    @property
    def split_rows(self) -> int:
        return self.encoder.split_rows

    @property
    def special_rows(self) -> int:
        return self.encoder.special_rows

    @property
    def unseparated_rows(self) -> int:
        return self.encoder.encoding.unseparated

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Example] | None]:
        chats = self.tally[_CHATS]
        kept = [one for full in self.encoder(row, origin) for one in self._fitted(full)]
        if self.tally[_CHATS] > chats:
            self.tally[_TRAINED] += sum(_trained_turns(one.item) for one in kept if one is not None)
        return kept

    def _fitted(self, full: Example) -> list[Kept[Example] | None]:
        if self.splits and len(full) > self.limit:
            pieces = split_text(full, self.limit)
            self.tally.update(texts=1, pieces=len(pieces))
            return [Kept.of(piece, False, (last_trained(full),)) for piece in pieces]
        also = ", or data.long_text to split" if self.encoder.columns.shape == "text" else ""
        example = fit(full, self.limit, self.overlong, also=also)
        if example is None:
            return [None]
        return [Kept.of(example, len(example) < len(full), (last_trained(full),))]

    def found(self) -> str:
        columns = self.encoder.columns
        texts, pieces = self.tally["texts"], self.tally["pieces"]
        split = f"; {texts:,} long texts split into {pieces:,} pieces of up to {self.limit:,} tokens" if texts else ""
        return f"{columns}{split}{self.finder.unread(*columns.names)}{self._turns()}"

    def _turns(self) -> str:
        """Describes which turns are trained, unless each chat has one turn and all of them are trained."""
        tally, data = self.tally, self.finder.data
        said, left = "", tally[_TURNS] - tally[_TRAINED]
        if tally[_TURNS] != tally[_CHATS] or left:
            roles = "" if data.train_roles == ["assistant"] else f" of {', '.join(data.train_roles)}"
            each = ", one sequence per turn (data.turns=each)" if data.turns == "each" else ""
            said += f"; {tally[_TRAINED]:,} turns{roles} trained{each}"
            said += f", {left:,} not (weight 0, data.turns=last, or a row that is too long)" if left else ""
        return said + version_note(tally, turns=data.turns)


def _trained_turns(example: Example) -> int:
    """Returns the number of trained messages. Untrained tokens of the template separate trained messages."""
    mask = bytes(example.loss_mask)
    return mask.count(b"\0\1") + mask.startswith(b"\1")
