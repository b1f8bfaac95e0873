"""The names of the built-in tools and environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.environments.builtin.calculator import calculator
from lockstep.environments.builtin.code_tools import bash_tool, python_tool
from lockstep.environments.builtin.corpus_search import search_tool
from lockstep.errors import Refusal


def _calculator_tool(argument: str, where: str) -> Callable[..., str]:
    if argument:
        raise Refusal.at(where, "calculator has no argument", "write calculator", code="unknown-name")
    return calculator


# Each entry takes the text after the colon (`search:corpus.jsonl`) and the recipe key, and returns the function.
BUILTIN_TOOLS: dict[str, Callable[[str, str], Callable[..., Any]]] = {
    "calculator": _calculator_tool,
    "python": python_tool,
    "bash": bash_tool,
    "search": search_tool,
}
# The class of each built-in environment, as `package.module:Class`.
BUILTIN_ENVIRONMENTS = {
    "guess_number": "lockstep.environments.builtin.guess_number:GuessNumber",
}


def builtin_tool(tool: str, key: str) -> Callable[..., Any] | None:
    """Returns the function of a built-in tool, such as `python:seconds=5`. Returns None for other tools."""
    name, _, argument = tool.partition(":")
    make = BUILTIN_TOOLS.get(name)
    return None if make is None else make(argument, f"{key} {tool}")
