"""Recipe and environment of a run: as text, and as one line for each key, which is what a difference is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.masking import masked, masked_tree
from lockstep.run.folder import RunFolder
from lockstep.view.files import Missing, read_small

MOST_BYTES = 1 << 20
MOST_KEYS = 5_000
MOST_VALUES = 1 << 22
"""Characters of all values together: anchors make a small file endless."""
# The one written in C where the package has it: a recipe is read in a millisecond.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def recipe_of(root: Path, run: Path) -> dict[str, Any]:
    """`recipe` and `env` by key, the recipe's text, and the recipes that trained earlier steps."""
    folder = RunFolder(run)
    earlier = [
        {"last_step": last, "text": _shown(read_small(root, path, MOST_BYTES))}
        for last, path in folder.earlier_recipes().items()
    ]
    told: dict[str, Any] = {"text": None, "recipe": {}, "env": {}, "earlier": earlier, "problems": []}
    if folder.recipe.is_file():
        try:
            text = read_small(root, folder.recipe, MOST_BYTES)
            told["text"], told["recipe"] = _shown(text), _without_secrets(flat(loaded(text)))
        except Missing as error:
            told["problems"].append(str(error))
    if folder.env.is_file():
        try:
            told["env"] = _without_secrets(flat(json.loads(read_small(root, folder.env, MOST_BYTES))))
        except (Missing, ValueError, RecursionError) as error:
            told["problems"].append(f"env.json: {error}")
    return told


def _shown(text: str) -> str:
    """The text of a recipe; written anew where an earlier version stored a secret in it."""
    try:
        values = loaded(text)
        flat(values)  # refuses what anchors make endless
    except Missing:
        return masked(text)
    clean = masked_tree(values)
    return masked(text) if clean == values else yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    """Flat values without what an earlier version stored; flat first, because anchors make a small file endless."""
    found = {key: masked_tree(json.loads(value), key.rpartition(".")[2]) for key, value in values.items()}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in found.items()}


def loaded(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Missing(f"recipe.yaml is damaged: {' '.join(str(error).split())}") from error


def flat(value: Any) -> dict[str, str]:
    """Every value under its dotted key, written as JSON."""
    found: dict[str, str] = {}
    left = MOST_VALUES

    def walk(part: Any, key: str) -> None:
        nonlocal left
        if isinstance(part, dict) and part:
            for name, item in part.items():
                walk(item, f"{key}.{name}" if key else str(name))
        elif isinstance(part, list) and any(isinstance(item, (dict, list)) for item in part):
            for number, item in enumerate(part):
                walk(item, f"{key}.{number}")
        elif len(found) < MOST_KEYS:
            found[key] = json.dumps(part, ensure_ascii=False, default=str)
            left -= len(found[key])
            if left < 0:
                raise Missing(f"has over {MOST_VALUES:,} characters: too many to show")
        else:
            raise Missing(f"has over {MOST_KEYS:,} keys: too many to show")

    try:
        walk(value, "")
    except RecursionError:
        raise Missing("is nested too deeply to show") from None
    except ValueError as error:  # a number of thousands of digits
        raise Missing(f"cannot be shown: {error}") from None
    return found
