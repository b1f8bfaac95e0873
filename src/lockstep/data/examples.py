"""Rows into examples: which columns a source has, what of a row is trained, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.data.encoding import Encoding, as_chat, filled, last_trained
from lockstep.errors import Refusal
from lockstep.recipe.schema import Data, Source
from lockstep.types import Example, Origin, Row

__all__ = ["Columns", "Encoder", "find_columns", "fit", "last_trained"]

# Column names that users of other trainers know, looked for in this order when no key is set.
CHAT_COLUMNS = ("messages", "conversations")
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
class Columns:
    """Where the parts of a row are. Empty strings where a shape does not use them."""

    shape: str
    messages: str = ""
    prompt: str = ""
    response: str = ""
    text: str = ""

    def __str__(self) -> str:
        keys = " + ".join(key for key in (self.messages, self.prompt, self.response, self.text) if key)
        return f"{self.shape} ({keys})"


def find_columns(source: Source, data: Data, available: list[str]) -> Columns:
    """The source's own settings, then the recipe's, then the well-known names."""
    shape = source.shape or (None if data.shape == "auto" else data.shape)
    messages = source.messages_key or data.messages_key
    prompt = source.prompt_key or data.prompt_key
    response = source.response_key or data.response_key
    text = source.text_key or data.text_key
    if shape is None:
        shape = "messages" if messages else "prompt_response" if prompt or response else "text" if text else None
    pair = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(available)), None)
    chat = next((key for key in CHAT_COLUMNS if key in available), None)
    plain = next((key for key in TEXT_COLUMNS if key in available), None)
    if shape is None:
        shape = "messages" if chat else "prompt_response" if pair else "text" if plain else None
    if shape == "messages" and (messages or chat):
        return Columns(shape, messages=messages or chat or "")
    if shape == "prompt_response" and (pair or (prompt and response)):
        known = pair or ("", "")
        return Columns(shape, prompt=prompt or known[0], response=response or known[1])
    if shape == "text" and (text or plain):
        return Columns(shape, text=text or plain or "")
    wanted = {
        "messages": "data.messages_key",
        "prompt_response": "data.prompt_key and data.response_key",
        "text": "data.text_key",
    }
    raise Refusal.at(
        source.path,
        f"cannot tell which columns to train on; it has {', '.join(available)}",
        f"set {wanted[shape]}"
        if shape
        else "set data.shape and its keys, for example data.prompt_key and data.response_key",
    )


class Encoder:
    """Turns the rows of one source into examples with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: Columns, data: Data):
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
            raise Refusal.at(str(origin), f"{key} is {type(value).__name__}, not text")
        return value


def fit(example: Example, limit: int, overlong: str) -> Example | None:
    """The example within `limit` tokens by the policy `overlong`; None when it is dropped."""
    if len(example) <= limit:
        return example
    if overlong == "drop":
        return None
    if overlong == "error":
        raise Refusal.at(
            str(example.origin),
            f"has {len(example)} tokens, over data.max_tokens={limit}",
            "raise data.max_tokens, or set data.overlong to drop, truncate_left or truncate_right",
        )
    kept = slice(-limit, None) if overlong == "truncate_left" else slice(0, limit)
    short = Example(example.ids[kept], example.trained[kept], example.origin)
    if not short.targets:
        raise Refusal.at(
            str(example.origin),
            f"{overlong} to {limit} tokens leaves no trained token",
            "raise data.max_tokens or drop the row",
        )
    return short
