"""The environment of `rollout.tools`: runs the tool calls of the model until a reply has no call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, Protocol

from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.tools import FunctionTool, InvalidArguments, ToolFailed, ToolServerLost, load_tool
from lockstep.errors import Refusal
from lockstep.functions import LONGEST_WHY
from lockstep.trajectory import ToolCall
from lockstep.types import Message

KEY = "rollout.tools"
_loading = Lock()


class ToolSession(Protocol):
    """A connection to a process that has tools."""

    tools: Sequence[FunctionTool]

    async def close(self) -> None: ...


class ToolSource(Protocol):
    """Tools of another process. `open` returns a session for one trajectory."""

    async def open(self) -> ToolSession: ...


class ToolEnvironment:
    """Runs the valid calls of a reply in parallel and returns their results in the order of the calls. An invalid call,
    a tool that raises and a tool that exceeds the time limit become messages to the model. The environment gives no
    reward: reward functions score the conversation."""

    def __init__(self, tools: Sequence[Sequence[str]], result_chars: int, timeout: float):
        """Each of `tools` is the text in the recipe, the path of the function that makes a built-in tool (empty for a
        user's function), and the argument of that function."""
        with _loading:
            loaded, sources = _loaded(tuple((text, maker, argument) for text, maker, argument in tools))
        self._tools, self._sources = dict(loaded), sources
        self._sessions: list[ToolSession] = []
        self._result_chars, self._timeout = result_chars, timeout
        self.info: dict[str, Any] = {"calls": 0}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        for source in self._sources:
            self._sessions.append(await source.open())
            self._add_tools(self._sessions[-1].tools)
        return Start(row["prompt"], [dict(tool.schema) for tool in self._tools.values()])

    def _add_tools(self, tools: Sequence[FunctionTool]) -> None:
        _add(self._tools, tools)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def step(self, reply: Reply) -> Turn:
        if not reply.calls and not reply.parse_error:
            return Turn(done=True)
        results = await self._results(reply.calls)
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
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

    async def _results(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        return list(await asyncio.gather(*(self._result(call) for call in calls)))

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        """Returns the text for the model, and whether the tool failed."""
        if call.error:
            return call.error, False
        tool = self._tools[call.name]
        try:
            text = await asyncio.wait_for(tool.call(dict(call.arguments)), self._timeout)
        except InvalidArguments as error:
            return f"error: {error}", False
        except ToolFailed as error:
            return shortened(str(error), self._result_chars), True
        except ToolServerLost:
            raise
        except asyncio.TimeoutError:
            return f"error: {call.name} did not return within {self._timeout:g} s", True
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises is a message to the model
            return f"error: {type(error).__name__}: {error}"[:LONGEST_WHY], True
        return shortened(text, self._result_chars), False


def shortened(text: str, most: int) -> str:
    """Returns the text with at most about `most` characters: a note replaces the middle of a longer text."""
    if len(text) <= most:
        return text
    note = f"\n[{len(text) - most:,} characters are left out]\n"
    return text[: most - most // 2] + note + text[len(text) - most // 2 :]


@lru_cache(maxsize=8)
def _loaded(tools: tuple[tuple[str, str, str], ...]) -> tuple[dict[str, FunctionTool], list[ToolSource]]:
    """Loads the tools once in each process."""
    _without_torch()
    found: dict[str, FunctionTool] = {}
    sources: list[ToolSource] = []
    for text, maker, argument in tools:
        module, _, name = maker.partition(":")
        made = getattr(import_module(module), name)(argument, f"{KEY} {text}") if maker else text
        if hasattr(made, "open"):
            sources.append(made)
            continue
        for tool in made if isinstance(made, list) else [made]:
            _add(found, [tool if isinstance(tool, FunctionTool) else load_tool(tool, KEY)])
    return found, sources


def _add(tools: dict[str, FunctionTool], more: Sequence[FunctionTool]) -> None:
    for tool in more:
        if tool.name in tools:
            raise Refusal.at(KEY, f"two tools have the name {tool.name}", "rename one of them", code="duplicate-name")
        tools[tool.name] = tool


def _without_torch() -> None:
    """Makes transformers derive schemas without an import of torch, which it needs only to recognise tensors and images
    among type hints. A host process starts seconds faster without torch."""
    from transformers.utils import chat_template_utils

    if "torch" not in sys.modules:
        chat_template_utils.is_torch_available = lambda: False
