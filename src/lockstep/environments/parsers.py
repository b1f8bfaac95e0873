"""Parses the tool calls in a turn of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.environments.messages import Reply
from lockstep.trajectory import ToolCall

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_THOUGHT = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def parse_reply(
    text: str, tools: Sequence[Mapping[str, Any]] = (), *, finish: str = "stop", ids: Sequence[int] = ()
) -> Reply:
    """Returns the reply with its reasoning, content and tool calls."""
    reasoning, rest = "", text
    if (thought := _THOUGHT.match(text)) is not None:
        reasoning, rest = thought.group(1).strip("\n"), text[thought.end() :]
    known = {str(tool.get("function", tool).get("name")) for tool in tools}
    calls: list[ToolCall] = []
    errors: list[str] = []
    for number, found in enumerate(_CALL.finditer(rest) if tools else (), 1):
        try:
            call = json.loads(found.group(1))
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("a call needs a name and an object of arguments")
        except (ValueError, KeyError, TypeError) as error:
            errors.append(f"Tool call {number} is not valid JSON: {error}")
            continue
        problem = "" if name in known else f"There is no tool {name!r}. Tools: {', '.join(sorted(known))}"
        errors += [problem] if problem else []
        calls.append(ToolCall(name, arguments, f"call{number:05}", problem))
    content = _CALL.sub("", rest).strip() if tools else rest
    return Reply(text, content, reasoning, tuple(calls), "\n".join(errors), finish, tuple(ids))
