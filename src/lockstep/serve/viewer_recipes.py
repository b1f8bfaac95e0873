"""Recipe and environment of a run, as text and as one line per key, and the differences between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import yaml

from lockstep.masking import masked, masked_tree
from lockstep.run.folder import RunFolder
from lockstep.serve.viewer_log import Missing, read_small

MAX_SHOWN = 2_000
"""Characters of a value in a list of differences."""
MAX_BYTES = 1 << 20
MAX_KEYS = 5_000
MAX_VALUES = 1 << 22
"""Characters of all values together. YAML anchors can expand a small file without end."""
# The loader in C, if the package has it, reads a recipe in a millisecond.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def recipe_of(root: Path, run: Path) -> dict[str, Any]:
    """`recipe` and `env` by key, the text of the recipe, and the recipes of earlier steps."""
    folder = RunFolder(run)
    earlier = [
        {"last_step": last, "text": _shown_text(read_small(root, path, MAX_BYTES))}
        for last, path in folder.earlier_recipes().items()
    ]
    found: dict[str, Any] = {"text": None, "recipe": {}, "env": {}, "earlier": earlier, "problems": []}
    if folder.recipe.is_file():
        try:
            text = read_small(root, folder.recipe, MAX_BYTES)
            found["text"], found["recipe"] = _shown_text(text), _without_secrets(flat(loaded(text)))
        except Missing as error:
            found["problems"].append(str(error))
    if folder.env.is_file():
        try:
            found["env"] = _without_secrets(flat(json.loads(read_small(root, folder.env, MAX_BYTES))))
        except (Missing, ValueError, RecursionError) as error:
            found["problems"].append(f"env.json: {error}")
    return found


def _shown_text(text: str) -> str:
    """The text of a recipe. If it contains a secret, it is written again without it."""
    try:
        values = loaded(text)
        flat(values)  # raises for endless anchors
    except Missing:
        return masked(text)
    clean = masked_tree(values)
    return masked(text) if clean == values else yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    """Flat values with secrets masked. They are flat first, because anchors can expand without end."""
    clean = {key: masked_tree(json.loads(value), key.rpartition(".")[2]) for key, value in values.items()}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in clean.items()}


def loaded(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Missing(f"recipe.yaml is damaged: {' '.join(str(error).split())}") from error


def flat(value: Any) -> dict[str, str]:
    """Every value as JSON under its dotted key."""
    found: dict[str, str] = {}
    left = MAX_VALUES

    def walk(part: Any, key: str) -> None:
        nonlocal left
        if isinstance(part, dict) and part:
            for name, item in part.items():
                walk(item, f"{key}.{name}" if key else str(name))
        elif isinstance(part, list) and any(isinstance(item, (dict, list)) for item in part):
            for number, item in enumerate(part):
                walk(item, f"{key}.{number}")
        elif len(found) < MAX_KEYS:
            found[key] = json.dumps(part, ensure_ascii=False, default=str)
            left -= len(found[key])
            if left < 0:
                raise Missing(f"has over {MAX_VALUES:,} characters: too many to show")
        else:
            raise Missing(f"has over {MAX_KEYS:,} keys: too many to show")

    try:
        walk(value, "")
    except RecursionError:
        raise Missing("is nested too deeply to show") from None
    except ValueError as error:  # a number of thousands of digits
        raise Missing(f"cannot be shown: {error}") from None
    return found


def setup_difference(root: Path, run: Path, other: Path) -> dict[str, Any]:
    """`differences` with values as JSON, those that block a comparison first, and keys `unknown` to one run. Files that
    cannot be compared are a `problem`."""
    try:
        return _compared(root, run, other)
    except Missing as problem:
        return {"problem": str(problem)}


def _compared(root: Path, run: Path, other: Path) -> dict[str, Any]:
    # Imported on use: the list of runs must not wait for the recipe's schema.
    from lockstep.parity.compare.logs.log_curves import Evidence
    from lockstep.parity.compare.run_setup import setup_differences

    a, b = (Evidence(*_setup(root, path)) for path in (run, other))
    try:
        found, unknown = setup_differences(a, b)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # Files that were changed by hand.
        raise Missing(
            f"recipe.yaml or env.json has another form than a run writes: {type(error).__name__}: {error}"
        ) from error
    rows = [
        {
            "part": each.part,
            "key": each.key,
            "a": _shown(each.a),
            "b": _shown(each.b),
            "weight": each.weight,
            "effect": each.effect,
        }
        for each in found
    ]
    return {"differences": rows, "unknown": unknown}


def _setup(root: Path, run: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any], dict[int, dict[str, Any]]]:
    """Recipe, environment, no samples, and earlier recipes."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise Missing(f"{run.name} has no recipe.yaml")
    recipe = _keys(read_small(root, folder.recipe, MAX_BYTES), run)
    earlier = {last: _keys(read_small(root, path, MAX_BYTES), run) for last, path in folder.earlier_recipes().items()}
    if not folder.env.is_file():
        return recipe, {}, [], earlier
    try:
        env = json.loads(read_small(root, folder.env, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise Missing(f"env.json of {run.name}: {error}") from error
    if not isinstance(env, dict):
        raise Missing(f"env.json of {run.name} has no keys")
    return recipe, masked_tree(env), [], earlier


def _keys(text: str, run: Path) -> dict[str, Any]:
    recipe = loaded(text)
    if not isinstance(recipe, dict):
        raise Missing(f"recipe.yaml of {run.name} has no keys")
    flat(recipe)  # raises for endless anchors
    # Imported on use, as in `_compared`.
    from lockstep.recipe.renamed_keys import stored_recipe

    return cast(dict[str, Any], stored_recipe(masked_tree(recipe)))


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " …"
