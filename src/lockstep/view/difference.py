"""What is different in the set-up of two runs, weighed as `lockstep compare` weighs it: by what it does to a curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from lockstep.masking import masked_tree
from lockstep.run.folder import RunFolder
from lockstep.view.files import Missing, read_small
from lockstep.view.recipes import MOST_BYTES, flat, loaded

MOST_SHOWN = 2_000
"""Characters of one value."""


def difference_of(root: Path, run: Path, other: Path) -> dict[str, Any]:
    """`differences`, those that block a comparison first, with values as JSON; and what a side does not tell. Where
    the files do not let them be weighed, the `problem`."""
    try:
        return _weighed(root, run, other)
    except Missing as problem:
        return {"problem": str(problem)}


def _weighed(root: Path, run: Path, other: Path) -> dict[str, Any]:
    # Here, because a list of runs must not wait for the recipe's schema.
    from lockstep.parity.compare.logs.log_curves import Evidence
    from lockstep.parity.compare.run_setup import setup_differences

    a, b = (Evidence(*_setup(root, path)) for path in (run, other))
    try:
        found, unknown = setup_differences(a, b)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # A run writes neither; whoever changed the files by hand did.
        raise Missing(f"recipe.yaml or env.json is not as a run writes it: {type(error).__name__}: {error}") from error
    told = [
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
    return {"differences": told, "unknown": unknown}


def _setup(root: Path, run: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any], dict[int, dict[str, Any]]]:
    """Recipe, environment, no samples, and earlier recipes."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise Missing(f"{run.name} has no recipe.yaml")
    recipe = _keys(read_small(root, folder.recipe, MOST_BYTES), run)
    earlier = {last: _keys(read_small(root, path, MOST_BYTES), run) for last, path in folder.earlier_recipes().items()}
    if not folder.env.is_file():
        return recipe, {}, [], earlier
    try:
        env = json.loads(read_small(root, folder.env, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise Missing(f"env.json of {run.name}: {error}") from error
    if not isinstance(env, dict):
        raise Missing(f"env.json of {run.name} holds no keys")
    return recipe, masked_tree(env), [], earlier


def _keys(text: str, run: Path) -> dict[str, Any]:
    recipe = loaded(text)
    if not isinstance(recipe, dict):
        raise Missing(f"recipe.yaml of {run.name} holds no keys")
    flat(recipe)  # refuses one that is small on disk and endless when its anchors are followed
    return cast(dict[str, Any], masked_tree(recipe))


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + " …"
