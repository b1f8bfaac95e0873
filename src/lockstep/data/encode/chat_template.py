"""The chat template of a run: that of the tokenizer or of `data.template`, with `data.template_arguments`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.encode.builtin_templates import BUILTIN, builtin_text
from lockstep.data.encode.chat import render_chat
from lockstep.data.encode.chat_text import RESERVED, render_prompt, uses
from lockstep.data.encode.dialogue import common_length
from lockstep.data.encode.encoding import last_trained
from lockstep.data.encode.trained_tokens import encode_spans, special_ids
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEY = "data.template"


def with_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> PreTrainedTokenizerBase:
    """Sets the chat template and template arguments of `data` on the tokenizer."""
    if is_named(data):
        tokenizer.chat_template = template_text(data.template)
        _refuse_missing_tokens(tokenizer, data.template)
        end_of_turn(tokenizer, data)
    return with_arguments(tokenizer, data.template_arguments)


def is_named(data: Data) -> bool:
    """Returns whether `data.template` replaces the tokenizer's template."""
    return data.template not in ("auto", "none")


def template_text(name: str) -> str:
    """Returns a built-in template, or the content of a template file."""
    if name in BUILTIN:
        return builtin_text(name)
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "the file is not UTF-8"
        raise Refusal.at(
            f"{KEY} {name}", f"cannot be read: {why}", "give the path of a chat template", code="unreadable"
        ) from error
    if not text.strip():
        raise Refusal.at(f"{KEY} {name}", "is empty", "give the path of a chat template", code="empty-value")
    return text


def end_of_turn(tokenizer: PreTrainedTokenizerBase, data: Data) -> int | None:
    """Returns the token that ends an answer in the template of `data`, found by rendering a chat.

    Generation must stop at this token, even if the model has another end token. Returns None if `data` sets no
    template. If the template ends an answer without a special token, returns None if `data.require_end` is false, and
    raises `Refusal` otherwise.
    """
    if not is_named(data):
        return None
    origin = Origin(f"{KEY} {data.template}, tested on a chat of one question:", 0)
    try:
        example, _ = encode_spans(tokenizer, render_chat(tokenizer, _answered(tokenizer, origin), origin), origin)
    except Refusal as refusal:
        raise Refusal.at(
            f"{KEY} {data.template}", refusal.problems[0].why, "fix the template", code=refusal.problems[0].code
        ) from refusal
    last = last_trained(example)
    if last in special_ids(tokenizer):
        return last
    if data.require_end:
        raise Refusal.at(
            f"{KEY} {data.template}",
            f"ends an answer with {tokenizer.decode([last])!r}, which is no end token of the tokenizer: the model "
            "would not learn to stop",
            _ends_with(tokenizer) + ", or set data.require_end=false",
            code="no-end-token",
        )
    return None


def turn_ends(tokenizer: PreTrainedTokenizerBase, data: Data) -> list[int]:
    """Returns the tokens that end a turn in the template of `data`, besides those of the model: after an answer, and
    after tool calls."""
    end, builtin = end_of_turn(tokenizer, data), BUILTIN.get(data.template)
    after_calls = [tokenizer.convert_tokens_to_ids(builtin.call_end)] if builtin and builtin.call_end else []
    return [*([] if end is None else [end]), *after_calls]


def _answered(tokenizer: PreTrainedTokenizerBase, origin: Origin) -> list[Message]:
    """Returns a question and an answer that begins with the end of the generation prompt (for example `<think>`)."""
    question: Message = {"role": "user", "content": "2+3?"}
    prompt = render_prompt(tokenizer, [question], origin)
    full = render_prompt(tokenizer, [question, {"role": "assistant", "content": "5"}], origin, open_turn=False)
    opening = prompt[common_length([prompt, full]) :]
    return [question, {"role": "assistant", "content": f"{opening}5"}]


def _refuse_missing_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuses a template whose turn markers are not single tokens, or whose end of a turn is no special token:
    generation would not stop at it."""
    special, tokens = special_ids(tokenizer), BUILTIN[name].tokens if name in BUILTIN else ()
    missing = [
        token
        for token in tokens
        if len(ids := tokenizer(token, add_special_tokens=False)["input_ids"]) != 1
        or (ids[0] not in special and token == tokens[-1])
    ]
    if missing:
        raise Refusal.at(
            f"{KEY} {name}",
            f"writes {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} no special token of the "
            "tokenizer",
            f"use a template whose special tokens the tokenizer has, or write a template file: {_ends_with(tokenizer)}",
            code="unknown-token",
        )


def _ends_with(tokenizer: PreTrainedTokenizerBase) -> str:
    token = tokenizer.eos_token
    return f"end the assistant's turn with {token}" if token else "end the assistant's turn with a special token"


def _near_word(name: str, template: str) -> str:
    near = get_close_matches(name, sorted(set(re.findall(r"\b[a-z]\w*", template))), n=1, cutoff=0.8)
    return f"did you mean {near[0]}? Else remove it" if near else "remove it"


def with_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, bool | int | float | str]
) -> PreTrainedTokenizerBase:
    """Sets variables at the beginning of the tokenizer's template. An exported model does not include the variables."""
    if not arguments:
        return tokenizer
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    refuse_all(
        [
            Problem(
                f"data.template_arguments.{name}",
                "the chat template does not use this argument",
                _near_word(name, template),
                code="unused-key",
            )
            for name in arguments
            if name in RESERVED or not uses(template, name)
        ]
    )
    # A value of the row, which is passed when the template is rendered, takes precedence.
    opening = "".join(
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif -%}}"
        for name, value in arguments.items()
    )
    tokenizer.chat_template = opening + template
    return tokenizer


def _literal(value: bool | int | float | str) -> str:
    return json.dumps(value)  # booleans, numbers and quoted text have the same syntax in JSON and Jinja
