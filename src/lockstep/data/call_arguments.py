"""The arguments of tool calls in the form that a chat template writes: most take an object, some the JSON of one.

A template of the second kind, given an object, fails, or writes it as Python shows it (`{'city': 'Rome'}`), and nobody
would see that no call of the trained model can be parsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIED = {"city": "Rome"}
# What a template raises that is given something else than it takes, or that knows no calls.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def as_written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """The chat with the arguments of its calls as the tokenizer's template takes them."""
    if not any(message.get("tool_calls") for message in messages) or not _takes_text(tokenizer):
        return list(messages)
    return [_with_text(message) if message.get("tool_calls") else message for message in messages]


def _with_text(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _takes_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.get_chat_template()
    return _tried(template, tuple(sorted(tokenizer.special_tokens_map.items(), key=str)))


@lru_cache(maxsize=16)
def _tried(template: str, special: tuple[tuple[str, Any], ...]) -> bool:
    """Whether the template writes JSON of text, and not of an object."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def shows(arguments: object) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return render_jinja_template(
                [[{"role": "user", "content": "?"}, turn]], chat_template=template, **dict(special)
            )[0][0]
        except _FAILURES:  # that it cannot be used is told where it is used
            return ""

    return json.dumps(_TRIED) not in shows(_TRIED) and json.dumps(_TRIED) in shows(json.dumps(_TRIED))
