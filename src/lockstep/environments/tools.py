"""Tools that are Python functions. The JSON schema of a tool comes from its type hints and its docstring.

The rules are those of `transformers.utils.get_json_schema`: every argument has a type hint, and a description in the
section `Args:` of the docstring. A function may be synchronous or asynchronous.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.environments.json_schema import fitted_arguments
from lockstep.environments.message_images import Content, image_part
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, get_function, is_registered, local_callable, locate, run_file

KEY = "rollout.tools"
_EXAMPLE = 'write: def name(city: str) -> str: """What it does.\\n\\nArgs:\\n    city: What it is.\\n"""'


class InvalidArguments(Exception):
    """The arguments of a call do not match the schema. The text says why, for the model."""


class ToolFailed(Exception):
    """A tool reports that it failed. The text is for the model."""


class ToolServerLost(Exception):
    """The process of a tool has ended, so the trajectory cannot continue."""


class ToolExit(Exception):
    """A tool tried to end its process. The text names the exception."""


@dataclass(frozen=True)
class FunctionTool:
    """A tool: a Python function and its schema, in the form that chat templates take."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any], where: str = KEY) -> FunctionTool:
        """Makes a tool of a function. Raises a `Refusal` at `where` if it has no usable schema."""
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        name = getattr(function, "__name__", type(function).__name__)
        if inspect.isclass(function):
            raise Refusal.at(
                where, f"{function.__name__} is a class, not a function", _EXAMPLE, code="invalid-function"
            )
        _refuse_signature(function, name, where)
        try:
            schema = get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise Refusal.at(where, f"{name} has no schema: {error}", _EXAMPLE, code="invalid-function") from error
        except (NameError, TypeError, ValueError, AttributeError) as error:
            why = f"the type hints or the docstring of {name} cannot be read: {error}"
            raise Refusal.at(where, why, _EXAMPLE, code="invalid-function") from error
        return cls(function, schema)

    def arguments(self, given: Any) -> dict[str, Any]:
        """Returns the arguments with the types of the schema. Raises `InvalidArguments`."""
        made, errors = fitted_arguments(given, self.schema["function"].get("parameters") or {})
        if errors:
            raise InvalidArguments("; ".join(errors))
        return made

    async def call(self, given: Any) -> Content:
        """Calls the function and returns its result as the content of a message. A synchronous function runs in a
        thread, so that it does not stop other conversations."""
        made = self.arguments(given)
        try:
            if _is_async(self.function):
                return result_content(await self.function(**made))
            result = await asyncio.to_thread(_without_exit, self.function, made)
            return result_content(await result if inspect.isawaitable(result) else result)
        except (SystemExit, KeyboardInterrupt) as error:  # in a task, they would end the process
            raise ToolExit(f"{type(error).__name__}: {error}") from error


def load_tool(tool: str | Callable[..., Any], key: str = KEY) -> FunctionTool:
    """Loads a tool: a function, the path `file.py:name`, or `package.module:name`."""
    if not isinstance(tool, str):
        return FunctionTool.of(tool, key)
    where, function = f"{key} {tool}", local_callable(tool) if is_registered(tool) else None
    if function is not None:
        return FunctionTool.of(function, where)
    home, _, name = tool.rpartition(":")
    try:
        if home.endswith(".py") or "/" in home or not home:
            file, name = locate(tool, key)
            return FunctionTool.of(get_function(run_file(file), name, ("...",), file), where)
        found = getattr(importlib.import_module(home), name)
    except Unloadable as error:
        raise Refusal.at(where, error.why, error.remedy, code=error.code) from error
    except (ImportError, AttributeError) as error:
        remedy = "write path/to/file.py:name, or package.module:name of an installed package"
        raise Refusal.at(where, f"cannot be imported: {error}", remedy, code="import-failed") from error
    if not callable(found):
        raise Refusal.at(where, f"{name} is not a function", "give a function", code="invalid-function")
    return FunctionTool.of(found, where)


def load_tools(tools: Sequence[str | Callable[..., Any]], key: str = KEY) -> list[FunctionTool]:
    """Loads several tools. Their names must differ."""
    loaded = [load_tool(tool, key) for tool in tools]
    names = [tool.name for tool in loaded]
    twin = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twin is not None:
        raise Refusal.at(key, f"two tools have the name {twin}", "rename one of the functions", code="duplicate-name")
    return loaded


def result_content(result: Any) -> Content:
    """Returns the result of a tool as the content of a message: text, or parts if the result is an image or a list with
    an image."""
    results = list(result) if isinstance(result, list | tuple) else [result]
    images = [image_part(one) for one in results]
    if not any(images):
        return result_text(result)
    parts = zip(results, images, strict=True)
    return [{"type": "text", "text": _part_text(one)} if image is None else image for one, image in parts]


def _part_text(part: Any) -> str:
    is_part = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return str(part["text"]) if is_part else result_text(part)


def result_text(result: Any) -> str:
    """Returns the result of a tool as text for the model: text unchanged, other values as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _without_exit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise ToolExit(f"{type(error).__name__}: {error}") from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _refuse_signature(function: Callable[..., Any], name: str, where: str) -> None:
    """Refuses arguments that a call by name cannot pass."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        why = f"the arguments of {name} are unknown: {error}"
        raise Refusal.at(where, why, "give a function defined with def", code="invalid-function") from error
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional-only arguments",
        inspect.Parameter.VAR_POSITIONAL: "*arguments",
        inspect.Parameter.VAR_KEYWORD: "**arguments",
    }
    for parameter in parameters:
        if parameter.kind in kinds:
            why = f"{name} takes {kinds[parameter.kind]} ({parameter.name}), but a model gives arguments by name"
            raise Refusal.at(where, why, "name every argument, with a type hint", code="invalid-function")
