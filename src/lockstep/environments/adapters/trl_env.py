"""TRL: `rollout.environment: trl:file.py:factory`, with the `environment_factory` of a GRPOTrainer. Needs no TRL."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lockstep.environments.environment import Start
from lockstep.environments.message_images import Content, with_text
from lockstep.environments.tool_environment import ToolEnvironment
from lockstep.environments.tools import FunctionTool
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, locate, run_file
from lockstep.trajectory import ToolCall
from lockstep.types import ENVIRONMENT

_NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment(ToolEnvironment):
    """The public methods of the object that the factory makes are the tools of the model. `reset` gets the columns of
    the row, and its text follows the last message of the prompt. `get_reward` is the score of the trajectory. The calls
    of a turn run one after the other, as in TRL, because the methods share an object."""

    def __init__(
        self,
        environment: str,
        result_chars: int,
        timeout: float,
        truncation: str = "middle",
        parallel: int | None = None,
        tools: Sequence[str] = (),
    ):
        """`tools` are functions as in `rollout.tools`, which TRL takes as `tools=`."""
        super().__init__([(tool, "", "") for tool in tools], result_chars, timeout, truncation, parallel)
        self._factory, self._path = _load(environment), environment
        self._object: Any = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        factory = self._factory
        if isinstance(factory, Mapping):
            factory = _choose(factory, row.get("environment"))
            row = {name: value for name, value in row.items() if name != "environment"}
        self._object = made = await asyncio.to_thread(factory)
        methods = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction) if not name.startswith("_")]
        if "reset" not in methods:
            why = f"{type(made).__name__} has no method reset"
            raise Refusal.at(ENVIRONMENT, why, "write: def reset(self, **row)", code="invalid-function")
        for name in methods:
            if name not in _NO_TOOLS:
                self._add_tools([FunctionTool.of(getattr(made, name), f"{ENVIRONMENT} {self._path}")])
        if "get_reward" in methods:
            self.score = self._reward
        text = await asyncio.to_thread(made.reset, **_accepted(made.reset, row))
        start = await super().reset(row, seed)
        if text is None:
            return start
        if not isinstance(text, str):
            why = f"reset returned a {type(text).__name__}"
            remedy = "return a text or None"
            raise Refusal.at(ENVIRONMENT, why, remedy, code="wrong-type")
        *before, last = start.messages
        return Start([*before, {**last, "content": with_text(last["content"], text)}], start.tools)

    async def _results(self, calls: Sequence[ToolCall]) -> list[tuple[Content, bool]]:
        return [await self._result(call) for call in self._allowed(calls)]

    async def _reward(self, trajectory: Any) -> Any:
        if inspect.iscoroutinefunction(self._object.get_reward):
            return await self._object.get_reward()
        return await asyncio.to_thread(self._object.get_reward)


def _load(path: str) -> Any:
    """Returns the factory of `file.py:name` or `package.module:name`: a class, a function, or a dict of these."""
    home, _, name = path.rpartition(":")
    where = f"{ENVIRONMENT} trl:{path}"
    try:
        module = run_file(locate(path, where)[0]) if home.endswith(".py") else import_module(home)
    except Unloadable as error:
        raise Refusal.at(where, error.why, error.remedy, code=error.code) from error
    except (ImportError, ValueError) as error:
        raise Refusal.at(
            where, f"cannot be imported: {error}", "write trl:file.py:name", code="import-failed"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory) and not isinstance(factory, Mapping):
        why, remedy = f"has no environment factory {name}", "name a class, a function or a dict of them"
        raise Refusal.at(where, why, remedy, code="invalid-function")
    return factory


def _choose(factories: Mapping[str, Any], name: Any) -> Any:
    if name not in factories:
        why = f"the row has {name!r} in the column environment"
        raise Refusal.at(ENVIRONMENT, why, f"use one of {', '.join(factories)}", code="unknown-name")
    return factories[name]


def _accepted(reset: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the row that `reset` accepts. A row has fields of lockstep besides its columns."""
    parameters = inspect.signature(reset).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return dict(row)
    return {one.name: row[one.name] for one in parameters if one.name in row}
