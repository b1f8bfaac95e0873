"""Rows of supervised training: which columns a source has, what of a row is trained, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data.columns import CHATS, ColumnFinder, filled
from lockstep.data.dataset import Kept
from lockstep.data.encoding import Encoding, as_chat, last_trained
from lockstep.data.fit import fit
from lockstep.errors import Refusal
from lockstep.recipe.schema import Data
from lockstep.types import Example, Origin, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Column names that users of other trainers know, looked for in this order when no key is set.
PAIR_COLUMNS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("input", "output"),
    ("instruction", "output"),
    ("query", "response"),
)
TEXT_COLUMNS = ("text", "content")


@dataclass(frozen=True)
class SupervisedColumns:
    """Where the parts of a row are. Empty strings where a shape does not use them."""

    shape: str
    messages: str = ""
    prompt: str = ""
    response: str = ""
    text: str = ""

    def __str__(self) -> str:
        keys = " + ".join(key for key in (self.messages, self.prompt, self.response, self.text) if key)
        return f"{self.shape} ({keys})"


def find_columns(finder: ColumnFinder) -> SupervisedColumns:
    """The source's own settings, then the recipe's, then the well-known names."""
    data = finder.data
    shape = finder.source.shape or (None if data.shape == "auto" else data.shape)
    keys = ("messages_key", "prompt_key", "response_key", "text_key")
    messages, prompt, response, text = map(finder.setting, keys)
    if shape is None:
        shape = "messages" if messages else "prompt_response" if prompt or response else "text" if text else None
    chat, plain = finder.known(CHATS), finder.known(TEXT_COLUMNS)
    pair = finder.known_pair(PAIR_COLUMNS)
    if shape is None:
        shape = "messages" if chat else "prompt_response" if pair else "text" if plain else None
    if shape == "messages" and (messages or chat):
        return SupervisedColumns(shape, messages=messages or chat)
    if shape == "prompt_response" and (pair or (prompt and response)):
        known = pair or ("", "")
        return SupervisedColumns(shape, prompt=prompt or known[0], response=response or known[1])
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
    """Turns the rows of one source into examples with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: SupervisedColumns, data: Data):
        self.encoding = Encoding(tokenizer, data)
        self.columns = columns
        self.split_rows = 0
        if data.system and columns.shape == "text":
            raise Refusal.at("data.system", "plain rows without a chat template have no place for it", "remove it")
        if columns.shape == "messages" and not tokenizer.chat_template:
            raise Refusal.at(
                "data.shape",
                "rows are chats, but the tokenizer has no chat template",
                "use data.prompt_key and data.response_key",
            )

    def __call__(self, row: Row, origin: Origin) -> Example:
        """The sft example of a row, or a refusal that names the row."""
        shape = self.columns.shape
        if shape == "text":
            text = self._text(filled(row, self.columns.text, origin), self.columns.text, origin)
            example = self.encoding.text(text, origin)
        elif shape == "messages":
            example = self._chat(filled(row, self.columns.messages, origin), origin)
        else:
            prompt = filled(row, self.columns.prompt, origin)
            response = filled(row, self.columns.response, origin)
            example = self._pair(prompt, response, origin)
        return self.encoding.checked(example)

    def _chat(self, messages: Any, origin: Origin) -> Example:
        example, split = self.encoding.chat(messages, origin)
        self.split_rows += split
        return example

    def _pair(self, prompt: Any, response: Any, origin: Origin) -> Example:
        if isinstance(response, list):
            # A response that is itself a list of messages continues the prompt's chat.
            return self._chat([*as_chat(prompt), *response], origin)
        self._text(response, self.columns.response, origin)
        if self.encoding.templated or isinstance(prompt, list):
            return self._chat([*as_chat(prompt), {"role": "assistant", "content": response}], origin)
        return self.encoding.joined(self._text(prompt, self.columns.prompt, origin), response, origin)

    def _text(self, value: Any, key: str, origin: Origin) -> str:
        if not isinstance(value, str):
            raise Refusal.at(origin, f"{key} is {type(value).__name__}, not text")
        return value


class SupervisedRows:
    """One example a row."""

    def __init__(self, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase, limit: int):
        self.encoder = Encoder(tokenizer, find_columns(finder), finder.data)
        self.limit, self.overlong = limit, finder.data.overlong

    @property
    def split_rows(self) -> int:
        return self.encoder.split_rows

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Example] | None]:
        whole = self.encoder(row, origin)
        example = fit(whole, self.limit, self.overlong)
        if example is None:
            return [None]
        return [Kept.of(example, len(example) < len(whole), (last_trained(whole),))]

    def found(self) -> str:
        return str(self.encoder.columns)
