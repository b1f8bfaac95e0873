"""`lockstep train --resume-from`: a new run that begins as a copy of another one up to one of its checkpoints.

The other run stays as it is. What the new folder begins with is what a run that got this far leaves: the checkpoint,
the metrics and samples up to it, and the recipes that trained it; from there on it is resumed like any run.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from lockstep.errors import Refusal, unwritten
from lockstep.recipe import Recipe
from lockstep.recipe.loader import resolved
from lockstep.run import checkpoint as checkpoints
from lockstep.run.files import checksum, written_aside
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import rewind_lines
from lockstep.train.resume import model_paths, refuse_changed_recipe

ORIGIN = "resumed_from.json"
"""In a run folder that began as a copy: of which run, and after which step."""


def adopt(recipe: Recipe, path: Path) -> str | None:
    """Prepare the recipe's run folder; what to say of it, or None where it has gone on from there already."""
    found = checkpoint_at(path)
    step, target = int(found.name.removeprefix("step_")), RunFolder(Path(recipe.run.folder) / recipe.run.name)
    source = RunFolder(found.parent.parent)
    if target.path.exists() and target.path.samefile(source.path):
        newer = [other for other in checkpoints.steps_in(target.checkpoints) if other > step]
        if newer:
            why = f"the run has gone on to step {newer[-1]}: going back would throw away what it trained since"
            raise Refusal.at(f"--resume-from {path}", why, "give the new run another run.name")
        return None
    origin = {"run": str(source.path), "step": step, "manifest": checksum(found / checkpoints.MANIFEST)}
    if target.path.exists():
        file = target.path / ORIGIN
        if file.is_file() and read_object(file).get("manifest") == origin["manifest"]:
            return None
        why = f"{target.path} is there already, and did not begin with this checkpoint"
        raise Refusal.at(f"--resume-from {path}", why, "choose another run.name, or leave --resume-from out")
    refuse_changed_recipe(checkpoints.read(found).state, resolved(recipe), model_paths(recipe))
    try:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(target.path) as aside:
            _copy(source, found, step, RunFolder(aside))
            (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritten(target.path, error) from error
    return f"{target.path} begins with {found}"


def checkpoint_at(path: Path) -> Path:
    """A whole checkpoint: the one that the path is, or the newest of the run that it is."""
    where = f"--resume-from {path}"
    if (path / checkpoints.STATE).is_file() and path.name.startswith("step_"):
        found = path
    else:
        steps = checkpoints.steps_in(RunFolder(path).checkpoints)
        if not steps:
            why = "is no checkpoint, and no run folder that has one"
            raise Refusal.at(where, why, "name runs/NAME, or runs/NAME/checkpoints/step_N; for weights: --init-from")
        found = checkpoints.folder_of(RunFolder(path).checkpoints, steps[-1])
    damage = checkpoints.damage_of(found)
    if damage is not None:
        raise Refusal.at(where, f"{found} is damaged: {damage}", "name another checkpoint")
    return found.resolve()


def _copy(source: RunFolder, found: Path, step: int, target: RunFolder) -> None:
    target.checkpoints.mkdir(parents=True)
    shutil.copytree(found, checkpoints.folder_of(target.checkpoints, step), copy_function=_linked)
    for file in (source.metrics, source.samples, source.env):
        if file.is_file():
            shutil.copyfile(file, target.path / file.name)
    for file in (target.metrics, target.samples):
        rewind_lines(file, step)
    # Each recipe by the last step that it trained; the one that held at the checkpoint is the present one.
    parts = {last: file for last, file in source.earlier_recipes().items() if last < step}
    for last, file in parts.items():
        shutil.copyfile(file, target.earlier_recipe(last))
    later = [file for last, file in source.earlier_recipes().items() if last >= step]
    held = later[0] if later else source.recipe
    if held.is_file():
        shutil.copyfile(held, target.recipe)


def _linked(source: str, target: str) -> None:
    """A checkpoint's files are never written again, so both folders may have the same ones."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
