"""The models of a run, loaded, sharded and with their optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.divergence import TeacherDivergence
from lockstep.kernels.truncate import Truncation
from lockstep.methods import METHODS
from lockstep.model.heads import ValueModel, load_value_model
from lockstep.model.load import load_config, load_policy, load_tokenizer
from lockstep.model.policy import Policy, Scoring, Teacher
from lockstep.model.pretrained import told_unused
from lockstep.model.router import experts_of_token
from lockstep.model.weights import biases_and_norms
from lockstep.parallel.fits import refuse_undivided
from lockstep.parallel.mesh import sharding_of
from lockstep.parallel.offload import keep_on_host
from lockstep.parallel.shard import let_go
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.keys_parallel import Offload
from lockstep.recipe.methods import ONLINE, reference_folder, reference_kind
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Optim
from lockstep.run.output import write
from lockstep.train.balance import Balance
from lockstep.train.host_optim import HostOptimizer
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.step import Learner


def scoring_of(recipe: Recipe) -> Scoring:
    """Responses are scored under the distribution they are sampled from."""
    if recipe.distill.teacher is not None:
        settings = recipe.distill
        return Scoring(comparison=TeacherDivergence(settings.divergence, settings.mix, settings.temperature))
    if recipe.method not in ONLINE:
        return Scoring(alike=METHODS[recipe.method].alike)
    rollout = recipe.rollout
    truncation = Truncation(rollout.top_k, rollout.top_p, rollout.min_p) if rollout.truncated == "mask" else None
    squares = estimator_row(recipe.algorithm.advantage).energy
    return Scoring(rollout.temperature, truncation, entropy=True, squares=squares)


def build_learner(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Learner:
    """What the run trains: a policy, or a reward model."""
    settings, seed = recipe.model, recipe.run.seed
    offload = recipe.parallel.offload
    sharding = sharding_of(recipe.parallel, device, world, on_host=offload in ("params", "all"))
    if recipe.method not in ONLINE and METHODS[recipe.method].model == "value":
        where = (settings, settings.path, torch_device, device.attention, seed)
        model = load_value_model(*where, key="model.path", sharding=sharding)
        refuse_undivided(model, world.context, settings.path)
        _tell_unused(model, settings.path, world)
        return _learner(model, recipe, recipe.optim, device, world, torch_device, "train", offload)
    policy = load_policy(settings, torch_device, device.attention, seed, scoring_of(recipe), sharding)
    refuse_undivided(policy, world.context, settings.path)
    _tell_unused(policy, settings.path, world)
    name = "actor" if recipe.method in ONLINE else "train"
    return _learner(policy, recipe, recipe.optim, device, world, torch_device, name, offload)


def _tell_unused(module: Policy | ValueModel, path: str, world: World) -> None:
    if module.unused and world.main:
        write(f"warning: {told_unused(module.unused, path)}", error=True)


def has_critic(recipe: Recipe) -> bool:
    return recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic


def build_critic(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Learner | None:
    if not has_critic(recipe):
        return None
    path = recipe.critic.path or recipe.model.path
    refuse_other_vocabulary(recipe, "critic.path", path)
    offload = recipe.parallel.offload_critic
    sharding = sharding_of(recipe.parallel, device, world, on_host=offload in ("params", "all"))
    seed = recipe.run.seed
    critic = load_value_model(recipe.model, path, torch_device, device.attention, seed, sharding=sharding)
    refuse_undivided(critic, world.context, path)
    if path != recipe.model.path:
        _tell_unused(critic, path, world)
    settings = recipe.optim.model_copy(update={"lr": recipe.critic.lr})
    return _learner(critic, recipe, settings, device, world, torch_device, "critic", offload)


def _learner(
    module: Policy | ValueModel,
    recipe: Recipe,
    settings: Optim,
    device: Device,
    world: World,
    torch_device: torch.device,
    name: str,
    offload: Offload,
) -> Learner:
    # The optimizer steps the slices, not what a pass over the model left whole.
    let_go(module)
    masters = bool(recipe.model.master_weights)
    optimizer: Optimizer
    how: dict[str, Any] = {"masters": masters, "fused": device.fused_optimizer, "kernel": device.adamw}
    how["spared"] = biases_and_norms(module.stored)
    if offload == "none":
        optimizer = Optimizer(module.trainable(), settings, **how)
    else:
        on_host = offload in ("optimizer", "all")
        optimizer = HostOptimizer(module.trainable(), settings, **how, device=torch_device, state_on_host=on_host)
    if masters:
        module.digits.into(optimizer.masters_held())
    scale = LossScale() if recipe.model.dtype == "fp16" else None
    return Learner(module, optimizer, torch_device, world, scale, name, _balance(module, recipe, world))


def _balance(module: Policy | ValueModel, recipe: Recipe, world: World) -> Balance | None:
    """Where experts are to be kept busy alike. A critic may be of another architecture, without experts."""
    decoder = module.decoder if isinstance(module, Policy) else module.runner
    chosen = experts_of_token(decoder.model.config)
    if not recipe.model.aux_loss_coef or chosen is None:
        return None
    return Balance(module, decoder, recipe.model.aux_loss_coef, chosen, world)


def build_reference(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Policy | None:
    """A frozen model of its own, where the run keeps one beside the policy."""
    return load_reference(recipe, device, world, torch_device) if reference_kind(recipe) == "model" else None


def load_reference(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Policy:
    key = "algorithm.kl.reference" if recipe.method in ONLINE else "preference.reference"
    on_host = recipe.parallel.offload_reference
    return _frozen(recipe, key, reference_folder(recipe), device, world, torch_device, on_host)


def load_teacher(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Teacher:
    path = str(recipe.distill.teacher)
    refuse_other_tokenizer(recipe, "distill.teacher", path)
    on_host = recipe.parallel.offload_teacher
    return Teacher(_frozen(recipe, "distill.teacher", path, device, world, torch_device, on_host)).eval()


def _frozen(
    recipe: Recipe, key: str, path: str, device: Device, world: World, torch_device: torch.device, on_host: bool
) -> Policy:
    settings = recipe.model.model_copy(update={"path": path, "lora": None})
    refuse_other_vocabulary(recipe, key, path)
    sharding = sharding_of(recipe.parallel, device, world, on_host=on_host)
    seed, scoring = recipe.run.seed, replace(scoring_of(recipe), squares=False)
    policy = load_policy(settings, torch_device, device.attention, seed, scoring, sharding, frozen=True)
    refuse_undivided(policy, world.context, path)
    if path != recipe.model.path:
        _tell_unused(policy, path, world)
    if on_host and sharding is None:
        keep_on_host(policy, torch_device)
    return policy


def refuse_other_vocabulary(recipe: Recipe, key: str, path: str) -> None:
    """The same ids would be other tokens to it."""
    own = load_config(recipe.model.path).vocab_size
    other = load_config(path).vocab_size
    if own != other:
        raise Refusal.at(
            f"{key} {path}", f"has {other:,} tokens, and the policy {own:,}", "use a model of the same family"
        )


def refuse_other_tokenizer(recipe: Recipe, key: str, path: str) -> None:
    """Two vocabularies of one size may still number their tokens differently."""
    own, other = load_tokenizer(recipe.model.path).get_vocab(), load_tokenizer(path).get_vocab()
    differing = sorted(own.items() ^ other.items())
    if differing:
        token, number = differing[0]
        side = "the policy's" if (token, number) in own.items() else "its"
        raise Refusal.at(
            f"{key} {path}",
            f"its tokenizer is another one: {len(differing):,} tokens differ, the first is {token!r} "
            f"({number} in {side})",
            "use a teacher of the same family",
        )
