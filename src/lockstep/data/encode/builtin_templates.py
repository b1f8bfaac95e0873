"""The built-in chat templates, and which of them is the append-only version of a tokenizer's template.

A template is append-only if a chat with one more message is rendered as the same text with an addition. Templates of
reasoning models are not: they remove the `<think>` block of an assistant turn when a later user message follows. The
built-in version of such a template keeps the block, and renders the same text wherever the original is append-only.

A training template must also render the end token of every assistant turn, and all tool calls. Built-in versions exist
for a template without end tokens (GLM) and for a template that drops tool calls (SmolLM3), too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.messages import REASONING
from lockstep.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_MISTRAL = ("[INST]", "[/INST]", "</s>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|user|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")


@dataclass(frozen=True)
class Builtin:
    """A built-in template: its markers, of which the last ends a turn, and its file in `data/templates`."""

    tokens: tuple[str, ...]
    file: str
    variant: str = ""
    """A variable that selects a variant of the template in the file."""
    rewrites: str = ""
    """What the original template of the models changes in earlier turns: `thoughts`, or the `system` message and tools,
    which it moves to the last user turn. `drops`: the original drops tool calls and reasoning fields of any turn. Empty
    if the original is append-only."""
    closings: tuple[str, ...] = ()
    """Tokens of which one ends an assistant turn, if the original has no end token: it writes this token at the
    beginning of the next message."""
    call_end: str = ""
    """The token that ends a turn with tool calls, if other turns end with another token."""


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
    "glm4.5": Builtin(
        _GLM, "glm4.5", rewrites="thoughts", closings=("<|user|>", "<|observation|>"), call_end="<|observation|>"
    ),
    "gpt-oss": Builtin(_HARMONY, "gpt-oss", rewrites="thoughts", call_end="<|call|>"),
    "kimi-k2": Builtin(_KIMI, "kimi-k2"),
    "kimi-k2-thinking": Builtin(_KIMI, "kimi-k2", "thinks", "thoughts"),
    "smollm3": Builtin(_CHATML, "smollm3", rewrites="drops"),
}


@lru_cache(maxsize=len(BUILTIN))
def builtin_text(name: str) -> str:
    """Returns the text of a built-in template."""
    builtin = BUILTIN[name]
    file = resources.files("lockstep") / "data" / "templates" / f"{builtin.file}.jinja"
    opening = f"{{%- set {builtin.variant} = true -%}}\n" if builtin.variant else ""
    return opening + file.read_text(encoding="utf-8")


# Reasoning: a `<think>` block, or a message on the analysis channel (gpt-oss).
_BLOCK = re.compile(
    r"<think>.*?</think>\s*|<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>", re.DOTALL
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def append_only_version(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the name of the built-in append-only version of the tokenizer's template; None if there is none."""
    if not tokenizer.chat_template:
        return None
    return _version_of(tokenizer.get_chat_template(), tuple(sorted(tokenizer.special_tokens_map.items(), key=str)))


@lru_cache(maxsize=16)
def _version_of(template: str, special: tuple[tuple[str, Any], ...]) -> str | None:
    for name, builtin in BUILTIN.items():
        if builtin.rewrites and _is_version(name, template, dict(special)):
            return name
    return None


def closing_version(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the built-in version of the tokenizer's template if the latter writes no end token after assistant turns;
    else None."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    # This test is made for every row, so it must be fast.
    if not any(builtin.closings and all(map(template.__contains__, builtin.tokens)) for builtin in BUILTIN.values()):
        return None
    version = append_only_version(tokenizer)
    return version if version and BUILTIN[version].closings else None


def version_note(rows: Mapping[str, int], *, turns: str = "all") -> str:
    """Describes for the data report how many rows each append-only version rendered; `rows` has other keys, too."""
    return "".join(
        f"; {rows[name]:,} rows use the append-only template {name}, because the tokenizer's template "
        + _reason(builtin, turns)
        for name, builtin in BUILTIN.items()
        if rows.get(name)
    )


def _reason(builtin: Builtin, turns: str) -> str:
    if builtin.closings:
        return "writes no end token after an assistant turn"
    if builtin.rewrites == "drops":
        return "drops tool calls or reasoning"
    return "changes earlier turns" if turns == "all" else "does not render the trained turn as it is generated"


def same_without_thoughts(one: str, other: str) -> bool:
    """Returns whether two renderings of a chat differ only in reasoning and white space. The end token of a last answer
    of gpt-oss, `<|return|>`, is `<|end|>` if messages follow."""
    one, other = (_BLOCK.sub("", text).replace("<|return|>", "<|end|>") for text in (one, other))
    return "".join(one.split()) == "".join(other.split())


def without_closing(name: str, text: str) -> str:
    """Removes the end token of a last assistant turn if the original of the built-in template does not write it."""
    return next((text[: -len(token)] for token in BUILTIN[name].closings if text.endswith(token)), text)


def shows_reasoning(chat: Sequence[Message], text: str) -> bool:
    """Returns whether the text of a chat contains the reasoning fields of its messages."""
    fields = (message.get(key) for message in chat for key in REASONING)
    return all(value.strip() in text for value in fields if isinstance(value, str))


def without_dropped(chat: Sequence[Message]) -> list[Message]:
    """Returns a chat without tool calls and reasoning fields, which some templates drop."""
    dropped = ("tool_calls", *REASONING)
    return [{key: value for key, value in message.items() if key not in dropped} for message in chat]


def _is_version(name: str, original: str, special: Mapping[str, Any]) -> bool:
    """Compares two templates on sample chats: equal where the original is append-only, else equal without thoughts."""
    compared, drops = 0, BUILTIN[name].rewrites == "drops"
    for sample, inputs in _samples():
        if drops and inputs.get("tools"):
            continue
        chat = without_dropped(sample) if drops else sample
        expected, text = (_rendered(template, chat, inputs, special) for template in (original, builtin_text(name)))
        if expected is None:
            continue  # the original does not support such a chat
        if text is not None and chat[-1]["role"] == "assistant":
            text = without_closing(name, text)
        if text is None or not same_without_thoughts(expected, text):
            return False
        if text != expected and _is_append_only(original, chat, inputs, special) and shows_reasoning(chat, expected):
            return False
        compared += 1
    return compared > 0


def _is_append_only(template: str, chat: list[Message], inputs: Mapping[str, Any], special: Mapping[str, Any]) -> bool:
    """Returns whether every assistant turn of a chat follows its generation prompt and stays as it is."""
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
    thought: Message = {"role": "assistant", "content": "Warm.", "thinking": "South.", "reasoning_content": "South."}
    yield [user, thought, user, thought], {}
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
