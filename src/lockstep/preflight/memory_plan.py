"""Predicts the memory of a device in each phase of a run, before weights load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.load_folder import DTYPES
from lockstep.model.router import route_bytes
from lockstep.model.text_model import text_config, text_sizes
from lockstep.parallel.offload import TOGETHER
from lockstep.parallel.sharding import grid_of
from lockstep.preflight.model_sizes import (
    NOT_CODED,
    Coded,
    Counted,
    LayerKernels,
    activation_bytes,
    backward_bytes,
    count_parameters,
    gathered_beside,
    head_bytes,
    kept_by_layer,
    kernels_of,
    layer_bytes,
    loaded_beside,
    micro_batch_tokens,
    one_micro_batch,
    reduced_beside,
    selection_bytes,
    tile_sums,
)
from lockstep.preflight.state_sizes import kv_bytes, state_bytes
from lockstep.preflight.tower_sizes import ANY_IMAGES, ImageLoad, TowerBytes
from lockstep.recipe import Recipe
from lockstep.recipe.keys_lora import Lora
from lockstep.recipe.keys_parallel import Offload, Parallel
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.rollout.native.native_engine import FREE_SHARE, prefill_bytes
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.rollout.native.state_plan import LEAST, plan_states
from lockstep.rollout.servers.adapter import BUCKET_BYTES
from lockstep.rollout.servers.weight_transports import by_collective

# Device bytes per parameter while an offloaded optimizer updates it: master weight, two moments and gradient in fp32.
UPDATED_BYTES = 16
STEP = "optimizer step"
# With activation offload, the activations of two layers stay on the device: of the layer that is computed and of the
# layer that is copied.
LAYERS_HERE = 2


@dataclass(frozen=True)
class TrainedBytes:
    """The bytes of a trained model on one device. `layer` is the bytes of weights that are gathered at a time.
    `largest` is the number of elements of the largest tensor, which the optimizer updates at once.
    """

    state: int
    weights: int
    gradients: int
    layer: int
    largest: int

    @property
    def updated(self) -> int:
        """The bytes of an offloaded optimizer state that are on the device at the same time during an update."""
        return min(self.state, UPDATED_BYTES * max(TOGETHER, self.largest))


@dataclass(frozen=True)
class Freed:
    """The bytes that an offload key frees on each device, or would free if it were set."""

    setting: str
    bytes: int
    chosen: bool

    def line(self) -> str:
        return f"{self.setting} {'frees' if self.chosen else 'would free'} {self.bytes / 2**20:,.1f} MiB of each device"


def freed_by(
    settings: Parallel, ranks: int, policy: TrainedBytes, critic: TrainedBytes | None, frozen: dict[str, int]
) -> list[Freed]:
    """Returns the bytes that each offload key frees. `frozen` maps an offload key to the bytes of the frozen model
    (reference, teacher or reward model) that it offloads."""
    found = []
    for key, chosen, part in (
        ("offload", settings.offload, policy),
        ("offload_critic", settings.offload_critic, critic),
    ):
        if part is None:
            continue
        sizes: dict[Offload, int] = {"optimizer": part.state}
        if ranks > 1:
            params = max(0, part.weights + part.gradients - part.layer)
            sizes |= {"params": params, "all": part.state + params}
        found += [Freed(f"parallel.{key}={kind}", size, chosen == kind) for kind, size in sizes.items()]
    found += [Freed(f"parallel.{key}=true", size, bool(getattr(settings, key))) for key, size in frozen.items() if size]
    return found


def waiting_activations(layers: int, each: int) -> int:
    """Returns the host bytes of `model.activation_offload`, if each layer keeps `each` bytes for the backward pass."""
    return max(0, layers - LAYERS_HERE) * each


def without(phase: Phase, offload: Offload, part: TrainedBytes, *, gathered: bool = False) -> Phase:
    """Returns the phase without the bytes that a model offloads to the host. `gathered` is true if the phase needs the
    full weights on the device."""
    if phase.name == "load":
        # Offloaded shards are loaded directly into host memory. While weights load, the optimizer state does not exist
        # yet.
        return replace(phase, weights=phase.weights - (part.weights if offload in ("params", "all") else 0))
    if offload in ("optimizer", "all"):
        stays = part.updated if phase.name == STEP else 0
        phase = replace(phase, optimizer=phase.optimizer - part.state + stays)
    if offload in ("params", "all"):
        # The gathered weights of a pass are counted apart from the shards (`gathered_beside`).
        stay = part.layer if phase.name == STEP else 0
        gone = 0 if gathered else max(0, part.weights - stay)
        gradients = phase.gradients if phase.name == STEP else max(0, phase.gradients - part.gradients)
        phase = replace(phase, weights=phase.weights - gone, gradients=gradients)
    return phase


def without_frozen(phases: tuple[Phase, ...], settings: Parallel, frozen: dict[str, int]) -> tuple[Phase, ...]:
    """Subtracts the bytes of offloaded frozen models from the phases that do not need them. A reference model is on the
    device only in its own phase, a forward pass without stored activations. A teacher is needed in forward and
    backward, and a reward model during generation."""
    reference = frozen.get("offload_reference", 0) * int(settings.offload_reference)
    teacher = frozen.get("offload_teacher", 0) * int(settings.offload_teacher)
    reward = frozen.get("offload_reward", 0) * int(settings.offload_reward)
    validation = next(phase for phase in phases if phase.name == "validation")
    found = []
    for phase in phases:
        gone = 0 if phase.name == "load" else reference
        if phase.name in (STEP, "generation"):
            gone += teacher
        if phase.name != "generation":
            gone += reward  # also in the phase load: reward models are offloaded before the policy loads
        found.append(replace(phase, weights=phase.weights - gone))
    own_pass = replace(validation, name="reference", weights=validation.weights - reward)
    return (*found, own_pass) if reference else tuple(found)


# The memory of a run by phase.


@dataclass(frozen=True)
class Phase:
    """The bytes on one device during one phase of a run."""

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int
    trained: int
    phases: tuple[Phase, ...]
    checkpoint_bytes: int
    freed: tuple[Freed, ...] = ()
    """The bytes that each offload key frees, or would free if it were set."""
    remarks: tuple[str, ...] = ()
    handed_bytes: int = 0
    """The host bytes per rank that a weight sync through host memory needs."""
    cache: int = 0
    """Bytes of the KV cache."""
    wanted_cache: int = 0
    """The bytes of a KV cache in which all sequences fit, so that none has to wait."""
    weight_bytes: int = 0
    """The bytes of the policy's weights, before they are sharded."""
    coded: Coded = NOT_CODED
    """The policy's weights that are quantised."""

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def plan_memory(
    recipe: Recipe,
    config: Any,
    devices: int,
    longest: int,
    rows: int,
    prefill_tokens: int = 0,
    *,
    device: Device | type[Device] = Device,
    keeps_cache: int = 0,
    counted: Counted | None = None,
    cache_room: int | None = None,
    images: ImageLoad = ANY_IMAGES,
) -> MemoryPlan:
    """Estimates memory from the shapes of the models. An update has `rows` rows of at most `longest` tokens.

    `prefill_tokens` is the number of tokens of a prefill pass. A KV cache of at most `keeps_cache` bytes stays on the
    device during training. `counted`: parameter counts. `cache_room`: maximum KV cache bytes (see `on_device`).
    """
    grid = grid_of(recipe.parallel, devices)
    shards, tensor = grid.shard * grid.tensor, grid.tensor
    counted = counted or count_parameters(recipe, config)
    parameters, trained = counted.parameters, counted.trained
    size, masters = DTYPES[recipe.model.dtype].itemsize, bool(recipe.model.master_weights)
    single = one_micro_batch(recipe, rows, longest)
    # If an update is one micro-batch, the device's AdamW reads gradients in the model's dtype and needs no fp32 copy.
    own_adamw = device.adamw != Device.adamw and recipe.optim.name == "adamw"
    fp32_gradients = masters and not (own_adamw and devices == 1 and single)
    model = _trained_bytes(recipe, config, counted, shards, 4 if fp32_gradients else size)
    tokens = micro_batch_tokens(recipe, config, rows, longest)
    kernels = kernels_of(recipe, counted, device, devices)
    activations = _Activations.of(recipe, config, tokens, longest, kernels, tensor)
    activations = activations.with_dora(recipe, config, counted, tokens)
    tower = TowerBytes() if counted.tower is None else counted.tower.bytes(recipe.model, config, tokens, images)
    activations = activations.with_tower(tower)
    gathered_bytes = loaded_beside(counted, config, grid, size) if devices > 1 else 0
    beside = gathered_beside(counted, config, grid, size) if devices > 1 else (0, 0)
    reduced = reduced_beside(counted, config, grid, size) if devices > 1 else (0, 0)
    phases: tuple[Phase, ...] = (
        Phase("load", model.weights + gathered_bytes),
        _forward_backward(recipe, model, activations, 0 if single else trained * size // shards, beside, reduced),
        Phase(STEP, model.weights, model.gradients, model.state, counted.scratch_bytes(recipe, shards)),
        _larger(
            Phase("validation", model.weights + beside[0], 0, model.state),
            Phase("validation", model.weights + beside[1], 0, model.state, activations.validation),
        ),
    )
    checkpoint_bytes = trained * size + counted.state_bytes(recipe)
    phases = tuple(_with_workspace(phase, counted, size) for phase in phases)
    plan = MemoryPlan(parameters, trained, phases, checkpoint_bytes, remarks=_read_by_all(recipe, counted, devices))
    plan = replace(plan, weight_bytes=counted.weight_bytes(size), coded=counted.coded)
    frozen = {key: found // shards for key, found in counted.frozen_bytes(size).items()}
    frozen["offload_reward"] = counted.reward
    plan = _with_weights(plan, sum(frozen.values()))
    policy, critic = replace(model, gradients=phases[1].gradients), None
    if recipe.method in ONLINE:
        # The engine gathers all weights, except those of other tensor-parallel ranks.
        gathered = plan.weight_bytes * (parameters - counted.divided + counted.divided // tensor) // parameters
        before = plan.phases[-1]
        engine = EnginePlan(devices // tensor, longest, prefill_tokens, keeps_cache, cache_room, counted.view)
        engine = replace(engine, workspace=counted.coded.workspace(size) + tower.forward)
        plan = _with_online_parts(plan, recipe, config, shards, gathered, engine, counted)
        critic = _critic_bytes(model, before, plan.phases[len(phases) - 1])
    plan = _with_offload(plan, recipe.parallel, devices, policy, critic, frozen)
    waiting = Freed("model.activation_offload=true", activations.on_host, recipe.model.activation_offload)
    return replace(plan, freed=(*plan.freed, *([waiting] if activations.on_host else [])))


def _critic_bytes(policy: TrainedBytes, without: Phase, with_critic: Phase) -> TrainedBytes | None:
    """Returns the bytes of the critic: the difference between a phase with the critic and the same phase without it."""
    state, weights = with_critic.optimizer - without.optimizer, with_critic.weights - without.weights
    return replace(policy, state=state, weights=weights, gradients=0) if weights > 0 else None


def _trained_bytes(recipe: Recipe, config: Any, counted: Counted, shards: int, gradient_size: int) -> TrainedBytes:
    size, trained = DTYPES[recipe.model.dtype].itemsize, counted.trained
    return TrainedBytes(
        state=counted.state_bytes(recipe) // shards,
        # The weights are sharded over the ranks.
        weights=counted.weight_bytes(size) // shards,
        gradients=trained * gradient_size // shards,
        layer=counted.weight_bytes(size) // text_sizes(config).layers,
        largest=counted.largest // shards,
    )


@dataclass(frozen=True)
class _Activations:
    """The activation bytes of all layers, of the last layer in its backward pass, and of the output head."""

    layers: int
    last: int
    head: int
    on_host: int
    """The bytes that `model.activation_offload` moves to the host."""
    validation: int

    @classmethod
    def of(
        cls, recipe: Recipe, config: Any, tokens: int, longest: int, kernels: LayerKernels, tensor: int
    ) -> _Activations:
        size, checkpointing = DTYPES[recipe.model.dtype].itemsize, recipe.model.gradient_checkpointing
        trained = recipe.model.lora is None
        sums = tile_sums(config, size, kernels, tokens, trained, tensor=tensor)
        last = sums + backward_bytes(config, tokens, size, kernels, tensor=tensor)
        kept = activation_bytes(config, tokens, size, checkpointing, kernels, tensor=tensor)
        # What the layer whose backward pass runs needs beyond what it kept.
        layers = kept + last - layer_bytes(config, tokens, size, kernels, tensor=tensor)
        # Without checkpointing, every layer keeps its own mask beside the causal mask of all layers.
        masks = 1 + (1 if checkpointing else text_sizes(config).layers)
        layers += selection_bytes(config, tokens, longest, size, masks)
        each = kept_by_layer(config, tokens, size, checkpointing, kernels, tensor=tensor)
        whole = head = head_bytes(config, tokens, _trains_head(recipe.model.lora))
        if checkpointing:
            # The chunk of logits is freed before the last layer is computed again.
            head -= min(last, head_bytes(config, tokens, False))
        on_host = waiting_activations(text_sizes(config).layers, each)
        return cls(layers, last, head, on_host, layers // text_sizes(config).layers + whole)

    def with_dora(self, recipe: Recipe, config: Any, counted: Counted, tokens: int) -> _Activations:
        """Adds what DoRA needs: two outputs of each adapted layer are kept for the backward pass, and the norms need
        three copies of one weight at a time."""
        size, layers = DTYPES[recipe.model.dtype].itemsize, text_sizes(config).layers
        each = 2 * tokens * size * counted.dora_outputs // layers
        once = 3 * size * counted.dora_weight
        kept = self.layers + each * (1 if recipe.model.gradient_checkpointing else layers) + once
        return replace(self, layers=kept, last=self.last + each + once, validation=self.validation + once)

    def with_tower(self, tower: TowerBytes) -> _Activations:
        """Adds what a vision tower needs."""
        added = {"layers": self.layers + tower.training, "last": self.last + tower.training}
        return replace(self, **added, validation=self.validation + tower.forward)


def _trains_head(lora: Lora | None) -> bool:
    return lora is None or any(name.split(".")[-1] == "lm_head" for name in lora.modules_to_save)


def _larger(*phases: Phase) -> Phase:
    return max(phases, key=lambda phase: phase.total)


def _forward_backward(
    recipe: Recipe,
    model: TrainedBytes,
    activations: _Activations,
    arriving: int,
    beside: tuple[int, int],
    reduced: tuple[int, int],
) -> Phase:
    """Returns the peak of the forward and backward pass. The peak is at its start, when the weights outside the layers
    are gathered (`beside`, see `gathered_beside`), at the start of the backward pass, with all activations, in its last
    layer, with all gradients, or at its end, when those outside the layers are reduced (`reduced_beside`).

    `arriving` is the bytes of the gradients of one micro-batch, which are added to the fp32 gradients of the previous
    micro-batches.
    """
    on_host = recipe.parallel.offload in ("params", "all")
    arriving = arriving if recipe.model.master_weights and not on_host else 0
    here = activations.layers - activations.on_host * int(recipe.model.activation_offload)
    name, (entered, kept), (of_layer, of_outside) = "forward and backward", beside, reduced
    gradients = model.gradients + arriving
    return _larger(
        Phase(name, model.weights + entered, 0, model.state),
        Phase(name, model.weights + kept, model.gradients, model.state, here + activations.head),
        Phase(name, model.weights + kept, gradients, model.state, activations.last + of_layer),
        Phase(name, model.weights, gradients, model.state, of_outside),
    )


def _with_offload(
    plan: MemoryPlan,
    settings: Parallel,
    devices: int,
    policy: TrainedBytes,
    critic: TrainedBytes | None,
    frozen: dict[str, int],
) -> MemoryPlan:
    """Subtracts offloaded weights, gradients and optimizer states from the phases that do not need them on the
    device."""
    phases = tuple(without(one, settings.offload, policy, gathered=one.name == "generation") for one in plan.phases)
    if critic is not None:
        phases = tuple(without(one, settings.offload_critic, critic) for one in phases)
    phases = without_frozen(phases, settings, frozen)
    return replace(plan, phases=phases, freed=tuple(freed_by(settings, devices, policy, critic, frozen)))


def _with_weights(plan: MemoryPlan, weights: int) -> MemoryPlan:
    return replace(plan, phases=tuple(replace(phase, weights=phase.weights + weights) for phase in plan.phases))


@dataclass(frozen=True)
class EnginePlan:
    """The settings that determine the engine's memory. The prompts are divided among `devices` devices. `longest` is
    the length of the longest sequence. `prefill_tokens` is the number of tokens per prefill pass. A KV cache of at most
    `keeps_cache` bytes stays allocated during training."""

    devices: int
    longest: int
    prefill_tokens: int
    keeps_cache: int
    cache_room: int | None = None
    """The maximum bytes of the KV cache, or None if it is not limited."""
    view: int = 0
    """Bytes of the quantised weights of `rollout.precision`, which stay allocated together with the KV cache."""
    workspace: int = 0
    """The bytes of a dequantised weight."""

    def prompts(self, recipe: Recipe) -> int:
        """Prompts per device."""
        return -(-recipe.batch.prompts // self.devices)

    def cache(self, recipe: Recipe, wanted: int, longest: int) -> int:
        """Returns the bytes of the KV cache, which are at most `wanted` and limited by `rollout.cache_gb` or by
        `cache_room`. `cache_room` never reduces the cache below `longest` bytes."""
        if recipe.rollout.cache_gb:
            return min(wanted, int(recipe.rollout.cache_gb * 1e9))
        return wanted if self.cache_room is None else min(wanted, max(self.cache_room, longest))

    def kept(self, recipe: Recipe, cache: int) -> int:
        """Returns the KV cache bytes that stay allocated during training, between two generation phases."""
        free = recipe.rollout.free_cache
        return 0 if (cache > self.keeps_cache if free is None else free) else cache


def _with_online_parts(
    plan: MemoryPlan, recipe: Recipe, config: Any, shards: int, gathered: int, engine: EnginePlan, counted: Counted
) -> MemoryPlan:
    """Adds the memory that only online runs need: a critic with its optimizer, the KV cache and a prefill pass.

    `gathered` is the bytes of the policy's weights on a device during generation. A server has memory of its own; the
    run only sends weights to it.
    """
    served = ENGINES[recipe.rollout.engine].served
    size = DTYPES[recipe.model.dtype].itemsize
    has_critic = estimator_row(recipe.algorithm.advantage).critic
    # If the model has a LoRA adapter, the critic trains an adapter and its value head.
    head = {} if recipe.model.lora is None else {"head": (1, text_sizes(config).hidden)}
    weights = plan.weight_bytes * int(has_critic) // shards
    state = counted.state_bytes(recipe, head) * int(has_critic)
    own = state + (plan.trained + sum(map(math.prod, head.values()))) * size * int(has_critic)
    asked = engine.prompts(recipe)
    sequences = min(recipe.rollout.max_sequences, asked * recipe.rollout.n)
    token = kv_bytes(config, size, recipe.parallel.tensor_parallel)
    if recipe.rollout.kv_cache is not None:
        # One byte per element, and a scale in fp32 per head of keys and of values.
        elements = kv_bytes(config, 1, recipe.parallel.tensor_parallel)
        token = elements + 4 * elements // text_sizes(config).head_size
    token += route_bytes(config) if recipe.algorithm.routing_replay == "rollout" else 0
    slot = state_bytes(config, DTYPES[recipe.model.dtype])
    states = plan_states(slot, math.inf, sequences, recipe.rollout.n, "memory").bytes
    cached = 0 if served else sequences * engine.longest * token + states
    block = recipe.rollout.block_tokens
    least = Scheduler.least_blocks(engine.longest, block) * block * token + LEAST * slot
    cache = engine.cache(recipe, cached, least)
    phases = tuple(
        replace(phase, weights=phase.weights + weights, optimizer=phase.optimizer + state // shards)
        for phase in plan.phases
    )
    (standing,) = (phase for phase in phases if phase.name == STEP)
    kept = engine.kept(recipe, cache)
    kept += engine.view if kept else 0
    phases = tuple(
        phase if phase.name == "load" else replace(phase, activations=phase.activations + kept) for phase in phases
    )
    # Generation gathers the policy's weights; all other weights stay sharded.
    beside = standing.weights - plan.weight_bytes // shards
    prompts = asked * max(0, engine.longest - recipe.rollout.max_tokens)
    prefilled = min(engine.prefill_tokens, prompts)
    passes = prefill_bytes(text_config(config), prefilled, size)
    passes += selection_bytes(config, prefilled, engine.longest, size, masks=2) + engine.workspace
    if served:
        passes, gathered = 0, _sent_weights(plan, recipe, shards, gathered, counted)
    generation = Phase("generation", gathered + beside + engine.view, 0, standing.optimizer, cache + passes)
    stored = plan.checkpoint_bytes + own
    return replace(plan, phases=(*phases, generation), checkpoint_bytes=stored, cache=cache, wanted_cache=cached)


def _sent_weights(plan: MemoryPlan, recipe: Recipe, shards: int, gathered: int, counted: Counted) -> int:
    """Returns the bytes of the policy's weights on a device while they are sent to a server: the shards and what is
    gathered at a time, a tensor for files, and two buckets for a broadcast. Shared memory needs all weights."""
    if shards == 1 or recipe.rollout.weight_sync == "memory":
        return gathered
    at_once = counted.largest * DTYPES[recipe.model.dtype].itemsize
    if by_collective(recipe.rollout, adapter=recipe.model.lora is not None):
        at_once = 2 * max(at_once, BUCKET_BYTES)
    return min(gathered, plan.weight_bytes // shards + at_once)


def on_device(recipe: Recipe, memory: int, plan_of: Callable[[int | None], MemoryPlan]) -> MemoryPlan:
    """Returns the memory plan for a device with `memory` bytes. The KV cache of the built-in engine takes a fraction of
    the free memory, and sequences that do not fit have to wait. `plan_of` computes a plan for a maximum size of the
    cache."""
    plan = plan_of(None)
    standing = next((phase for phase in plan.phases if phase.name == "generation"), None)
    if standing is None or recipe.rollout.cache_gb is not None or not ENGINES[recipe.rollout.engine].paged:
        return plan
    room = int(FREE_SHARE * max(0, memory - standing.total + standing.activations))
    return plan if plan.cache <= room else plan_of(room)


def refuse_misfit(memory: MemoryPlan, available: int, device: str) -> None:
    """Refuses a run whose predicted peak memory exceeds the memory of the device."""
    peak = memory.peak
    if peak.total > available:
        raise Refusal.at(
            "memory",
            f"{peak.name} needs about {peak.total / 2**30:.1f} GiB on each device, "
            f"and {device} has {available / 2**30:.1f} GiB",
            "lower batch.tokens, set model.gradient_checkpointing or model.activation_offload, train a LoRA adapter "
            "(model.lora.rank), use model.dtype=bf16, keep the optimizer on the host (parallel.offload=optimizer), or "
            "shard over more devices (parallel.devices, torchrun)",
            code="not-enough-memory",
        )


def _with_workspace(phase: Phase, counted: Counted, size: int) -> Phase:
    """Adds the memory of a dequantised weight to the phases that compute with quantised weights."""
    if phase.name == STEP:
        return phase
    return replace(phase, activations=phase.activations + counted.coded.workspace(size))


def _read_by_all(recipe: Recipe, counted: Counted, devices: int) -> tuple[str, ...]:
    if counted.whole is None or devices == 1:
        return ()
    size = counted.parameters * DTYPES[recipe.model.dtype].itemsize
    return (
        f"every process reads all of {recipe.model.path} into host memory ({size / 2**30:.1f} GiB each) before it "
        f"keeps only its shards: {counted.whole}",
    )
