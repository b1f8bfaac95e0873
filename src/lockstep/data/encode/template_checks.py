"""What a chat template left out of its text: a message, a call of a tool, the tools. Training without it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.errors import Refusal
from lockstep.types import Message, Origin

# Under these names reasoning stands beside the content of a turn.
REASONING = ("reasoning_content", "reasoning", "thinking")
_REMEDY = "use a template that writes it (data.template), or remove it from the row"


def refuse_vanished(text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], origin: Origin) -> None:
    """Refuse a text that lacks a part of the chat it was made from.

    What other roles say must stand there in its order, but for a system message, which templates move. Contents of the
    assistant are the business of whoever trains them: earlier turns may be shortened.
    """
    for tool in tools:
        for name in _names(tool["function"]):
            if _found(name, text, 0) < 0:
                raise Refusal.at(origin, f"the chat template drops the tools: {name!r} is not in its text", _REMEDY)
    reached = 0
    for number, message in enumerate(messages, 1):
        role, content = message["role"], str(message.get("content") or "").strip()
        where = f"message {number} ({role})"
        if role in ("system", "developer") and content:
            # Where others say the same words too, these are not the system message's.
            others = sum(
                str(other.get("content")).count(content)
                for other in messages
                if other is not message and other["role"] != "assistant"
            )
            if _found(content, text, 0) < 0 or text.count(content) == others > 0:
                raise Refusal.at(origin, f"the chat template drops {where}: {content[:60]!r}", _REMEDY)
        elif role != "assistant" and content:
            found = _found(content, text, reached)
            if found < 0:
                raise Refusal.at(origin, f"the chat template drops {where}: {content[:60]!r}", _REMEDY)
            reached = found
        for call in message.get("tool_calls") or []:
            reached = _past_call(call["function"], text, reached, where, origin)


def lost_beside(turn: Message, text: str) -> str:
    """What stands beside the content of a turn, its reasoning or a call, and is not in its text; empty where all is."""
    if turn.keys() == {"role", "content"}:
        return ""
    told = ((key, turn.get(key)) for key in REASONING)
    reasoning = next((key for key, said in told if isinstance(said, str) and said.strip() not in text), "")
    calls = (call["function"]["name"] for call in turn.get("tool_calls") or [])
    lost = next((name for name in calls if _found(name, text, 0) < 0), "")
    return reasoning or (lost and f"call of {lost!r}")


def _names(function: dict[str, Any]) -> list[str]:
    """Of the function, and of its parameters: a user may well name a tool, but hardly all that it takes."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return [function["name"], *(properties if isinstance(properties, dict) else ())]


def _past_call(call: dict[str, Any], text: str, reached: int, where: str, origin: Origin) -> int:
    found = _found(call["name"], text, reached)
    if found < 0:
        raise Refusal.at(origin, f"the chat template drops the call of {call['name']!r} in {where}", _REMEDY)
    for name, value in _leaves(call["arguments"]):
        if all(_found(spelling, text, reached) < 0 for spelling in _spellings(value)):
            raise Refusal.at(
                origin, f"the chat template drops {name} from the call of {call['name']!r} in {where}", _REMEDY
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
    """Where the part ends in the text, as it is or as JSON spells it; -1 where it does not stand."""
    found = text.find(part, start)
    if found >= 0:
        return found + len(part)
    for spelling in (json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]):
        found = text.find(spelling, start)
        if found >= 0:
            return found + len(spelling)
    return -1
