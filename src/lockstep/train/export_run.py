"""`lockstep export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.methods import METHODS
from lockstep.model.export import export_model, export_value_model
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.reward.model import STATS
from lockstep.reward.process import PROCESS
from lockstep.run.folder import RunFolder
from lockstep.train import checkpoint as checkpoints


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
        step = checkpoints.best_step(folder.checkpoints)
        if step is None:
            raise Refusal.at("--best", "no kept checkpoint has a val/loss", "set data.val and checkpoint.keep_best")
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


def write_export(
    recipe: Recipe, found: checkpoints.Checkpoint, out: Path, *, adapter: bool = False, replace: bool = False
) -> list[str]:
    """The checkpoint as what its method makes: a language model, or a reward model; returns what to say of it."""
    where, ends, said = str(found.path), found.state.end_tokens, [f"exported the model to {out}"]
    if recipe.method in ONLINE or METHODS[recipe.method].model == "policy":
        files = {}
        if recipe.method == "prm":
            files[PROCESS] = json.dumps(recipe.prm.model_dump(), ensure_ascii=False, indent=2)
        export_model(
            recipe.model,
            found.weights,
            out,
            where=where,
            adapter=adapter,
            end_tokens=ends,
            replace=replace,
            files=files,
        )
        return said
    if adapter:
        raise Refusal.at("--adapter", "a reward model's head is no adapter", "export without --adapter")
    files, carried = {}, found.state.carried
    if carried.get("score_std"):
        files[STATS] = json.dumps({"mean": carried["score_mean"], "std": carried["score_std"]})
    else:
        said.append("its scores are not normalised: there were no validation rows (data.val) to take mean and std from")
    export_value_model(recipe.model, found.weights, out, where=where, end_tokens=ends, replace=replace, files=files)
    return said
