"""Refuses chats if the chat template drops a message, a tool call, or the tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.data.encode.messages import REASONING
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

_REMEDY = "use a template that renders the missing part (data.template), or remove this part from the row"


def refuse_dropped_by_template(
    text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], origin: Origin, image: str = ""
) -> None:
    """Raises an error if the text that the chat template rendered lacks a part of the chat.

    The contents of all roles except the assistant must appear in the text in order. A system message may appear at
    another position, because templates move it. `image` is the text of an image in a message; templates may move images
    to the beginning of their message, so only the texts between images are searched. The callers check the assistant
    contents that are trained, because templates may shorten earlier assistant turns.
    """
    for tool in tools:
        for name in _names(tool["function"]):
            if _found(name, text, 0) < 0:
                raise Refusal.at(
                    origin,
                    f"the chat template drops the tools: {name!r} is not in the rendered text",
                    _REMEDY,
                    code="template-changes-chat",
                )
    reached = 0
    for number, message in enumerate(messages, 1):
        role, content = message["role"], str(message.get("content") or "").strip()
        where = f"message {number} ({role})"
        if role in ("system", "developer") and content:
            # The text of the system message may also occur inside other messages, and such occurrences do not count.
            others = sum(
                str(other.get("content")).count(content)
                for other in messages
                if other is not message and other["role"] != "assistant"
            )
            if _found(content, text, 0) < 0 or text.count(content) == others > 0:
                raise Refusal.at(
                    origin, f"the chat template drops {where}: {content[:60]!r}", _REMEDY, code="template-changes-chat"
                )
        elif role != "assistant" and content:
            for piece in filter(None, map(str.strip, content.split(image) if image else [content])):
                found = _found(piece, text, reached)
                if found < 0:
                    why = f"the chat template drops {where}: {content[:60]!r}"
                    raise Refusal.at(origin, why, _REMEDY, code="template-changes-chat")
                reached = found
        for call in message.get("tool_calls") or []:
            reached = _past_call(call["function"], text, reached, where, origin)


def dropped_by_template(turn: Message, text: str) -> str:
    """Returns which reasoning key or tool call of a turn is missing from its rendered text, or an empty string."""
    if turn.keys() == {"role", "content"}:
        return ""
    fields = ((key, turn.get(key)) for key in REASONING)
    reasoning = next((key for key, value in fields if isinstance(value, str) and value.strip() not in text), "")
    calls = (call["function"]["name"] for call in turn.get("tool_calls") or [])
    lost = next((name for name in calls if _found(name, text, 0) < 0), "")
    return reasoning or (lost and f"call of {lost!r}")


def _names(function: dict[str, Any]) -> list[str]:
    """Returns the names of a tool and its parameters. The parameters are searched too, because a user message may
    contain the name of a tool, but hardly the names of all its parameters."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return [function["name"], *(properties if isinstance(properties, dict) else ())]


def _past_call(call: dict[str, Any], text: str, reached: int, where: str, origin: Origin) -> int:
    found = _found(call["name"], text, reached)
    if found < 0:
        raise Refusal.at(
            origin,
            f"the chat template drops the call of {call['name']!r} in {where}",
            _REMEDY,
            code="template-changes-chat",
        )
    for name, value in _leaves(call["arguments"]):
        if all(_found(spelling, text, reached) < 0 for spelling in _spellings(value)):
            raise Refusal.at(
                origin,
                f"the chat template drops {name} from the call of {call['name']!r} in {where}",
                _REMEDY,
                code="template-changes-chat",
            )
    return found


def _leaves(value: Any, name: str = "the argument") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name} {key!r}" if name == "the argument" else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value


def _spellings(value: Any) -> tuple[str, ...]:
    return (str(value), json.dumps(value))


def _found(part: str, text: str, start: int) -> int:
    """Returns the position after `part` in the text, where `part` may be JSON-escaped. Returns -1 if `part` is
    missing."""
    found = text.find(part, start)
    if found >= 0:
        return found + len(part)
    for spelling in (json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]):
        found = text.find(spelling, start)
        if found >= 0:
            return found + len(spelling)
    return -1
