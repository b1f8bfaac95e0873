"""Entry points of training: `lockstep train` and `lockstep.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.functions import running_file
from lockstep.launch.launcher import refuse_other_count, refuse_unread
from lockstep.recipe import Recipe
from lockstep.recipe.loader import recipe_with
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.output import ONLINE_COLUMNS


def train(recipe: str | Path | Recipe, *, accept_changed: bool = False, **overrides: Any) -> Path:
    """Train a recipe (a file, the name of a built-in recipe, or a `lockstep.Recipe`), or resume it.

    `overrides` are groups (`optim={"lr": 1e-4}`) or dotted keys (`**{"optim.lr": 1e-4}`); a function may replace
    `path/to/file.py:name`. `accept_changed` resumes a run even if the files of its models have changed since the
    checkpoint. Returns the run folder.
    """
    file = running_file()
    if file is not None:
        why = "is imported for one of its functions, and the import starts a training run"
        raise Refusal.at(file, why, 'put the run under: if __name__ == "__main__":', code="import-side-effect")
    return run_recipe(recipe_with(recipe, overrides), accept_changed=accept_changed)


def run_recipe(recipe: Recipe, *, accept_changed: bool = False) -> Path:
    """Trains a checked recipe with the loop of its method."""
    refuse_other_count(recipe.parallel.devices)
    refuse_unread(recipe.parallel)
    if recipe.method in ONLINE:
        console = Console.open(ONLINE_COLUMNS, every=recipe.log.every, lines=True)
        if recipe.rollout.max_staleness is None:
            from lockstep.train.online import train_online

            train_online(recipe, console, accept_changed=accept_changed)
        else:
            from lockstep.train.online_async import train_online_async

            train_online_async(recipe, console, accept_changed=accept_changed)
    else:
        from lockstep.train.offline import train_offline

        train_offline(recipe, Console.open(every=recipe.log.every), accept_changed=accept_changed)
    return Path(recipe.run.folder) / recipe.run.name
