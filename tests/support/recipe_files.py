"""Recipe files of a few keys, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.errors import Problem, Refusal
from lockstep.recipe import load_recipe

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}


def write(folder: Path, content: dict[str, Any] | str = BASE) -> str:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def refused(recipe: str, *overrides: str) -> list[Problem]:
    with pytest.raises(Refusal) as caught:
        load_recipe(recipe, overrides)
    return caught.value.problems


def keys(problems: list[Problem]) -> set[str]:
    return {problem.where for problem in problems}
