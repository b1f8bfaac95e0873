"""The environment of `rollout.tools`: runs the tool calls of the model until a reply has no call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, Protocol

from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.message_images import Content, with_text, with_texts
from lockstep.environments.sandbox import SandboxFailed
from lockstep.environments.tools import FunctionTool, InvalidArguments, ToolExit, ToolFailed, ToolServerLost, load_tool
from lockstep.errors import Refusal
from lockstep.functions import LONGEST_WHY
from lockstep.trajectory import ToolCall, with_own
from lockstep.types import Message

KEY = "rollout.tools"
_loading = Lock()


class ToolSession(Protocol):
    """A connection to a process that has tools."""

    tools: Sequence[FunctionTool]

    async def close(self) -> None: ...


CallReport = tuple[float | None, Mapping[str, float]]
# The reports of the call that a task runs.
_reports: ContextVar[list[CallReport] | None] = ContextVar("reports", default=None)
ReportCall = Callable[[float | None, Mapping[str, float]], None]
"""Takes the reward of a call, or None, and its metrics."""


class ToolSource(Protocol):
    """Tools of another process or framework. `open` returns a session for one trajectory."""

    async def open(self, row: Mapping[str, Any], report: ReportCall) -> ToolSession: ...


class ToolEnvironment:
    """Runs the valid calls of a reply in parallel and returns their results in the order of the calls. An invalid call,
    a tool that raises and a tool that exceeds the time limit become messages to the model. Functions give no reward:
    reward functions score the conversation. Tools of other frameworks may report rewards of their calls."""

    def __init__(
        self,
        tools: Sequence[Sequence[str]],
        result_chars: int,
        timeout: float,
        truncation: str = "middle",
        parallel: int | None = None,
    ):
        """Each of `tools` is the text in the recipe, the path of the function that makes a built-in tool (empty for a
        user's function), and the argument of that function."""
        with _loading:
            loaded, sources = _loaded(tuple((text, maker, argument) for text, maker, argument in tools))
        self._tools, self._sources = dict(loaded), sources
        self._sessions: list[ToolSession] = []
        self._result_chars, self._timeout = result_chars, timeout
        self._truncation, self._parallel = truncation, parallel
        self._reported: list[list[CallReport]] = []
        """What the calls of the turn report, in the order of the calls."""
        self.info: dict[str, Any] = {"calls": 0}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        for source in self._sources:
            self._sessions.append(await source.open(row, self._report))
            self._add_tools(self._sessions[-1].tools)
        return Start(row["prompt"], [dict(tool.schema) for tool in self._tools.values()])

    def _add_tools(self, tools: Sequence[FunctionTool]) -> None:
        _add(self._tools, tools)

    def _report(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """Records a reward and metrics of the call that runs, or, outside of a call, that the tools report rewards."""
        self.info.setdefault("tool_rewards", [])
        if (reports := _reports.get()) is not None:
            reports.append((reward, metrics))

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def step(self, reply: Reply) -> Turn:
        if not reply.calls and not reply.parse_error:
            return Turn(done=True)
        results = await self._results(reply.calls)
        messages: list[Message] = [
            # The name of an unknown tool is text of the model, which may contain special tokens.
            {
                "role": "tool",
                "name": call.name if call.name in self._tools else "unknown",
                "tool_call_id": call.id,
                "content": content,
            }
            for call, (content, _) in zip(reply.calls, results, strict=True)
        ]
        unread = reply.parse_error
        for call in reply.calls:
            unread = unread.replace(call.error, "") if call.error else unread
        unread = unread.strip()
        if not messages:
            messages = [{"role": "user", "content": reply.parse_error}]
        elif unread:
            messages[-1]["content"] = with_text(messages[-1]["content"], f"\n{unread}")
        self.info["calls"] += len(reply.valid_calls)
        counted, of_tools = {"tool_errors": float(sum(failed for _, failed in results))}, dict[str, float]()
        reported, self._reported = [report for call in self._reported for report in call], []
        rewards = [float(reward) for reward, _ in reported if reward is not None]
        for _, numbers in reported:
            of_tools |= {name: of_tools.get(name, 0.0) + number for name, number in numbers.items()}
        if "tool_rewards" in self.info:
            self.info["tool_rewards"] += rewards
        return Turn(messages, sum(rewards), metrics=with_own(counted, of_tools))

    async def _results(self, calls: Sequence[ToolCall]) -> list[tuple[Content, bool]]:
        return list(await asyncio.gather(*(self._result(call) for call in self._allowed(calls))))

    def _allowed(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Returns the calls; those above the limit of calls per turn have an error instead of a result."""
        most = len(calls) if self._parallel is None else self._parallel
        why = f"error: this call did not run, because a turn may have at most {most} call{'' if most == 1 else 's'}"
        return [*calls[:most], *(replace(call, error=call.error or why) for call in calls[most:])]

    async def _result(self, call: ToolCall) -> tuple[Content, bool]:
        """Returns the content of the message for the model, and whether the tool failed."""
        if call.error:
            return call.error, False
        self._reported.append([])  # calls start in their order, and end in any order
        _reports.set(self._reported[-1])
        tool = self._tools[call.name]
        try:
            content = await asyncio.wait_for(tool.call(dict(call.arguments)), self._timeout)
        except InvalidArguments as error:
            return whole_characters(f"error: {error}"), False
        except ToolFailed as error:
            return self._shortened(str(error)), True
        except ToolServerLost:
            raise
        except asyncio.TimeoutError:
            return f"error: {call.name} did not return within {self._timeout:g} s", True
        except SandboxFailed:
            raise  # the model is not the reason
        except ToolExit as error:
            return whole_characters(f"error: {error}")[:LONGEST_WHY], True
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is a message to the model
            return _error_text(error), True
        return with_texts(content, self._shortened), False

    def _shortened(self, text: str) -> str:
        return shortened(whole_characters(text), self._result_chars, self._truncation)


def whole_characters(text: str) -> str:
    """Returns the text with U+FFFD in place of lone surrogates, which no tokenizer takes. Tools return them for file
    names and JSON texts that are not valid."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _error_text(error: Exception) -> str:
    try:
        return whole_characters(f"error: {type(error).__name__}: {error}"[:LONGEST_WHY])
    except Exception:  # noqa: BLE001 - the __str__ of a user exception may fail
        return f"error: {type(error).__name__}"


def shortened(text: str, most: int, truncation: str = "middle") -> str:
    """Returns the text with at most about `most` characters: a note replaces the middle of a longer text, its start
    (`left`) or its end (`right`)."""
    if len(text) <= most:
        return text
    note = f"[{len(text) - most:,} characters are left out]"
    if truncation == "left":
        return f"{note}\n{text[len(text) - most :]}"
    if truncation == "right":
        return f"{text[:most]}\n{note}"
    return f"{text[: most - most // 2]}\n{note}\n{text[len(text) - most // 2 :]}"


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
