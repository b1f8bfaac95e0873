"""Tools of verl: `rollout.tools: [verl:tool_config.yaml]` or, for `@function_tool`, `verl:functions.py`.

As in verl 0.9, each call has an instance of its own: `create`, `execute`, `release`. The reward that `execute` returns
goes to the turn and to the list `tool_rewards`. `calc_reward` is not called. Without verl, its classes are stand-ins.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.environments.adapters.verl_stand_in import install_verl
from lockstep.environments.message_images import image_part
from lockstep.environments.return_values import shown
from lockstep.environments.tool_environment import ReportCall
from lockstep.environments.tools import FunctionTool
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, describe_error, run_file

_EXAMPLE = "write: tools: [{class_name: package.module.Class, config: {type: native}, tool_schema: {...}}]"
SINGLE = "single_turn_agent"
_AGENTS = ("tool_agent", SINGLE)


class AgentData:
    """What a tool gets as `agent_data`: the row's arguments, and a place for data of the trajectory."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools_kwargs: Mapping[str, Any], request_id: str):
        self.messages = [dict(message) for message in messages]
        self.tools_kwargs, self.request_id = dict(tools_kwargs), request_id
        self.extra_fields: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.tool_rewards: list[float] = []


class VerlTools:
    """The tools of a file. They are loaded once in a process; their methods get an instance per call."""

    def __init__(self, tools: Mapping[str, Any]):
        self.tools = tools

    async def open(self, row: Mapping[str, Any], report: ReportCall) -> VerlSession:
        """Returns the tools for one trajectory. A row selects its agent with `agent_name`, and its tools with
        `extra_info.tool_selection`."""
        agent = row.get("agent_name", "tool_agent")
        if agent not in _AGENTS:
            why, remedy = f"the row has the agent_name {agent!r}", f"use {' or '.join(_AGENTS)}, or rollout.environment"
            raise Refusal.at("rollout.tools", why, remedy, code="unknown-name")
        extra = row.get("extra_info") or {}
        chosen = extra.get("tool_selection") or list(self.tools)
        names = [] if agent == SINGLE else [name for name in chosen if name in self.tools]
        given = row.get("tools_kwargs") or extra.get("tools_kwargs") or {}
        data = AgentData(row["prompt"], {name: value for name, value in given.items() if value}, str(id(row)))
        report(None, {})  # the list of rewards exists, even without a call
        return VerlSession({name: self.tools[name] for name in names}, data, report)


class VerlSession:
    """The tools of one trajectory."""

    def __init__(self, tools: Mapping[str, Any], data: AgentData, report: ReportCall):
        self._data, self._report = data, report
        self.tools = [FunctionTool(partial(self._call, tool), schema_of(tool)) for tool in tools.values()]

    async def close(self) -> None:
        """Ends the session. Every call has released its instance."""

    async def _call(self, tool: Any, /, **parameters: Any) -> str | list[Any]:
        try:
            response, reward, metrics = await self._executed(tool, parameters)
        except Exception:
            self._count(0.0, {})  # as in verl, a call that fails has the reward 0
            raise
        self._count(reward, metrics)
        if getattr(response, "video", None):
            raise ValueError(f"the tool {tool.name} returned a video, and lockstep trains on text and images only")
        text = str(getattr(response, "text", response) or "")
        images = [image_part({"type": "image", "image": image}) for image in getattr(response, "image", None) or ()]
        if None in images:
            raise ValueError(f"the tool {tool.name} returned an image that is not a PIL image, bytes or a data URI")
        return [*images, *([text] if text else [])] if images else text

    def _count(self, reward: Any, metrics: Any) -> None:
        if reward is not None:
            self._data.tool_rewards.append(float(reward))
        self._report(reward, _numbers(metrics))

    async def _executed(self, tool: Any, parameters: dict[str, Any]) -> tuple[Any, Any, Any]:
        if hasattr(tool, "fn"):
            return normalized(await tool.call(parameters))
        given = self._data.tools_kwargs.get(tool.name) or {}
        made = await _awaited(tool.create(**_create_arguments(tool.create, given.get("create_kwargs") or {})))
        instance = made[0] if isinstance(made, tuple) else made
        try:
            found = await _awaited(tool.execute(instance, parameters, **self._more(tool.execute)))
        finally:
            await _awaited(tool.release(instance))
        if not isinstance(found, tuple) or len(found) != 3:
            raise TypeError(f"execute returned {shown(found)}, expected (ToolResponse, reward, metrics)")
        return found

    def _more(self, execute: Callable[..., Any]) -> dict[str, Any]:
        takes = inspect.signature(execute).parameters.values()
        named = any(one.kind is inspect.Parameter.VAR_KEYWORD or one.name == "agent_data" for one in takes)
        return {"agent_data": self._data} if named else {}


def schema_of(tool: Any) -> dict[str, Any]:
    """Returns the JSON schema of a tool, as verl passes it to the chat template."""
    return dict(tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True))


