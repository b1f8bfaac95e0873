"""The built-in chat templates, and which of them is the append-only version of a tokenizer's template.

A template is append-only if a further message only adds text at the end. Templates of reasoning models are not
append-only: they remove the `<think>` block of an assistant turn when a later user message follows. The built-in
version of a reasoning template keeps `<think>` blocks. If the original template is append-only for a chat, the built-in
version gives the same text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from lockstep.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_MISTRAL = ("[INST]", "[/INST]", "</s>")


@dataclass(frozen=True)
class Builtin:
    """A built-in template: its markers, of which the last ends a turn, and its file in `data/templates`."""

    tokens: tuple[str, ...]
    file: str
    variant: str = ""
    """A variable that selects a variant of the template in the file."""
    rewrites: str = ""
    """If `thoughts`, the original template removes reasoning from earlier turns. If `system`, the original template
    moves the system message and the tools to the last user turn. If empty, the original template is append-only."""


BUILTIN = {
    "chatml": Builtin(_CHATML, "chatml"),
    "qwen": Builtin(_CHATML, "qwen"),
    "llama3": Builtin(_LLAMA, "llama3"),
    "qwen2.5": Builtin(_CHATML, "qwen2.5"),
    "qwen3": Builtin(_CHATML, "qwen3", rewrites="thoughts"),
    "qwen3-thinking": Builtin(_CHATML, "qwen3", "always_thinks", "thoughts"),
    "qwen3.5": Builtin(_CHATML, "qwen3.5", rewrites="thoughts"),
    "qwen3.5-nothink": Builtin(_CHATML, "qwen3.5", "silent", "thoughts"),
    "qwen3.6": Builtin(_CHATML, "qwen3.5", "json_values", "thoughts"),
    "llama3.1": Builtin(_LLAMA, "llama3.1"),
    "deepseek-r1": Builtin(_DEEPSEEK, "deepseek-r1", rewrites="thoughts"),
    "gemma": Builtin(("<start_of_turn>", "<end_of_turn>"), "gemma"),
    "mistral": Builtin(_MISTRAL, "mistral", rewrites="system"),
    "mistral-nemo": Builtin(_MISTRAL, "mistral", "tekken", "system"),
}


@lru_cache(maxsize=len(BUILTIN))
def builtin_text(name: str) -> str:
    """Returns the text of a built-in template."""
    builtin = BUILTIN[name]
    file = resources.files("lockstep") / "data" / "templates" / f"{builtin.file}.jinja"
    opening = f"{{%- set {builtin.variant} = true -%}}\n" if builtin.variant else ""
    return opening + file.read_text(encoding="utf-8")


_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def append_only_version(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the name of the built-in append-only version of the tokenizer's template, or None if there is none."""
    if not tokenizer.chat_template:
        return None
    return _version_of(tokenizer.get_chat_template(), tuple(sorted(tokenizer.special_tokens_map.items(), key=str)))


@lru_cache(maxsize=16)
def _version_of(template: str, special: tuple[tuple[str, Any], ...]) -> str | None:
    for name, builtin in BUILTIN.items():
        if builtin.rewrites and _is_version(builtin_text(name), template, dict(special)):
            return name
    return None


def version_note(rows: Mapping[str, int], *, turns: str = "all") -> str:
    """Describes how many rows each append-only template rendered. `rows` maps template and other names to counts."""
    why = "the tokenizer's template changes earlier turns"
    if turns != "all":
        why = "the tokenizer's template does not render the trained turn as it is generated"
    named = (f"{rows[name]:,} rows use the append-only template {name}" for name in BUILTIN if rows.get(name))
    return "".join(f"; {text}, because {why}" for text in named)


def same_without_thoughts(one: str, other: str) -> bool:
    """Returns whether two renderings of a chat differ only in `<think>` blocks and white space."""
    return "".join(_BLOCK.sub("", one).split()) == "".join(_BLOCK.sub("", other).split())


def _is_version(version: str, original: str, special: Mapping[str, Any]) -> bool:
    """Returns whether two templates agree on sample chats. For a chat that the original does not render append-only,
    the texts may differ in `<think>` blocks and white space."""
    compared = 0
    for chat, inputs in _samples():
        expected, text = (_rendered(template, chat, inputs, special) for template in (original, version))
        if expected is None:
            continue  # the original does not support such a chat
        if text is None or not same_without_thoughts(expected, text):
            return False
        if text != expected and _is_append_only(original, chat, inputs, special):
            return False
        compared += 1
    return compared > 0


def _is_append_only(template: str, chat: list[Message], inputs: Mapping[str, Any], special: Mapping[str, Any]) -> bool:
    """Returns whether each assistant turn follows its generation prompt and is the same text in the full chat."""
    full = _rendered(template, chat, inputs, special) or ""
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            prompt = _rendered(template, chat[:number], inputs, special)
            turn = _rendered(template, chat[: number + 1], inputs, special)
            if prompt is None or turn is None or not (turn.startswith(prompt) and full.startswith(turn)):
                return False
    return True


def _samples() -> Iterator[tuple[list[Message], dict[str, Any]]]:
    user: Message = {"role": "user", "content": "Rome?"}
    answer: Message = {"role": "assistant", "content": "<think>\nSouth.\n</think>Warm."}
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    flag = {**call, "function": {"name": "weather", "arguments": {"now": True, "days": [1, 2]}}}
    result: Message = {"role": "tool", "content": "19", "tool_call_id": "call00001"}
    for inputs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        yield [user], inputs
        yield [{"role": "system", "content": "Be brief."}, user], inputs
        yield [user, {"role": "assistant", "content": "Warm."}], inputs
        yield [user, answer], inputs
        yield [user, answer, {"role": "user", "content": "Oslo?"}], inputs
    tools = {"tools": [_TOOL]}
    yield [user], tools
    for made in (call, flag):
        yield [user, {**answer, "tool_calls": [made]}], tools
    yield [user, {**answer, "tool_calls": [call]}, result, answer], tools


def _rendered(template: str, chat: list[Message], inputs: Mapping[str, Any], special: Mapping[str, Any]) -> str | None:
    """Returns the chat as text, with the generation prompt unless it ends with an assistant turn; None on failure."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        return render_jinja_template(
            [chat],
            chat_template=template,
            add_generation_prompt=chat[-1]["role"] != "assistant",
            **{"tools": None, **inputs},
            **special,
        )[0][0]
    except Exception:  # noqa: BLE001 - a template is a program, and may fail in any way
        return None
