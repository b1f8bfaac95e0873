"""Chats in one form: messages of role and content, with tool calls and their arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Chats as projects publish them, in one form: messages of role and content, with the calls of tools apart.
#
# ShareGPT's `from` and `value`, its names of roles, contents that are null or lists of text parts, calls whose
# arguments are JSON in a string: templates know none of these, and would drop them or write them down wrongly.

# Names of other projects for the roles that templates know. A call of a tool is a turn of the assistant.
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
KNOWN = ("system", "developer", "user", "assistant", "tool")
# Kinds of a part that is text; everything else (image_url, input_audio, video ...) is none.
TEXT_PARTS = ("text", "input_text", "output_text")
# Whether a turn is trained: under OpenAI's name, axolotl's and ms-swift's.
_WEIGHTS = ("weight", "train", "training", "loss")
# Axolotl's: which characters of a turn are trained.
_DETAILS = ("train_detail", "training_detail")
# Text trained without them would be an answer to something that the model never sees.
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
_CALLS = "tool_calls"


def is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role") or turn.get("from"), str)


def as_messages(turns: Sequence[Any], origin: Origin) -> list[Message]:
    """Messages of any of the forms in the one that templates know; `is_message` must hold of each."""
    return [_message(turn, number, origin) for number, turn in enumerate(turns, 1)]


def _message(turn: dict[str, Any], number: int, origin: Origin) -> Message:
    if len(turn) == 2 and turn.get("role") in KNOWN and isinstance(turn.get("content"), str):
        return turn  # most are in this form already
    # Columns of a table give every message the keys of all of them.
    said = {key: value for key, value in turn.items() if value is not None}
    written = said.pop("from", None) if "role" not in said else said["role"]
    role = ROLES.get(str(written).lower(), str(written))
    role = role.lower() if role.lower() in KNOWN else role
    if "role" not in said and role not in KNOWN:
        names = ", ".join(sorted({*ROLES, *KNOWN}))
        raise Refusal.at(origin, f"message {number} is from {written!r}, which is no known role", f"known are {names}")
    where = f"message {number} ({role})"
    refuse_not_text(said, where, origin)
    content = _content(said.pop("content", said.pop("value", None)), where, origin)
    calls = [
        *_list_of(said.pop(_CALLS, None), where, origin),
        *([said.pop("function_call")] if "function_call" in said else []),
    ]
    if written == "function_call":
        calls, content = _written_calls(content, where, origin), ""
    weight = _weight(said, role, number, origin)
    found: Message = {**said, **weight, "role": role, "content": content}
    if calls:
        found[_CALLS] = [_call(call, f"call {i} of {where}", origin) for i, call in enumerate(calls, 1)]
        found["content"] = "" if content is None else content
    return found


def _weight(said: dict[str, Any], role: str, number: int, origin: Origin) -> dict[str, int]:
    """Whether the turn is trained, as a weight of 0 or 1, taken out of the message; nothing where it does not say."""
    for key in _DETAILS:
        if said.get(key):
            why = f"message {number} says with {key} which part of it is trained, and turns are trained whole"
            raise Refusal.at(origin, why, f"remove {key}; a weight of 0 leaves the turn untrained")
    told = {key: said.pop(key) for key in _WEIGHTS if key in said}
    for key, value in told.items():
        if value not in (0, 1):
            raise Refusal.at(origin, f"message {number} has a {key} of {value!r}", f"a {key} is 0 or 1, true or false")
        if value and role != "assistant" and key in ("train", "training"):
            why = f"message {number} ({role}) is to be trained ({key}), and turns of the assistant alone are"
            raise Refusal.at(origin, why, f"set {key} to false or remove it")
    weights = set(map(int, told.values()))
    if len(weights) > 1:
        raise Refusal.at(origin, f"{' and '.join(told)} of message {number} say different things", "keep one of them")
    return {"weight": weights.pop()} if weights else {}


def refuse_not_text(holder: dict[str, Any], where: str, origin: Origin) -> None:
    """Of a row or a message that has pictures or sound under a key of their own."""
    for key in NOT_TEXT:
        if holder.get(key):
            raise Refusal.at(
                origin, f"{where} holds something in {key}, and text alone is trained here", "remove the row"
            )


def _content(content: Any, where: str, origin: Origin) -> Any:
    """The text of a content, also of one in parts; what is neither is left for the check of messages."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS or not isinstance(text, str):
            what = repr(kind) if kind else "no known type"
            raise Refusal.at(
                origin, f"{where} holds a part of type {what}, and text alone is trained here", "remove the row"
            )
        texts.append(text)
    return "".join(texts)


def _list_of(value: Any, where: str, origin: Origin) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value, f"{_CALLS} of {where}", origin) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refusal.at(origin, f"{_CALLS} of {where} is {type(value).__name__}, not a list", "mend or remove the row")
    return value


def _written_calls(content: Any, where: str, origin: Origin) -> list[Any]:
    """The calls that a message from `function_call` has as JSON: one, or a list of them."""
    value = _parsed(content, f"{where}, from 'function_call',", origin)
    return value if isinstance(value, list) else [value]


def _call(call: Any, where: str, origin: Origin) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Refusal.at(origin, f"{where} names no function", 'write it as {"name": ..., "arguments": {...}}')
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"the arguments of {where}", origin) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Refusal.at(origin, f"the arguments of {where} are no object", "mend or remove the row")
    outer = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
    return {"type": "function", **outer, "function": {"name": inner["name"], "arguments": _of_row(arguments, origin)}}


def as_tools(value: Any, key: str, origin: Origin) -> list[dict[str, Any]]:
    """The tools of a row, as a list or as JSON of one, in the form that templates know; empty without any."""
    if isinstance(value, str):
        value = _parsed(value, key, origin) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refusal.at(origin, f"{key} is {type(value).__name__}, not a list of tools", "mend or remove the row")
    return [_tool(tool, f"tool {number} of {key}", origin) for number, tool in enumerate(value, 1)]


def _tool(tool: Any, where: str, origin: Origin) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = _parsed(tool, where, origin)
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Refusal.at(origin, f"{where} has no name", 'write it as {"name": ..., "parameters": {...}}')
    whole = tool if "function" in tool else {"type": "function", "function": tool}
    found: dict[str, Any] = _of_row(whole, origin)
    return found


def _of_row(value: Any, origin: Origin) -> Any:
    """Without the nulls that a table puts where another row has a key; in text files a null was written down."""
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
        raise Refusal.at(origin, f"{what} should be JSON: {error}", "mend or remove the row") from error


# The arguments of tool calls in the form that a chat template writes: most take an object, some the JSON of one.
#
# A template of the second kind, given an object, fails, or writes it as Python shows it (`{'city': 'Rome'}`), and
# nobody would see that no call of the trained model can be parsed.

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
