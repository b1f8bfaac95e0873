"""The models of a run: loaded, sharded, with optimizers; who computes log-probs and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
)
from lockstep.data.updates import Update, arrange
from lockstep.device.base import Device, fetched
from lockstep.kernels.divergence import Likeliest, TeacherDivergence
from lockstep.kernels.sampling import Truncation
from lockstep.methods import METHODS
from lockstep.model.heads import ValueModel, load_value_model
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy, Scoring, Teacher, evaluating
from lockstep.model.pretrained import told_unused
from lockstep.model.router import experts_of_token
from lockstep.model.weights import biases_and_norms
from lockstep.parallel.context_split import Division, refuse_undivided
from lockstep.parallel.offload import keep_on_host, resident
from lockstep.parallel.sharding import reshard, sharding_of
from lockstep.parallel.world import World
from lockstep.preflight.model_checks import has_critic, refuse_other_tokenizer, refuse_other_vocabulary
from lockstep.recipe import Recipe
from lockstep.recipe.keys_parallel import Offload
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Optim
from lockstep.run.output import write
from lockstep.train.logprob_cache import LogprobCache
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.optim_offload import HostOptimizer
from lockstep.train.step import Balance, Learner
from lockstep.types import Example, Item, MicroBatch

# The models of a run: who answers for log-probs and values, and what learns.
#
# Answers are on the host. They cover all targets of an update, the same on every rank, each of which fills in its
# share; or, of responses that are spread over the ranks, those that this one has.

T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Packing:
    """How rows become micro-batches in this run."""

    world: World
    tokens: int | None
    rows: int | None
    pad_id: int

    @classmethod
    def of(cls, recipe: Recipe, world: World, pad_id: int) -> Packing:
        return cls(world, recipe.line_tokens, recipe.batch.micro_batch_size, pad_id)

    def __call__(self, items: Sequence[T]) -> Update[T]:
        return arrange(items, self.world, tokens=self.tokens, rows=self.rows, pad_id=self.pad_id)

    def lay(self, responses: Sequence[Outline], alike_up_to: int | None) -> list[list[PackedRow]]:
        """For each share, which responses make up its micro-batches. Those to one prompt begin with it, which a packed
        line has once, a divided one not."""
        alone = len({one.prompt for one in responses}) == len(responses)
        if self.tokens is None or self.world.context is not None or alone:
            lengths = [one.length for one in responses]
            plan = plan_micro_batches(lengths, devices=self.world.dp_size, tokens=self.tokens, rows=self.rows)
            return [[[PackedSequence(number, 0) for number in members] for members in share] for share in plan]
        return pack_groups(responses, self.world.dp_size, tokens=self.tokens, alike_up_to=alike_up_to)

    def batch(
        self, line: PackedRow, examples: Sequence[Example], starts: Sequence[int], places: Sequence[int] | None = None
    ) -> MicroBatch:
        """A line with its `examples`, the targets of each of which begin at `starts` (and at `places` in the vectors of
        this rank, where that does not have them all)."""
        context = self.world.context
        shares = [laid.shared for laid in line]
        batch = micro_batch(
            examples, packed=self.tokens is not None, pad_id=self.pad_id, starts=starts, shares=shares, places=places
        )
        return batch if context is None else replace(batch, context=Division(batch, context))


class Asked(Protocol):
    """Micro-batches of this rank, and how many targets there are to answer: those of all ranks, or its own."""

    @property
    def batches(self) -> Sequence[MicroBatch]: ...

    @property
    def targets(self) -> int: ...

    @property
    def spread(self) -> bool:
        """Whether a rank wants the answers for its own targets alone, which it has counted."""
        ...


@dataclass
class Models:
    """`module` is the policy, or the reward model where that is trained; `learner` trains it, if anybody does."""

    module: nn.Module
    packing: Packing
    device: torch.device
    learner: Learner | None = None
    critic: Learner | None = None
    reference: Policy | None = None
    """A frozen model of its own; None when there is none, or when it is the policy without its adapter."""
    teacher: Teacher | None = None
    cache: LogprobCache | None = None
    """What a reference or a teacher said of all rows, instead of the model itself."""
    longest: int = 0
    """The longest sequence in tokens that the run allows."""
    heard: list[torch.Tensor] | None = None
    """Where a list: what the reference said since it was put here, for the tape."""

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

    def lay(self, responses: Sequence[Outline]) -> list[list[PackedRow]]:
        """For each share, the micro-batches of the responses to some prompts, for all models of the run."""
        modules = [self.module, self.reference, *(learner.module for learner in self.learners)]
        limits = [getattr(module, "alike_up_to", None) for module in modules]
        return self.packing.lay(responses, min((limit for limit in limits if limit is not None), default=None))

    def logprobs(self, asked: Asked) -> torch.Tensor:
        """The policy's log-probs, as it is now."""
        return self.over_targets(self.module, asked, lambda scores: scores.logprobs_K)

    def logprobs_and_squares(self, asked: Asked) -> torch.Tensor:
        """Two rows: the policy's log-probs, and the sums of the squared probabilities of all words."""
        return over_targets(
            self.module,
            asked,
            self.world,
            self.device,
            lambda scores: torch.stack([scores.logprobs_K, scores.squares_K]),
            rows=(2,),
        )

    def reference_logprobs(self, asked: Asked) -> torch.Tensor:
        if self.cache is not None:
            assert isinstance(asked, Update)
            found = self.cache.take("logprobs", self.cache.rows(asked))
        elif self.reference is not None:
            found = self.over_targets(self.reference, asked, lambda scores: scores.logprobs_K)
        else:
            assert isinstance(self.module, Policy)
            with self.module.without_adapter():
                found = self.logprobs(asked)
        if self.heard is not None:
            self.heard.append(found)
        return found

    def values(self, asked: Asked) -> torch.Tensor:
        assert self.critic is not None
        return self.over_targets(self.critic.module, asked, lambda values: values)

    def scores(self, asked: Asked) -> torch.Tensor:
        """A reward model's scores."""
        return self.over_targets(self.module, asked, lambda scores: scores)

    def with_teacher(self, update: Update[Any]) -> list[MicroBatch]:
        """The update's micro-batches, each with what the teacher says of its targets."""
        if self.cache is None:
            assert self.teacher is not None
            return [replace(batch, teacher=self.teacher) for batch in update.batches]
        return [replace(batch, teacher=_Cached(self.cache, self.cache.rows(update))) for batch in update.batches]

    def over_targets(self, module: nn.Module, asked: Asked, pick: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return over_targets(module, asked, self.world, self.device, pick)


@torch.no_grad()
def over_targets(
    module: nn.Module,
    asked: Asked,
    world: World,
    device: torch.device,
    pick: Callable[[Any], torch.Tensor],
    *,
    rows: tuple[int, ...] = (),
) -> torch.Tensor:
    """A number for each target, or several rows of them: what `pick` finds in the module's output."""
    vector = torch.zeros(*rows, asked.targets)
    with resident(module), evaluating(module):
        said = [fetched(pick(run_on(module, batch, device))) for batch in asked.batches]
    for batch, numbers in zip(asked.batches, said, strict=True):
        vector[..., batch.own_K] = numbers()
    return vector if asked.spread else world.sum_tensor(vector)


@dataclass(frozen=True)
class _Cached:
    """A teacher whose distributions are on disk."""

    cache: LogprobCache
    rows_K: np.ndarray

    def __call__(self, batch: MicroBatch) -> Likeliest:
        rows, device = self.rows_K[batch.index_K.numpy()], batch.targets_K.device
        return Likeliest(self.cache.take("ids", rows).long().to(device), self.cache.take("logprobs", rows).to(device))


# The models of a run, loaded, sharded and with their optimizers.


def scoring_of(recipe: Recipe) -> Scoring:
    """Responses are scored under the distribution they are sampled from."""
    if recipe.distill.teacher is not None:
        settings = recipe.distill
        return Scoring(comparison=TeacherDivergence(settings.divergence, settings.mix, settings.temperature))
    if recipe.method not in ONLINE:
        return Scoring(alike=METHODS[recipe.method].alike)
    rollout = recipe.rollout
    truncation = (
        Truncation(rollout.top_k, rollout.top_p, rollout.min_p) if rollout.truncated_sampling == "mask" else None
    )
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
    reshard(module)
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
