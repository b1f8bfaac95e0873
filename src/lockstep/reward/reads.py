"""What of a question the rewards of a run read: rows are asked for that, and for nothing else."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.functions import located, only_here
from lockstep.recipe.keys_online import Reward
from lockstep.reward.scorer import active_weights

EVERYTHING = frozenset({"ground_truth", "data_source"})
# The names under which a function may take them.
_NAMES = {"ground_truth": "ground_truth", "labels": "ground_truth", "data_source": "data_source"}


def read_by_rewards(settings: Reward) -> frozenset[str]:
    """Those of `ground_truth` and `data_source` that the rule or the function reads. An endpoint and a reward model
    are sent what there is."""
    weights, _ = active_weights(settings)
    if weights.get("rule"):  # with a weight of 0 it measures what it can, and is left out elsewhere
        return EVERYTHING
    if settings.function is None:
        return frozenset()
    function = only_here(settings.function)
    if function is not None:
        return _read_by_callable(function)
    try:
        file, name = located(settings.function, "reward.function")
    except Refusal:
        return EVERYTHING  # told by whoever opens the function
    return _read_by(file, name)


def _read_by_callable(function: Callable[..., Any]) -> frozenset[str]:
    """By the names that its code loads: a notebook cell has no file."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return EVERYTHING
    used: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD", "STORE_FAST_LOAD", "MAKE_CELL")):
            found = instruction.argval
            used |= {found} if isinstance(found, str) else set(found) if isinstance(found, tuple) else set()
    counted = code.co_argcount + code.co_kwonlyargcount
    if "locals" in used:
        return EVERYTHING
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = code.co_varnames[counted + bool(code.co_flags & inspect.CO_VARARGS)]
        if rest in used:
            return EVERYTHING
    return frozenset(_NAMES[name] for name in set(code.co_varnames[:counted]) & used & set(_NAMES))


def _read_by(file: Path, name: str) -> frozenset[str]:
    """By the function's text, which is not run here. What cannot be told is taken as read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return EVERYTHING
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if len(found) != 1 or found[0].decorator_list:
        return EVERYTHING
    function = found[0]
    used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    arguments = function.args
    rest = arguments.kwarg
    if "locals" in used or (rest is not None and rest.arg in used):
        return EVERYTHING
    taken = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return frozenset(_NAMES[name] for name in taken & used & set(_NAMES))
