"""What model a run makes, and a checkpoint of it as a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lockstep.data.template import is_named, template_text
from lockstep.methods import METHODS
from lockstep.model.export import export_checkpoint
from lockstep.model.export_check import Verification
from lockstep.recipe import Recipe
from lockstep.reward.model import STATS
from lockstep.run import checkpoint as checkpoints
from lockstep.run.folder import RunFolder
from lockstep.run.model_card import card_files


def kind_of(recipe: Recipe) -> str:
    """A language model, or a reward model: what `State.kind` says."""
    method = METHODS.get(recipe.method)
    return "policy" if method is None else method.model


def files_of(recipe: Recipe, carried: Mapping[str, float], run: RunFolder) -> dict[str, str]:
    """What whoever uses the model must know beside it: `State.files`."""
    method = METHODS.get(recipe.method)
    files = {**(method.files(recipe) if method else {}), **_template(recipe, run)}
    if kind_of(recipe) == "value" and carried.get("score_std"):
        files[STATS] = json.dumps({"mean": carried["score_mean"], "std": carried["score_std"]})
    return files


def write_export(
    recipe: Recipe,
    found: checkpoints.Checkpoint,
    out: Path,
    run: RunFolder,
    *,
    adapter: bool = False,
    replace: bool = False,
) -> tuple[list[str], Verification]:
    """The checkpoint as what its method makes, with a card of what its run did; returns what to say of it."""
    state, said = found.state, [f"exported the model to {out}"]
    if not state.kind:  # an earlier version saved it
        state.kind, state.files = kind_of(recipe), files_of(recipe, state.carried, run)
    card = card_files(run, state.step, adapter=adapter)
    verified = export_checkpoint(recipe.model, found, out, adapter=adapter, replace=replace, files=card)
    if state.kind == "value" and STATS not in state.files:
        said.append("its scores are not normalised: there were no validation rows (data.val) to take mean and std from")
    return said, verified


def _template(recipe: Recipe, run: RunFolder) -> dict[str, str]:
    """The chat template that the run was trained with, where it is not the model's own."""
    if not is_named(recipe.data):
        return {}
    kept = run.template
    text = kept.read_text(encoding="utf-8") if kept.is_file() else template_text(recipe.data.template)
    return {kept.name: text}
