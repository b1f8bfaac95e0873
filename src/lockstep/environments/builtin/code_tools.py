"""The tools `python` and `bash`: each call runs its code in a new sandbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from lockstep.environments.sandbox import SandboxLimits, chosen_isolation, run_bash, run_python
from lockstep.errors import Refusal


def read_limits(text: str, where: str) -> SandboxLimits:
    """Reads the limits of a tool, such as `seconds=5,memory_mb=512`."""
    kinds: dict[str, type] = {field.name: float if field.name == "seconds" else int for field in fields(SandboxLimits)}
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            number = kinds[name.strip()](value)
        except (KeyError, ValueError):
            number = 0
        if number <= 0:
            remedy = f"write limits as name=number with a positive number; the names are {', '.join(kinds)}"
            raise Refusal.at(where, f"{part!r} is not a limit of a sandbox", remedy, code="out-of-range")
        values[name.strip()] = number
    return SandboxLimits(**values)  # type: ignore[arg-type]


def longest_call(argument: str, where: str) -> float:
    """Returns the time limit of a tool in seconds."""
    return read_limits(argument, where).seconds


def python_tool(argument: str, where: str) -> Callable[..., str]:
    """Returns the tool `python`. Raises `Refusal` if this machine has no sandbox."""
    limits, isolation = read_limits(argument, where), chosen_isolation()

    def python(code: str) -> str:
        """Runs Python code in a new process and returns what it prints.

        Args:
            code: The program. Use print to see a result. Files and variables of earlier calls do not exist.
        """
        return run_python(code, limits, isolation=isolation).text

    return python


def bash_tool(argument: str, where: str) -> Callable[..., str]:
    """Returns the tool `bash`. Raises `Refusal` if this machine has no sandbox."""
    limits, isolation = read_limits(argument, where), chosen_isolation()

    def bash(script: str) -> str:
        """Runs a bash script in a new process and returns what it prints.

        Args:
            script: The commands. Files of earlier calls do not exist.
        """
        return run_bash(script, limits, isolation=isolation).text

    return bash
