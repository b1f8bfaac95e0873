"""`lockstep export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.recipe.measure import best_measure
from lockstep.run import checkpoint as checkpoints
from lockstep.run.folder import RunFolder
from lockstep.train.export import write_export


def export_run(run: Path, out: Path, *, step: int | None, best: bool, adapter: bool) -> str:
    """Write the model and say what it is."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise Refusal.at(str(run), "is not a run folder: it has no recipe.yaml", "give a folder under runs/")
    recipe = load_recipe(str(folder.recipe))
    steps = checkpoints.steps_in(folder.checkpoints)
    if not steps:
        raise Refusal.at(str(run), "has no checkpoint yet", "train it further, or set checkpoint.every")
    if best:
        measure = best_measure(recipe)
        found_best = checkpoints.best_step(folder.checkpoints, measure)
        if found_best is None:
            why = f"no kept checkpoint has a {measure.name}"
            raise Refusal.at("--best", why, "set checkpoint.best and checkpoint.keep_best")
        step = found_best[0]
    step = steps[-1] if step is None else step
    if step not in steps:
        raise Refusal.at("--step", f"{run} has no checkpoint of step {step}", f"it has {', '.join(map(str, steps))}")
    path = checkpoints.folder_of(folder.checkpoints, step)
    damage = checkpoints.damage_of(path)
    if damage is not None:
        others = [str(other) for other in steps if other != step]
        raise Refusal.at(str(path), f"is damaged: {damage}", f"export another step: {', '.join(others) or 'none left'}")
    found = checkpoints.read(path)
    write_export(recipe, found, out, adapter=adapter)
    return f"exported step {found.state.step} of {run} to {out}" + (" (adapter)" if adapter else "")
