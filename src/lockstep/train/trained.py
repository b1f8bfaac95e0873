"""The models of a run, and what of them cannot be trained right, or divided."""

from __future__ import annotations

from lockstep.errors import Problem, Refusal
from lockstep.model.load import load_config
from lockstep.model.router import experts_of_token, refuse_router_loss, refuse_router_noise
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
        config, where = load_config(path), f"{key} {path}"
        # A critic may be of another architecture, without experts.
        wanted = recipe.model.aux_loss_coef if key == "model.path" or experts_of_token(config) else 0.0
        try:
            refuse_router_loss(config, where, wanted)
            refuse_router_noise(config, where)
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
