"""Converts chats of various formats to the standard form: messages with role, content and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.errors import Refusal
from lockstep.types import Message, Origin
from lockstep.vision.images import COLUMNS as IMAGE_COLUMNS
from lockstep.vision.images import IMAGE_PARTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The conversion is needed, because chat templates drop or wrongly render some formats. Examples are ShareGPT's keys
# `from` and `value` and its role names, contents that are null or a list of text parts, and tool arguments that are
# JSON strings.

# Role names of other projects, mapped to the standard roles. A message with role `function_call` is an assistant turn.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
ROLE_NAMES = ("system", "developer", "user", "assistant", "tool")
# Types of content parts that are text; all other types (image_url, input_audio, video ...) are refused.
TEXT_PARTS = ("text", "input_text", "output_text")
# Keys that say whether a turn is trained (OpenAI, axolotl, ms-swift).
_WEIGHTS = ("weight", "train", "training", "loss")
# Axolotl keys that select the trained characters of a turn.
_DETAILS = ("train_detail", "training_detail")
SET_VISION = "set model.vision=freeze to train on images"
# Keys of images, video and audio. Rows with images, video or audio are refused, because the model would not see them.
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
_CALLS = "tool_calls"
# Keys of a chat message that hold its reasoning, separately from its content.
REASONING = ("reasoning_content", "reasoning", "thinking")


def is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role") or turn.get("from"), str)


def as_messages(turns: Sequence[Any], origin: Origin) -> list[Message]:
    """Converts messages to the standard form. Each message must satisfy `is_message`."""
    return [_message(turn, number, origin) for number, turn in enumerate(turns, 1)]


def _message(turn: dict[str, Any], number: int, origin: Origin) -> Message:
    if len(turn) == 2 and turn.get("role") in ROLE_NAMES and isinstance(turn.get("content"), str):
        return turn  # The turn is already in the standard form.
    # In a table (parquet), every message has the keys of all messages, with null values for unused keys.
    fields = {key: value for key, value in turn.items() if value is not None}
    written = fields.pop("from", None) if "role" not in fields else fields["role"]
    role = ROLES.get(str(written).lower(), str(written))
    role = role.lower() if role.lower() in ROLE_NAMES else role
    if "role" not in fields and role not in ROLE_NAMES:
        names = ", ".join(sorted({*ROLES, *ROLE_NAMES}))
        raise Refusal.at(
            origin, f"message {number} has the unknown role {written!r}", f"use one of {names}", code="unknown-role"
        )
    where = f"message {number} ({role})"
    refuse_not_text(fields, where, origin)
    content = _content(fields.pop("content", fields.pop("value", None)), where, origin)
    calls = [
        *_list_of(fields.pop(_CALLS, None), where, origin),
        *([fields.pop("function_call")] if "function_call" in fields else []),
    ]
    if written == "function_call":
        calls, content = _written_calls(content, where, origin), ""
    _read_reasoning(fields, where, origin)
    weight = _weight(fields, role, number, origin)
    found: Message = {**fields, **weight, "role": role, "content": content}
    if calls:
        found[_CALLS] = [_call(call, f"call {i} of {where}", origin) for i, call in enumerate(calls, 1)]
        found["content"] = "" if content is None else content
    return found


def _read_reasoning(fields: dict[str, Any], where: str, origin: Origin) -> None:
    """Converts the reasoning of a message to text, because templates ignore other types."""
    for key in fields.keys() & set(REASONING):
        fields[key] = _content(fields[key], where, origin)
        if not isinstance(fields[key], str):
            kind = type(fields[key]).__name__
            raise Refusal.at(origin, f"{key} of {where} is {kind}, not text", "write it as text", code="not-text")


def _weight(fields: dict[str, Any], role: str, number: int, origin: Origin) -> dict[str, int]:
    """Removes the training flag from the message; returns {"weight": 0 or 1}, or an empty dict without a flag."""
    for key in _DETAILS:
        if fields.get(key):
            why = f"message {number} selects trained characters with {key}, but only full turns can be trained"
            raise Refusal.at(
                origin, why, f"remove {key}; a weight of 0 excludes the turn from training", code="invalid-turn-weight"
            )
    flags = {key: fields.pop(key) for key in _WEIGHTS if key in fields}
    for key, value in flags.items():
        if value not in (0, 1):
            raise Refusal.at(
                origin,
                f"message {number} has a {key} of {value!r}",
                f"a {key} is 0 or 1, true or false",
                code="invalid-turn-weight",
            )
        if value and role != "assistant" and key in ("train", "training"):
            why = f"message {number} ({role}) is marked as trained ({key}), but only assistant turns are trained"
            remedy = f"set {key} to false or remove it; data.train_roles trains all messages of a role"
            raise Refusal.at(origin, why, remedy, code="invalid-turn-weight")
    weights = set(map(int, flags.values()))
    if len(weights) > 1:
        raise Refusal.at(
            origin,
            f"{' and '.join(flags)} of message {number} contradict each other",
            "keep one of them",
            code="invalid-turn-weight",
        )
    return {"weight": weights.pop()} if weights else {}


def refuse_not_text(holder: dict[str, Any], where: str, origin: Origin) -> None:
    """Raises a `Refusal` for a row or message with images, audio or video."""
    for key in NOT_TEXT:
        if holder.get(key):
            why = f"{where} has a value in {key}, but only text is trained"
            raise Refusal.at(origin, why, _remedy(key in IMAGE_COLUMNS), code="not-text")


def _remedy(image: bool) -> str:
    return f"remove the row, or {SET_VISION}" if image else "remove the row"


def _content(content: Any, where: str, origin: Origin) -> Any:
    """Returns the text of a message content, which may be a list of text parts.

    Returns content of other types unchanged; it is refused later.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS or not isinstance(text, str):
            what = repr(kind) if kind else "unknown"
            raise Refusal.at(
                origin,
                f"{where} has a content part of type {what}, but only text is trained",
                _remedy(kind in IMAGE_PARTS),
                code="not-text",
            )
        texts.append(text)
    return "".join(texts)


