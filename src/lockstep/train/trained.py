"""The models that a run trains, and what of them cannot be trained right."""

from __future__ import annotations

from lockstep.errors import Problem, Refusal
from lockstep.model.load import load_config
from lockstep.model.router import refuse_router_loss, refuse_router_noise
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE


def trained_folders(recipe: Recipe) -> dict[str, str]:
    """The folders of trained models by key, each once. References and teachers are only read."""
    folders = {"model.path": recipe.model.path}
    has_critic = recipe.method in ONLINE and recipe.algorithm.advantage == "gae"
    if has_critic and recipe.critic.path not in (None, recipe.model.path):
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