def _create_arguments(create: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `create`: `create_kwargs` as in verl 0.9, and those that are parameters of their own, as
    in verl 0.4."""
    parameters = inspect.signature(create).parameters
    own = {name: value for name, value in given.items() if name in parameters}
    rest = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {**own, "create_kwargs": dict(given)} if rest or "create_kwargs" in parameters else own


def normalized(value: Any) -> tuple[Any, Any, Any]:
    """Returns response, reward and metrics of what a function tool returned: a response alone, or a tuple of one to
    three of them."""
    values = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(values) <= 3:
        raise TypeError(f"the tool returned a tuple of {len(values)} values, expected (response, reward, metrics)")
    response, reward, metrics = (*values, None, None)[:3]
    text = json.dumps(response, ensure_ascii=False) if isinstance(response, dict) else response
    return text if hasattr(text, "text") else str(text), 0.0 if reward is None else reward, metrics or {}


def _numbers(metrics: Any) -> dict[str, float]:
    kinds = (bool, int, float)
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(name): float(value) for name, value in items if isinstance(value, kinds)}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# Files of tools ----------------------------------------------------------------------------------------------------


def find_in_working_folder() -> None:
    """Makes modules in the working directory importable, as verl's commands do."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def verl_tools(source: str, where: str) -> VerlTools:
    """Loads the tools of a YAML file, or the functions of a Python file. Raises `Refusal` at `where`."""
    path = Path(source).expanduser().absolute()
    if not path.is_file():
        raise Refusal.at(where, f"file {source} does not exist", "give the path of the file", code="no-such-file")
    find_in_working_folder()
    install_verl()
    try:
        import_module("verl.tools.schemas")
    except Exception as error:  # noqa: BLE001 - the package may raise anything when it is imported
        why = f"verl is installed but cannot be imported: {describe_error(error, source)}"
        remedy = "install verl's packages (pip install verl), or remove verl: lockstep then uses stand-ins"
        raise Refusal.at(where, why, remedy, code="import-failed") from None
    found = _functions(path, where) if path.suffix == ".py" else _configured(path, where)
    return VerlTools(found)


def _functions(path: Path, where: str) -> dict[str, Any]:
    registry = import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    before = dict(registry)
    try:
        run_file(path)
    except Unloadable as error:
        raise Refusal.at(where, error.why, error.remedy, code=error.code) from None
    found = {name: tool for name, tool in registry.items() if before.get(name) is not tool}
    if not found:
        why = f"{path.name} has no function with @function_tool"
        raise Refusal.at(where, why, "decorate the functions, or name one: file.py:name", code="invalid-function")
    return found


def _configured(path: Path, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, entry in enumerate(_entries(path, where)):
        place = f"{path.name}: tools[{number}]"
        tool = _made(entry, place)
        if tool.name in found:
            raise Refusal.at(place, f"two tools have the name {tool.name}", "rename one", code="duplicate-name")
        found[tool.name] = tool
    return found


def _entries(path: Path, where: str) -> list[Mapping[str, Any]]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise Refusal.at(where, f"{path.name} is not YAML: {why}", "fix the file", code="invalid-yaml") from None
    entries = values.get("tools") if isinstance(values, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(one, Mapping) for one in entries):
        raise Refusal.at(f"{path.name}: tools", "is not a list of tools", _EXAMPLE, code="wrong-type")
    return entries


def _made(entry: Mapping[str, Any], place: str) -> Any:
    unknown = [name for name in entry if name not in ("class_name", "config", "tool_schema", "mcp")]
    if unknown:
        raise Refusal.at(f"{place}.{unknown[0]}", "verl has no such key", "remove it", code="unknown-key")
    config = entry.get("config")
    if not isinstance(config, Mapping):
        raise Refusal.at(f"{place}.config", "is missing", _EXAMPLE, code="not-set")
    kind = config.get("type")
    if kind != "native":
        remedy = 'write "mcp:COMMAND" in rollout.tools' if kind == "mcp" else "set config.type to native"
        raise Refusal.at(f"{place}.config.type", f"{kind!r} is not supported", remedy, code="unsupported-setting")
    created, schema = _tool_class(entry.get("class_name"), f"{place}.class_name"), None
    if entry.get("tool_schema") is not None:
        schema = _validated(entry["tool_schema"], f"{place}.tool_schema")
    try:
        tool = created(config=dict(config), tool_schema=schema)
        name, _ = tool.name, schema_of(tool)
    except Exception as error:  # noqa: BLE001 - whatever the user's class raises is the reason
        why = f"{created.__name__}(config, tool_schema) raised {describe_error(error, '')}"
        raise Refusal.at(f"{place}.class_name", why, "fix the class or its config", code="function-raised") from None
    if not name or not callable(getattr(tool, "execute", None)):
        raise Refusal.at(f"{place}.class_name", "has no method execute", "inherit BaseTool", code="invalid-function")
    return tool


def _validated(schema: Any, place: str) -> Any:
    from pydantic import ValidationError

    try:
        return import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (place, *first["loc"])))
        raise Refusal.at(where, str(first["msg"]).lower(), "fix the schema", code="invalid-tool") from None


def _tool_class(name: Any, place: str) -> Any:
    """Imports `package.module.Class`."""
    module, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module:
        raise Refusal.at(place, f"{name!r} is not package.module.Class", _EXAMPLE, code="invalid-function")
    try:
        found = getattr(import_module(module), last)
    except Exception as error:  # noqa: BLE001 - a module may raise anything when it is imported
        ours = module.startswith("verl.")
        remedy = "put the file into the working directory or an installed package"
        if ours:
            remedy = (
                "install a verl version that has it (pip install verl==0.7.1), or copy the class to a file of yours"
            )
        raise Refusal.at(place, f"{name}: {describe_error(error, module)}", remedy, code="import-failed") from None
    if not inspect.isclass(found):
        raise Refusal.at(place, f"{name} is not a class", _EXAMPLE, code="invalid-function")
    return found