def _list_of(value: Any, where: str, origin: Origin) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value, f"{_CALLS} of {where}", origin) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refusal.at(
            origin,
            f"{_CALLS} of {where} is {type(value).__name__}, not a list",
            "fix or remove the row",
            code="invalid-tool",
        )
    return value


def _written_calls(content: Any, where: str, origin: Origin) -> list[Any]:
    """Returns the tool calls of a `function_call` message, whose content is the JSON of one call or a list of calls."""
    value = _parsed(content, f"{where}, from 'function_call',", origin)
    return value if isinstance(value, list) else [value]


def _call(call: Any, where: str, origin: Origin) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Refusal.at(
            origin,
            f"{where} names no function",
            'write the call as {"name": ..., "arguments": {...}}',
            code="invalid-tool",
        )
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of {where}", origin) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Refusal.at(
            origin, f"the arguments of {where} are not a JSON object", "fix or remove the row", code="invalid-tool"
        )
    outer = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **outer, "function": {"name": inner["name"], "arguments": _of_row(arguments, origin)}}


def as_object(value: Any, key: str, origin: Origin) -> dict[str, Any]:
    """Returns the object in a column, without its nulls. `value` is an object, or its JSON."""
    if isinstance(value, str):
        value = _parsed(value, key, origin) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal.at(
            origin, f"{key} is {type(value).__name__}, not an object", "fix or remove the row", code="invalid-value"
        )
    return {name: inner for name, inner in value.items() if inner is not None}


def as_tools(value: Any, key: str, origin: Origin) -> list[dict[str, Any]]:
    """Returns the tools of a row in the standard form. `value` is a list of tools, or its JSON."""
    if isinstance(value, str):
        value = _parsed(value, key, origin) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refusal.at(
            origin,
            f"{key} is {type(value).__name__}, not a list of tools",
            "fix or remove the row",
            code="invalid-tool",
        )
    return [_tool(tool, f"tool {number} of {key}", origin) for number, tool in enumerate(value, 1)]


def _tool(tool: Any, where: str, origin: Origin) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = _parsed(tool, where, origin)
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Refusal.at(
            origin, f"{where} has no name", 'write the tool as {"name": ..., "parameters": {...}}', code="invalid-tool"
        )
    wrapped = tool if "function" in tool else {"type": "function", "function": tool}
    result: dict[str, Any] = _of_row(wrapped, origin)
    return result


def _of_row(value: Any, origin: Origin) -> Any:
    """Removes the nulls that tables (parquet, arrow, hub) have for unset keys. Nulls of text files are kept."""
    table = origin.file.startswith("hub:") or origin.file.lower().endswith((".parquet", ".arrow"))
    return _without_nulls(value) if table else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _parsed(text: Any, what: str, origin: Origin) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise Refusal.at(
            origin, f"{what} should be JSON: {error}", "fix or remove the row", code="invalid-json"
        ) from error


