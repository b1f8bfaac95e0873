"""The models of a run, loaded, sharded and with their optimizers."""

from __future__ import annotations

import torch

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.truncate import Truncation
from lockstep.model.heads import load_critic
from lockstep.model.load import load_config, load_policy
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.shard import shard
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.step import Learner


def scoring_of(recipe: Recipe) -> Scoring:
    """Responses are scored under the distribution they are sampled from."""
    if recipe.method not in ONLINE:
        return Scoring()
    rollout = recipe.rollout
    truncation = Truncation(rollout.top_k, rollout.top_p, rollout.min_p) if rollout.truncated == "mask" else None
    return Scoring(rollout.temperature, truncation, entropy=True)


def build_policy(recipe: Recipe, device: Device, world: World, place: torch.device) -> Learner:
    policy = load_policy(recipe.model, place, device.attention, recipe.run.seed, scoring_of(recipe))
    shard(policy, policy.layers(), device, world)
    optimizer = Optimizer(
        policy.trainable(), recipe.optim, masters=bool(recipe.model.master_weights), fused=device.fused_optimizer
    )
    name = "actor" if recipe.method in ONLINE else "train"
    return Learner(policy, optimizer, place, world, _scale(recipe), name)


def build_critic(recipe: Recipe, device: Device, world: World, place: torch.device) -> Learner | None:
    if recipe.method not in ONLINE or recipe.algorithm.advantage != "gae":
        return None
    path = recipe.critic.path or recipe.model.path
    _refuse_other_vocabulary(recipe, "critic.path", path)
    critic = load_critic(recipe.model, path, place, device.attention, recipe.run.seed)
    shard(critic, critic.layers(), device, world)
    settings = recipe.optim.model_copy(update={"lr": recipe.critic.lr})
    optimizer = Optimizer(
        critic.trainable(), settings, masters=bool(recipe.model.master_weights), fused=device.fused_optimizer
    )
    return Learner(critic, optimizer, place, world, _scale(recipe), "critic")


def build_reference(recipe: Recipe, device: Device, world: World, place: torch.device) -> Policy | None:
    """A frozen model of its own; a LoRA run without a folder for it uses the policy without its adapter."""
    kl = recipe.algorithm.kl
    if recipe.method not in ONLINE or kl.where == "none" or (recipe.model.lora and kl.reference is None):
        return None
    settings = recipe.model.model_copy(update={"path": kl.reference or recipe.model.path, "lora": None})
    reference = load_policy(settings, place, device.attention, recipe.run.seed, scoring_of(recipe))
    _refuse_other_vocabulary(recipe, "algorithm.kl.reference", settings.path)
    reference.requires_grad_(False)
    shard(reference, reference.layers(), device, world)
    return reference


def _refuse_other_vocabulary(recipe: Recipe, key: str, path: str) -> None:
    """The same numbers would mean other words to it."""
    own = load_config(recipe.model.path).vocab_size
    other = load_config(path).vocab_size
    if own != other:
        raise Refusal.at(
            f"{key} {path}", f"has {other:,} words, and the policy {own:,}", "use a model of the same family"
        )


def _scale(recipe: Recipe) -> LossScale | None:
    return LossScale() if recipe.model.dtype == "fp16" else None
