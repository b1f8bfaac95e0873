"""The environment of `rollout.tools`: runs the tool calls of the model until a reply has no call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.sandbox import SandboxFailed
from lockstep.environments.tools import FunctionTool, InvalidArguments, ToolExit, load_tool
from lockstep.errors import Refusal
from lockstep.functions import LONGEST_WHY
from lockstep.trajectory import ToolCall
from lockstep.types import Message

KEY = "rollout.tools"


class ToolEnvironment:
    """Runs the valid calls of a reply in parallel and returns their results in the order of the calls. An invalid call,
    a tool that raises and a tool that exceeds the time limit become messages to the model. The environment gives no
    reward: reward functions score the conversation."""

    def __init__(self, tools: Sequence[Sequence[str]], result_chars: int, timeout: float):
        """Each of `tools` is the text in the recipe, the path of the function that makes a built-in tool (empty for a
        user's function), and the argument of that function."""
        self._tools = _loaded(tuple((text, maker, argument) for text, maker, argument in tools))
        self._result_chars, self._timeout = result_chars, timeout
        self.info: dict[str, Any] = {"calls": 0}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        return Start(row["prompt"], [dict(tool.schema) for tool in self._tools.values()])

    async def step(self, reply: Reply) -> Turn:
        if not reply.calls and not reply.parse_error:
            return Turn(done=True)
        results = await asyncio.gather(*(self._result(call) for call in reply.calls))
        messages: list[Message] = [
            # The name of an unknown tool is text of the model, which may contain special tokens.
            {
                "role": "tool",
                "name": call.name if call.name in self._tools else "unknown",
                "tool_call_id": call.id,
                "content": text,
            }
            for call, (text, _) in zip(reply.calls, results, strict=True)
        ]
        unread = reply.parse_error
        for call in reply.calls:
            unread = unread.replace(call.error, "") if call.error else unread
        unread = unread.strip()
        if not messages:
            messages = [{"role": "user", "content": reply.parse_error}]
        elif unread:
            messages[-1]["content"] += f"\n{unread}"
        self.info["calls"] += len(reply.valid_calls)
        return Turn(messages, metrics={"tool_errors": float(sum(failed for _, failed in results))})

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        """Returns the text for the model, and whether the tool failed."""
        if call.error:
            return call.error, False
        tool = self._tools[call.name]
        try:
            text = await asyncio.wait_for(tool.call(dict(call.arguments)), self._timeout)
        except InvalidArguments as error:
            return f"error: {error}", False
        except asyncio.TimeoutError:
            return f"error: {call.name} did not return within {self._timeout:g} s", True
        except SandboxFailed:
            raise  # the model is not the reason
        except ToolExit as error:
            return f"error: {error}"[:LONGEST_WHY], True
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is a message to the model
            return f"error: {type(error).__name__}: {error}"[:LONGEST_WHY], True
        return shortened(text, self._result_chars), False


def shortened(text: str, most: int) -> str:
    """Returns the text with at most about `most` characters: a note replaces the middle of a longer text."""
    if len(text) <= most:
        return text
    note = f"\n[{len(text) - most:,} characters are left out]\n"
    return text[: most - most // 2] + note + text[len(text) - most // 2 :]


@lru_cache(maxsize=8)
def _loaded(tools: tuple[tuple[str, str, str], ...]) -> dict[str, FunctionTool]:
    """Loads the tools once in each process."""
    _without_torch()
    found: dict[str, FunctionTool] = {}
    for text, maker, argument in tools:
        module, _, name = maker.partition(":")
        made = getattr(import_module(module), name)(argument, f"{KEY} {text}") if maker else text
        for tool in made if isinstance(made, list) else [made]:
            one: FunctionTool = tool if isinstance(tool, FunctionTool) else load_tool(tool, KEY)
            if one.name in found:
                raise Refusal.at(
                    KEY, f"two tools have the name {one.name}", "rename one of them", code="duplicate-name"
                )
            found[one.name] = one
    return found


def _without_torch() -> None:
    """Makes transformers derive schemas without an import of torch, which it needs only to recognise tensors and images
    among type hints. A host process starts seconds faster without torch."""
    from transformers.utils import chat_template_utils

    if "torch" not in sys.modules:
        chat_template_utils.is_torch_available = lambda: False