# Most chat templates take the arguments of a tool call as an object, some as JSON text. A template that takes JSON text
# fails for an object, or renders the object as a Python repr, which is not valid JSON, so the model would learn invalid
# tool calls.

_TRIED = {"city": "Rome"}
_SHOWN = "Zq0Xk0Zq"
# Errors that a template raises if it gets an unexpected type or does not support tool calls.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def as_written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str) -> list[Message]:
    """Returns the chat with tool call arguments, reasoning and images in the form that the chat template expects."""
    messages = _with_parts(tokenizer, [_with_reasoning(message, template) for message in messages], template)
    if not any(message.get("tool_calls") for message in messages) or not _takes_text(tokenizer, template):
        return list(messages)
    return [_with_text(message) if message.get("tool_calls") else message for message in messages]


def _with_parts(tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: str) -> list[Message]:
    """Returns the messages with lists of parts as contents if the template takes no text. Messages with images get
    parts if the template takes images, so that an image is rendered as `apply_chat_template` renders it."""
    family = getattr(tokenizer, "image_family", None)
    forms = _forms(template, "" if family is None else family.token or family.pad)
    if forms == {"text"}:
        return messages
    return [_in_parts(message, image_placeholder(tokenizer), "text" in forms) for message in messages]


def image_placeholder(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of an image in a message, or an empty string if rows have no images (`RowImages`)."""
    family = getattr(tokenizer, "image_family", None)
    return "" if family is None else str(family.placeholder)


def with_image_surroundings(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Returns a rendered text with what the model's processor writes before and after each image."""
    family = getattr(tokenizer, "image_family", None)
    return text if family is None else str(family.with_surroundings(text))


def _in_parts(message: Message, placeholder: str, takes_text: bool) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or (takes_text and not (placeholder and placeholder in content)):
        return message
    texts = content.split(placeholder) if placeholder else [content]
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


@lru_cache(maxsize=16)
def _forms(template: str, image: str) -> frozenset[str]:
    """Returns which contents of messages the template renders: `text`, and `parts` with text and images. A template
    that renders nothing has the form `text`, and its error is reported when it renders a row."""
    parts = [{"type": "text", "text": _SHOWN}, *([{"type": "image"}] if image else [])]
    shown = {"text": _rendered(template, _SHOWN), "parts": _rendered(template, parts)}
    found = {name for name, text in shown.items() if _SHOWN in text and "'type'" not in text}
    if (not image and "text" in found) or image not in shown["parts"]:
        found.discard("parts")
    return frozenset(found or {"text"})


def _rendered(template: str, content: object) -> str:
    """Renders one user message, or returns an empty text if the template fails."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    chat = [{"role": "user", "content": content}]
    try:
        return str(render_jinja_template([chat], chat_template=template, **special)[0][0])
    except _FAILURES:
        return ""


def _with_reasoning(message: Message, template: str) -> Message:
    """Renames the key of the reasoning, if the template reads another one of `REASONING` and not the key of the
    message."""
    if len(message) == 2:
        return message
    for key in REASONING:
        if isinstance(message.get(key), str) and key not in _reasoning_keys(template):
            known = next((name for name in _reasoning_keys(template) if name not in message), None)
            if known is not None:
                return {**{name: value for name, value in message.items() if name != key}, known: message[key]}
    return message


@lru_cache(maxsize=16)
def _reasoning_keys(template: str) -> tuple[str, ...]:
    return tuple(key for key in REASONING if re.search(rf"(\.|\[['\"]){key}\b", template))


def _with_text(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _takes_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    return _tried(template, tuple(sorted(tokenizer.special_tokens_map.items(), key=str)))


@lru_cache(maxsize=16)
def _tried(template: str, special: tuple[tuple[str, Any], ...]) -> bool:
    """Returns whether the template renders tool arguments correctly from JSON text, but not from an object."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def shows(arguments: object) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return render_jinja_template(
                [[{"role": "user", "content": "?"}, turn]], chat_template=template, **dict(special)
            )[0][0]
        except _FAILURES:  # the error is reported when the template renders a row
            return ""

    return json.dumps(_TRIED) not in shows(_TRIED) and json.dumps(_TRIED) in shows(json.dumps(_TRIED))
