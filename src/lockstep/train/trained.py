"""The models of a run, and what of them cannot be trained right, or divided."""

from __future__ import annotations

from lockstep.errors import Problem, Refusal
from lockstep.model.load import load_config
from lockstep.model.router import refuse_router_loss, refuse_router_noise
from lockstep.model.tensor_plan import refuse_indivisible
from lockstep.recipe import Recipe
from lockstep.recipe.methods import reference_folder, reference_kind
from lockstep.train.build import has_critic


def trained_folders(recipe: Recipe) -> dict[str, str]:
    """The folders of trained models by key, each once. References and teachers are only read."""
    folders = {"model.path": recipe.model.path}
    if has_critic(recipe) and recipe.critic.path not in (None, recipe.model.path):
        folders["critic.path"] = str(recipe.critic.path)
    return folders


def refuse_routers(recipe: Recipe) -> list[Problem]:
    """What the routers of trained models would add to training."""
    problems: list[Problem] = []
    for key, path in trained_folders(recipe).items():
        for check in (refuse_router_loss, refuse_router_noise):
            try:
                check(load_config(path), f"{key} {path}")
            except Refusal as refusal:
                problems += refusal.problems
    return list(dict.fromkeys(problems))


def refuse_indivisible_models(recipe: Recipe) -> list[Problem]:
    """Models, also those that are only read, that the processes of `parallel.tensor` cannot divide."""
    folders = list(trained_folders(recipe).values())
    if reference_kind(recipe) in ("model", "disk"):
        folders.append(reference_folder(recipe))
    if recipe.distill.teacher is not None:
        folders.append(recipe.distill.teacher)
    problems: list[Problem] = []
    for path in dict.fromkeys(folders):
        try:
            refuse_indivisible(load_config(path), path, recipe.parallel.tensor)
        except Refusal as refusal:
            problems += refusal.problems
    return problems
