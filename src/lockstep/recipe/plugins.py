"""Modules of the user's that add rows to our tables, named by `run.plugins`: imported before a recipe is checked."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import Problem
from lockstep.functions import Unloadable
from lockstep.functions.own import run_file, told

KEY = "run.plugins"
# By what the recipe says: their rows stay for all recipes of this process.
_imported: dict[str, ModuleType] = {}


def import_plugins(values: Mapping[str, Any]) -> list[Problem]:
    """Import what a recipe, not checked yet, names; returns what could not be."""
    run = values.get("run")
    named = run.get("plugins") if isinstance(run, Mapping) else None
    # Anything else than a list of texts is told by the schema.
    words = [word for word in named if isinstance(word, str)] if isinstance(named, list) else []
    return [problem for word in words if (problem := _import(word)) is not None]


def plugin_file(word: str) -> Path | None:
    """The file of a plug-in that was imported; None where it has none."""
    file = getattr(_imported.get(word), "__file__", None)
    return None if file is None else Path(file)


def _import(word: str) -> Problem | None:
    if word in _imported:
        return None
    file = Path(word).expanduser().absolute()
    try:
        if not word.endswith(".py"):
            _imported[word] = importlib.import_module(word)
        elif file.is_file():
            _imported[word] = run_file(file)
        else:
            return Problem(KEY, f"there is no file {word}", "give the path from the folder that you start in")
    except Unloadable as error:
        return Problem(f"{KEY} {word}", error.why, error.remedy)
    except ModuleNotFoundError as error:
        if error.name != word.split(".")[0] and error.name != word:
            return Problem(f"{KEY} {word}", f"cannot be imported: {told(error, word)}", "install what it needs")
        remedy = "install it, or name its file: path/to/file.py"
        return Problem(f"{KEY} {word}", "there is no such module", remedy)
    except Exception as error:  # noqa: BLE001 - whatever the user's module raises is what must be told
        return Problem(f"{KEY} {word}", f"cannot be imported: {told(error, word)}", "mend the module")
    return None
