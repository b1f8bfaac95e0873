"""The user's own code that a run uses, by content: another file of the same name is another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.functions import is_function_path
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import plugin_file
from lockstep.run.files import checksum


def own_code(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By key: what the recipe says, and the SHA-256 of the file it leads to (None where there is no file to read).

    What such a file imports in turn is not looked at.
    """
    named = {"data.reader": recipe.data.reader}
    if recipe.method in ONLINE:
        named["reward.function"] = recipe.reward.function
        named["rollout.function"] = recipe.rollout.function
        named["algorithm.advantage"] = recipe.algorithm.advantage
        named["algorithm.loss"] = recipe.algorithm.loss
    functions = {key: value for key, value in named.items() if value is not None and is_function_path(value)}
    files = {key: (value, Path(value.rpartition(":")[0]).expanduser()) for key, value in functions.items()}
    plugins = {f"run.plugins.{word}": (word, plugin_file(word)) for word in recipe.run.plugins}
    return {
        key: {"name": name, "sha256": checksum(file) if file is not None and file.is_file() else None}
        for key, (name, file) in {**files, **plugins}.items()
    }


def changed_code(before: Any, now: dict[str, dict[str, Any]]) -> list[str]:
    """Of a run that goes on: what has other content than in its earlier part."""
    if not isinstance(before, dict):
        return []
    return [
        f"{key} {told['name']}: the file is another one than before this run was resumed"
        for key, told in now.items()
        if isinstance(before.get(key), dict) and before[key].get("sha256") != told["sha256"]
    ]
