"""Entry points of training: `lockstep train` and `lockstep.train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from lockstep.train.callbacks import PLAIN_START, Callback, Callbacks, StartOptions, StepFunction


def train(
    recipe: str | Path | Recipe,
    *,
    accept_changed: bool = False,
    callbacks: Sequence[Callback | StepFunction] = (),
    **overrides: Any,
) -> Path:
    """Trains with a recipe, or resumes the run. `recipe` is a file, the name of a built-in recipe or a
    `lockstep.Recipe`.

    `overrides` are recipe keys as groups (`optim={"lr": 1e-4}`) or as dotted keys (`**{"optim.lr": 1e-4}`). Where a
    recipe has `path/to/file.py:name`, an override may be the Python function itself. With `accept_changed`, a run
    resumes even if the files of its models have changed since the checkpoint. `callbacks` are objects of
    `lockstep.Callback`, or functions f(state, control) that are called after each step. Returns the run folder.
    """
    file = running_file()
    if file is not None:
        why = "this file was imported to get one of its functions, but the import starts a training run"
        raise Refusal.at(file, why, 'start the run only under: if __name__ == "__main__":', code="import-side-effect")
    options = StartOptions(accept_changed, Callbacks(callbacks))
    return run_recipe(recipe_with(recipe, overrides), options)


def run_recipe(recipe: Recipe, options: StartOptions = PLAIN_START) -> Path:
    """Runs the training loop of the recipe's method. The recipe must have passed its checks."""
    refuse_other_count(recipe.parallel.devices)
    refuse_unread(recipe.parallel)
    if recipe.method in ONLINE:
        console = Console.open(ONLINE_COLUMNS, every=recipe.log.every, lines=True)
        if recipe.rollout.max_staleness is None:
            with _loading_libraries(console):
                from lockstep.train.online import train_online

            train_online(recipe, console, options)
        else:
            with _loading_libraries(console):
                from lockstep.train.online_async import train_online_async

            train_online_async(recipe, console, options)
    else:
        console = Console.open(every=recipe.log.every)
        with _loading_libraries(console):
            from lockstep.train.offline import train_offline

        train_offline(recipe, console, options)
    return Path(recipe.run.folder) / recipe.run.name


def _loading_libraries(console: Console) -> AbstractContextManager[None]:
    """Only the first rank prints. The other ranks learn that they are silent when they join the process group."""
    return console.waiting("Loading libraries") if os.environ.get("RANK", "0") == "0" else nullcontext()
