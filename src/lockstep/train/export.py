"""A checkpoint as what its method makes: a language model, or a reward model."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.data.template import is_named, template_text
from lockstep.errors import Refusal
from lockstep.methods import METHODS
from lockstep.model.export import export_model, export_value_model
from lockstep.recipe import Recipe
from lockstep.reward.model import STATS
from lockstep.run import checkpoint as checkpoints
from lockstep.run.folder import RunFolder


def write_export(
    recipe: Recipe, found: checkpoints.Checkpoint, out: Path, *, adapter: bool = False, replace: bool = False
) -> list[str]:
    """The checkpoint as what its method makes: a language model, or a reward model; returns what to say of it."""
    where, ends, said = str(found.path), found.state.end_tokens, [f"exported the model to {out}"]
    method = METHODS.get(recipe.method)
    template = _template(recipe, found)
    if method is None or method.model == "policy":
        files = {**(method.files(recipe) if method else {}), **template}
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
    files, carried = dict(template), found.state.carried
    if carried.get("score_std"):
        files[STATS] = json.dumps({"mean": carried["score_mean"], "std": carried["score_std"]})
    else:
        said.append("its scores are not normalised: there were no validation rows (data.val) to take mean and std from")
    export_value_model(recipe.model, found.weights, out, where=where, end_tokens=ends, replace=replace, files=files)
    return said


def _template(recipe: Recipe, found: checkpoints.Checkpoint) -> dict[str, str]:
    """The chat template that the run was trained with, where it is not the model's own."""
    if not is_named(recipe.data):
        return {}
    kept = RunFolder(found.path.parent.parent).template
    text = kept.read_text(encoding="utf-8") if kept.is_file() else template_text(recipe.data.template)
    return {kept.name: text}
