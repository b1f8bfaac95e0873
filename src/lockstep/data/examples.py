"""Rows into examples: which columns a source has, what of a row is trained, and what is refused."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.data.chat import check_messages, encode_spans, render_chat, special_ids
from lockstep.data.fields import lookup
from lockstep.errors import Refusal
from lockstep.recipe.schema import Data, Source
from lockstep.types import Example, Origin, Row

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
        self.tokenizer = tokenizer
        self.columns = columns
        self.system = data.system
        self.templated = data.template == "auto" and bool(tokenizer.chat_template)
        self.require_end = data.require_end
        self.special = special_ids(tokenizer)
        # What the tokenizer itself puts before plain text: a BOS token, or nothing.
        self.opening: list[int] = list(tokenizer("")["input_ids"])
        self.split_rows = 0
        if data.system and (columns.shape == "text" or not self.templated):
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
            example = self._text(self._value(row, self.columns.text, origin), origin)
        elif shape == "messages":
            example = self._chat(self._value(row, self.columns.messages, origin), origin)
        else:
            prompt = self._value(row, self.columns.prompt, origin)
            response = self._value(row, self.columns.response, origin)
            example = self._pair(prompt, response, origin)
        return self._checked(example)

    def _value(self, row: Row, key: str, origin: Origin) -> Any:
        value = lookup(row, key, origin)
        if value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value):
            raise Refusal.at(str(origin), f"{key} is empty", "remove the row or fill it in")
        return value

    def _chat(self, messages: Any, origin: Origin) -> Example:
        check_messages(messages, origin)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        example, split = encode_spans(self.tokenizer, render_chat(self.tokenizer, messages, origin), origin)
        self.split_rows += split
        return example

    def _pair(self, prompt: Any, response: Any, origin: Origin) -> Example:
        if isinstance(response, list):
            # A response that is itself a list of messages continues the prompt's chat.
            return self._chat([*_as_chat(prompt), *response], origin)
        if not isinstance(response, str):
            raise Refusal.at(str(origin), f"{self.columns.response} is {type(response).__name__}, not text")
        if self.templated or isinstance(prompt, list):
            if not self.tokenizer.chat_template:
                raise Refusal.at(str(origin), "the prompt is a chat, but the tokenizer has no chat template")
            return self._chat([*_as_chat(prompt), {"role": "assistant", "content": response}], origin)
        if not isinstance(prompt, str):
            raise Refusal.at(str(origin), f"{self.columns.prompt} is {type(prompt).__name__}, not text")
        prompt_ids = self.opening + self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = self.tokenizer(response, add_special_tokens=False)["input_ids"] + self._end(origin)
        ids = prompt_ids + response_ids
        return Example(array("q", ids), bytes([0] * len(prompt_ids) + [1] * len(response_ids)), origin)

    def _text(self, text: Any, origin: Origin) -> Example:
        if not isinstance(text, str):
            raise Refusal.at(str(origin), f"{self.columns.text} is {type(text).__name__}, not text")
        ids = self.opening + self.tokenizer(text, add_special_tokens=False)["input_ids"] + self._end(origin)
        trained = [False] * len(self.opening) + [True] * (len(ids) - len(self.opening))
        return Example(array("q", ids), bytes(trained), origin)

    def _end(self, origin: Origin) -> list[int]:
        if self.tokenizer.eos_token_id is not None:
            return [self.tokenizer.eos_token_id]
        if self.require_end:
            raise Refusal.at(
                str(origin), "the tokenizer has no eos token to train as the end", "set data.require_end=false"
            )
        return []

    def _checked(self, example: Example) -> Example:
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(example.ids[:2]) == [bos, bos]:
            raise Refusal.at(
                str(example.origin),
                f"starts with two {self.tokenizer.bos_token!r} tokens",
                "the rows or the template already carry the BOS token; remove it from the rows",
            )
        if not example.targets:
            raise Refusal.at(str(example.origin), "no token of the row is trained")
        last = last_trained(example)
        if self.require_end and last not in self.special:
            token = self.tokenizer.decode([last])
            raise Refusal.at(
                str(example.origin),
                f"the last trained token is {token!r}, not an end token: the model would not learn to stop",
                "use a chat template that ends assistant turns with the end token, or set data.require_end=false",
            )
        return example


def last_trained(example: Example) -> int:
    """The token that ends the row's training; generation must stop at it."""
    return example.ids[max(i for i, trained in enumerate(example.trained) if trained)]


def _as_chat(prompt: Any) -> list[Any]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


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
