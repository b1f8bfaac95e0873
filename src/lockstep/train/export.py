"""A checkpoint as what its method makes: a language model, or a reward model."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.methods import METHODS
from lockstep.model.export import export_model, export_value_model
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.reward.model import STATS
from lockstep.reward.process import PROCESS
from lockstep.run import checkpoint as checkpoints


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
