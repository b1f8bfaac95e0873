"""Loads and shards the models of a run, creates their optimizers, and computes log-probs and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from lockstep.data.batching import (
    Outline,
    PackedRow,
    PackedSequence,
    micro_batch,
    pack_groups,
    plan_micro_batches,
    run_on,
    target_starts,
)
from lockstep.data.updates import Update, arrange
from lockstep.device.base import Device, fetched
from lockstep.errors import refuse_all
from lockstep.kernels.fused import BY_ROW
from lockstep.kernels.logit_divergence import Likeliest, TeacherDivergence
from lockstep.kernels.sampling import Truncation
from lockstep.methods import METHODS
from lockstep.model.heads import ValueModel
from lockstep.model.load import load_policy, load_value_model
from lockstep.model.policy import Policy, Scoring, Teacher, evaluating
from lockstep.model.pretrained import told_unused
from lockstep.model.router import experts_of_token
from lockstep.model.routing import Routing
from lockstep.model.weights import biases_and_norms
from lockstep.optimizers.roles import roles_of
from lockstep.parallel.context_split import Division, refuse_undivided
from lockstep.parallel.offload import keep_on_host, resident
from lockstep.parallel.sharding import reshard, sharding_of
from lockstep.parallel.world import World
from lockstep.preflight.image_trial import check_images
from lockstep.preflight.model_checks import has_critic, refuse_other_tokenizer, refuse_other_vocabulary
from lockstep.recipe import Recipe
from lockstep.recipe.keys_optim import Optim, ParameterGroup
from lockstep.recipe.keys_parallel import Offload
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.optim_checks import unmatched_groups
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Model
from lockstep.run.output import write
from lockstep.train.logprob_cache import LogprobCache
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.optim_offload import HostOptimizer
from lockstep.train.optim_rules import RuleOptimizer
from lockstep.train.routing_replay import install_routing
from lockstep.train.step import Balance, Learner
from lockstep.types import Example, Item, MicroBatch

# Log-probs, values and scores are vectors on the CPU with one number per target token. Usually every rank has the
# vector entries of all targets of an update. If the responses are distributed over the ranks, a rank has only the
# entries of its own targets.

T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Packing:
    """The settings by which sequences are packed into micro-batches."""

    world: World
    tokens: int | None
    rows: int | None
    pad_id: int

    @classmethod
    def of(cls, recipe: Recipe, world: World, pad_id: int) -> Packing:
        return cls(world, recipe.line_tokens, recipe.batch.micro_batch_size, pad_id)

    def __call__(self, items: Sequence[T]) -> Update[T]:
        return arrange(items, self.world, tokens=self.tokens, rows=self.rows, pad_id=self.pad_id)

    def pack(self, responses: Sequence[Outline], alike_up_to: int | None) -> list[list[PackedRow]]:
        """Returns the packed rows of each data-parallel rank. Responses to the same prompt in a packed row share the
        tokens of the prompt, except with context parallelism."""
        alone = len({one.prompt for one in responses}) == len(responses) and not any(one.further for one in responses)
        if self.tokens is None or self.world.context is not None or alone:
            # The sequences of a trajectory share no tokens here.
            lengths = [one.full for one in responses]
            several = [one.full for one in responses if one.further]
            tokens = None if self.tokens is None else max([self.tokens, *several])
            counts = [1 + len(one.further) for one in responses]
            plan = plan_micro_batches(lengths, devices=self.world.dp_size, tokens=tokens, rows=self.rows, counts=counts)
            return [[[PackedSequence(number, 0) for number in members] for members in share] for share in plan]
        return pack_groups(responses, self.world.dp_size, tokens=self.tokens, alike_up_to=alike_up_to)

    def batch(
        self,
        row: PackedRow,
        sequences: Sequence[Sequence[Example]],
        starts: Sequence[int],
        places: Sequence[int] | None = None,
    ) -> MicroBatch:
        """Returns the micro-batch of a packed row. `sequences` are the sequences of each response of the row. `starts`
        is the index of the first target of each response among all targets of the update. If this rank does not have
        all targets, `places` is the index of the first target of each response in the vectors of this rank."""
        context = self.world.context
        further = [[packed.further] * (len(group) - 1) for packed, group in zip(row, sequences, strict=True)]
        batch = micro_batch(
            list(chain.from_iterable(sequences)),
            packed=self.tokens is not None,
            pad_id=self.pad_id,
            starts=_of_sequences(starts, sequences),
            shares=[share for packed, rest in zip(row, further, strict=True) for share in (packed.shared, *rest)],
            places=None if places is None else _of_sequences(places, sequences),
        )
        return batch if context is None else replace(batch, context=Division(batch, context))


def _of_sequences(starts: Sequence[int], sequences: Sequence[Sequence[Example]]) -> list[int]:
    """Returns the index of the first target of each sequence, given that of the first target of each response."""
    return [start + offset for start, group in zip(starts, sequences, strict=True) for offset in target_starts(group)]


class TargetBatches(Protocol):
    """The micro-batches of this rank, and the number of target tokens of all ranks or of this rank."""

    @property
    def batches(self) -> Sequence[MicroBatch]: ...

    @property
    def targets(self) -> int: ...

    @property
    def local_only(self) -> bool:
        """Whether `targets` counts only the targets of this rank."""
        ...


@dataclass
class Models:
    """The models of a run. `module` is the policy or the trained reward model. `learner` trains `module`, or is None if
    nothing is trained."""

    module: nn.Module
    packing: Packing
    device: torch.device
    learner: Learner | None = None
    critic: Learner | None = None
    reference: Policy | None = None
    """A separate frozen reference model. The attribute is None if there is no reference model, or if the reference is
    the policy without its adapter, or with the adapter of the start."""
    teacher: Teacher | None = None
    cache: LogprobCache | None = None
    """The cached outputs of a reference model or teacher for all rows. If `cache` is set, the reference model or
    teacher itself is not used."""
    longest: int = 0
    """The maximum length of a sequence of this run in tokens."""
    reference_outputs: list[torch.Tensor] | None = None
    """If `reference_outputs` is a list, the reference log-probs are appended to it, so that the tape can record
    them."""

    @property
    def trained(self) -> Learner:
        assert self.learner is not None
        return self.learner

    @property
    def learners(self) -> list[Learner]:
        return [learner for learner in (self.learner, self.critic) if learner is not None]

    @property
    def world(self) -> World:
        return self.packing.world

    def arrange(self, items: Sequence[T]) -> Update[T]:
        return self.packing(items)

    def pack(self, responses: Sequence[Outline]) -> list[list[PackedRow]]:
        """Returns the packed rows of each data-parallel rank. Responses share a prompt only if every model allows
        it."""
        modules = [self.module, self.reference, *(learner.module for learner in self.learners)]
        limits = [getattr(module, "alike_up_to", None) for module in modules]
        return self.packing.pack(responses, min((limit for limit in limits if limit is not None), default=None))

    def logprobs(self, inputs: TargetBatches) -> torch.Tensor:
        """Returns the log-probs of the current policy."""
        return self.score_targets(self.module, inputs, lambda scores: scores.logprobs_K)

    def logprobs_and_squares(self, inputs: TargetBatches) -> torch.Tensor:
        """Returns a tensor with two rows: the log-probs of the policy, and the sums of squared probabilities over the
        vocabulary."""
        return score_targets(
            self.module,
            inputs,
            self.world,
            self.device,
            lambda scores: torch.stack([scores.logprobs_K, scores.squares_K]),
            rows=(2,),
        )

    def reference_logprobs(self, inputs: TargetBatches) -> torch.Tensor:
        if self.cache is not None:
            assert isinstance(inputs, Update)
            found = self.cache.take("logprobs", self.cache.rows(inputs))
        elif self.reference is not None:
            found = self.score_targets(self.reference, inputs, lambda scores: scores.logprobs_K)
        else:
            assert isinstance(self.module, Policy)
            with self.module.as_reference():
                found = self.logprobs(inputs)
        if self.reference_outputs is not None:
            self.reference_outputs.append(found)
        return found

    def values(self, inputs: TargetBatches) -> torch.Tensor:
        assert self.critic is not None
        return self.score_targets(self.critic.module, inputs, lambda values: values)

    def scores(self, inputs: TargetBatches) -> torch.Tensor:
        """Returns the scores of a reward model."""
        return self.score_targets(self.module, inputs, lambda scores: scores)

    def with_teacher(self, update: Update[Any]) -> list[MicroBatch]:
        """Returns the micro-batches of the update with the teacher, which returns the distributions for
        distillation."""
        if self.cache is None:
            assert self.teacher is not None
            return [replace(batch, teacher=self.teacher) for batch in update.batches]
        return [replace(batch, teacher=_Cached(self.cache, self.cache.rows(update))) for batch in update.batches]

    def score_targets(
        self, module: nn.Module, inputs: TargetBatches, pick: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        return score_targets(module, inputs, self.world, self.device, pick)


@torch.no_grad()
def score_targets(
    module: nn.Module,
    inputs: TargetBatches,
    world: World,
    device: torch.device,
    pick: Callable[[Any], torch.Tensor],
    *,
    rows: tuple[int, ...] = (),
) -> torch.Tensor:
    """Returns one value per target token, or several values if `rows` is not empty. `pick` selects the values from the
    output of the module."""
    vector = torch.zeros(*rows, inputs.targets)
    with resident(module), evaluating(module):
        outputs = [fetched(pick(run_on(module, batch, device))) for batch in inputs.batches]
    for batch, numbers in zip(inputs.batches, outputs, strict=True):
        vector[..., batch.vector_index_K] = numbers()
    return vector if inputs.local_only else world.sum_tensor(vector)


@dataclass(frozen=True)
class _Cached:
    """A teacher that reads its distributions from the cache on disk."""

    cache: LogprobCache
    rows_K: np.ndarray

    def __call__(self, batch: MicroBatch) -> Likeliest:
        rows, device = self.rows_K[batch.index_K.numpy()], batch.targets_K.device
        return Likeliest(self.cache.take("ids", rows).long().to(device), self.cache.take("logprobs", rows).to(device))


def make_scoring(recipe: Recipe) -> Scoring:
    """Returns the settings for computing log-probs. In online methods, temperature and truncation are those with which
    the responses were sampled."""
    if recipe.distill.teacher is not None:
        settings = recipe.distill
        return Scoring(comparison=TeacherDivergence(settings.divergence, settings.mix, settings.temperature))
    if recipe.method not in ONLINE:
        return Scoring(alike=METHODS[recipe.method].uniform_gradient)
    rollout = recipe.rollout
    truncation = (
        Truncation(rollout.top_k, rollout.top_p, rollout.min_p) if rollout.truncated_sampling == "mask" else None
    )
    squares = estimator_row(recipe.algorithm.advantage).energy
    return Scoring(rollout.temperature, truncation, entropy=True, squares=squares)


def build_learner(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Learner:
    """Loads the trained model (a policy or a reward model) and creates its optimizer."""
    settings, seed = recipe.model, recipe.run.seed
    offload = recipe.parallel.offload
    sharding = sharding_of(recipe.parallel, device, world, on_host=offload in ("params", "all"))
    if recipe.method not in ONLINE and METHODS[recipe.method].model == "value":
        where = (settings, settings.path, torch_device, device.attention, seed)
        model = load_value_model(*where, key="model.path", sharding=sharding)
        refuse_undivided(model, world.context, settings.path)
        _tell_unused(model, settings.path, world)
        return _learner(model, recipe, recipe.optim, device, world, torch_device, "train", offload)
    policy = load_policy(settings, torch_device, device.attention, seed, make_scoring(recipe), sharding)
    check_images(policy, settings.path, torch_device)
    refuse_undivided(policy, world.context, settings.path)
    _tell_unused(policy, settings.path, world)
    if policy.kernel == BY_ROW and world.main and (why := policy.decoder.batch_variant()):
        write(
            f"warning: run.deterministic: {why}, which the batch-invariant kernels do not support. Repeated runs are "
            "bit-identical, but the log-probs of engine and trainer can differ by rounding",
            error=True,
        )
    name = "actor" if recipe.method in ONLINE else "train"
    learner = _learner(policy, recipe, recipe.optim, device, world, torch_device, name, offload)
    learner.routing = install_routing(policy, recipe, settings.path)
    return learner


def _tell_unused(module: Policy | ValueModel, path: str, world: World) -> None:
    if module.unused and world.main:
        write(f"warning: {told_unused(module.unused, path)}", error=True)


def build_critic(recipe: Recipe, device: Device, world: World, torch_device: torch.device) -> Learner | None:
    if not has_critic(recipe):
        return None
    path = recipe.critic.path or recipe.model.path
    refuse_other_vocabulary(recipe, "critic.path", path)
    offload = recipe.parallel.offload_critic
    sharding = sharding_of(recipe.parallel, device, world, on_host=offload in ("params", "all"))
    seed = recipe.run.seed
    how: dict[str, Any] = {"head_init": recipe.critic.head_init, "sharding": sharding}
    critic = load_value_model(recipe.model, path, torch_device, device.attention, seed, **how)
    refuse_undivided(critic, world.context, path)
    if path != recipe.model.path:
        _tell_unused(critic, path, world)
    settings = recipe.optim.model_copy(update={"lr": recipe.critic.lr, "groups": []})
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
    # The optimizer updates the shards of the parameters, so gathered parameters are resharded first.
    reshard(module)
    settings = with_tower_rate(settings, recipe.model, module)
    refuse_all(list(unmatched_groups(settings, [name for name, _ in module.trainable()])))
    masters = bool(recipe.model.master_weights)
    optimizer: Optimizer
    on_host, spared = offload in ("optimizer", "all"), biases_and_norms(module.stored)
    if settings.name != "adamw" or settings.stochastic_rounding:
        optimizer = RuleOptimizer(
            module.trainable(),
            settings,
            masters=masters,
            device=torch_device,
            state_on_host=on_host,
            spared=spared,
            roles=roles_of(module.stored),
            seed=f"{recipe.run.seed}/{name}",
        )
    else:
        how: dict[str, Any] = {"masters": masters, "fused": device.fused_optimizer, "kernel": device.adamw}
        if offload == "none":
            optimizer = Optimizer(module.trainable(), settings, **how, spared=spared)
        else:
            where: dict[str, Any] = {"device": torch_device, "state_on_host": on_host}
            optimizer = HostOptimizer(module.trainable(), settings, **how, **where, spared=spared)
    if masters:
        module.digits.into(optimizer.local_masters())
    scale = LossScale() if recipe.model.dtype == "fp16" else None
    return Learner(module, optimizer, torch_device, world, scale, name, _balance(module, recipe, world))


def with_tower_rate(settings: Optim, model: Model, module: Policy | ValueModel) -> Optim:
    """Returns the optimizer settings with a group for the towers, if they have their own learning rate."""
    decoder = module.decoder if isinstance(module, Policy) else module.runner
    names = getattr(decoder.model, "tower_names", ())
    if model.vision_lr is None or not names:
        return settings
    match = rf"(^|\.)({'|'.join(map(re.escape, names))})\."
    named = None if any(group.name == "vision" for group in settings.groups) else "vision"
    group = ParameterGroup(match=match, lr=model.vision_lr, name=named)
    return settings.model_copy(update={"groups": [*settings.groups, group]})


def _balance(module: Policy | ValueModel, recipe: Recipe, world: World) -> Balance | None:
    """Returns the load-balancing loss of a mixture-of-experts model. Returns None if the recipe does not use this loss
    or the model has no experts."""
    decoder = module.decoder if isinstance(module, Policy) else module.runner
    chosen = experts_of_token(decoder.model.config)
    if not recipe.model.aux_loss_coef or chosen is None:
        return None
    return Balance(module, decoder, recipe.model.aux_loss_coef, chosen, world)


def build_reference(
    recipe: Recipe, device: Device, world: World, torch_device: torch.device, like: Routing | None = None
) -> Policy | None:
    """Loads the separate frozen reference model. Returns None if the run does not keep a reference model in memory."""
    if reference_kind(recipe) != "model":
        return None
    reference = load_reference(recipe, device, world, torch_device)
    if recipe.algorithm.routing_replay == "rollout":
        install_routing(reference, recipe, reference_folder(recipe), like)
    return reference


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
    seed, scoring = recipe.run.seed, replace(make_scoring(recipe), squares=False)
    policy = load_policy(settings, torch_device, device.attention, seed, scoring, sharding, frozen=True)
    refuse_undivided(policy, world.context, path)
    if path != recipe.model.path:
        check_images(policy, path, torch_device)
        _tell_unused(policy, path, world)
    if on_host and sharding is None:
        keep_on_host(policy, torch_device)
    return policy
