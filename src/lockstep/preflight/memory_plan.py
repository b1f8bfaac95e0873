"""Planned memory of a device by phase, computed before weights load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.load_folder import DTYPES
from lockstep.parallel.offload import TOGETHER
from lockstep.parallel.sharding import grid_of
from lockstep.preflight.model_sizes import (
    Counted,
    LayerKernels,
    activation_bytes,
    count_parameters,
    head_bytes,
    kept_by_layer,
    kernels_of,
    kv_bytes,
    loaded_beside,
)
from lockstep.recipe import Recipe
from lockstep.recipe.keys_parallel import Offload, Parallel
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.rollout.native.native_engine import FREE_SHARE, prefill_bytes
from lockstep.rollout.native.scheduler import Scheduler

# Bytes per parameter of an offloaded update: master, two moments and gradient in fp32.
UPDATED_BYTES = 16
STEP = "optimizer step"
# With activation offload two layers stay on the device: the one being computed and the one being copied.
LAYERS_HERE = 2


@dataclass(frozen=True)
class TrainedBytes:
    """Bytes of a trained model on one device. `layer`: weights gathered at a time; `largest`: elements of the largest
    tensor, which an update keeps in one piece.
    """

    state: int
    weights: int
    gradients: int
    layer: int
    largest: int

    @property
    def updated(self) -> int:
        """Bytes of an offloaded optimizer state that are on the device at once."""
        return min(self.state, UPDATED_BYTES * max(TOGETHER, self.largest))


@dataclass(frozen=True)
class Freed:
    """Bytes that an offload key frees on each device, whether it is set or not."""

    setting: str
    bytes: int
    chosen: bool

    def line(self) -> str:
        return f"{self.setting} {'frees' if self.chosen else 'would free'} {self.bytes / 2**20:,.1f} MiB of each device"


def freed_by(
    settings: Parallel, ranks: int, policy: TrainedBytes, critic: TrainedBytes | None, frozen: dict[str, int]
) -> list[Freed]:
    """`frozen`: weights of reference, teacher and reward models by the key that offloads them."""
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
    """Host bytes of `model.activation_offload`, for layers that each keep `each` bytes for the backward pass."""
    return max(0, layers - LAYERS_HERE) * each


def without(phase: Phase, offload: Offload, part: TrainedBytes, *, gathered: bool = False) -> Phase:
    """Returns the phase without the offloaded parts of a model. `gathered`: the phase needs the full weights."""
    if phase.name == "load":
        # Shards are loaded to where they stay. The optimizer state is created later.
        return replace(phase, weights=phase.weights - (part.weights if offload in ("params", "all") else 0))
    if offload in ("optimizer", "all"):
        stays = part.updated if phase.name == STEP else 0
        phase = replace(phase, optimizer=phase.optimizer - part.state + stays)
    if offload in ("params", "all"):
        gone = 0 if gathered else max(0, part.weights - part.layer)
        gradients = phase.gradients if phase.name == STEP else max(0, phase.gradients - part.gradients)
        phase = replace(phase, weights=phase.weights - gone, gradients=gradients)
    return phase


def without_frozen(phases: tuple[Phase, ...], settings: Parallel, frozen: dict[str, int]) -> tuple[Phase, ...]:
    """Subtracts offloaded frozen models. A reference returns only for its forward pass, without stored activations. A
    teacher is needed in forward and backward, a reward model during generation."""
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
            gone += reward  # also during the load of the policy: the rewards are tried before it and offloaded again
        found.append(replace(phase, weights=phase.weights - gone))
    own_pass = replace(validation, name="reference", weights=validation.weights - reward)
    return (*found, own_pass) if reference else tuple(found)


# Memory of a run by phase, computed before weights load.


@dataclass(frozen=True)
class Phase:
    """Bytes on one device during one phase."""

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
    """Parts that an offload key frees or would free."""
    remarks: tuple[str, ...] = ()
    handed_bytes: int = 0
    """Host bytes per rank of a weight sync through host memory."""
    cache: int = 0
    """Bytes of the KV cache."""
    wanted_cache: int = 0
    """KV cache bytes with which no sequence would wait."""

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
) -> MemoryPlan:
    """Estimates memory from shapes. An update has `rows` rows of at most `longest` tokens.

    `prefill_tokens`: tokens of one prefill pass. `keeps_cache`: KV cache bytes that may stay on the device during
    training. `counted`: parameter counts, if already computed. `cache_room`: maximum of the KV cache (`on_device`).
    """
    grid = grid_of(recipe.parallel, devices)
    shards, tensor = grid.shard * grid.tensor, grid.tensor
    counted = counted or count_parameters(recipe, config)
    parameters, trained = counted.parameters, counted.trained
    size, masters = DTYPES[recipe.model.dtype].itemsize, bool(recipe.model.master_weights)
    single = _one_micro_batch(recipe, rows, longest)
    # The device's AdamW reads the gradients of a single micro-batch in the dtype of the model.
    fp32_gradients = masters and not (device.adamw != Device.adamw and devices == 1 and single)
    model = _trained_bytes(recipe, config, counted, shards, 4 if fp32_gradients else size)
    tokens = _micro_batch_tokens(recipe, rows, longest)
    activations = _Activations.of(recipe, config, tokens, kernels_of(recipe, counted, device, devices), tensor)
    gathered_bytes = loaded_beside(counted, config, grid) * size if devices > 1 else 0
    phases = (
        Phase("load", model.weights + gathered_bytes),
        _forward_backward(recipe, model, activations, 0 if single else trained * size // shards),
        Phase(STEP, model.weights, model.gradients, model.state),
        Phase("validation", model.weights, 0, model.state, activations.validation),
    )
    checkpoint_bytes = trained * (size + (12 if masters else 2 * size))
    plan = MemoryPlan(parameters, trained, phases, checkpoint_bytes, remarks=_read_by_all(recipe, counted, devices))
    frozen = {key: count * size // shards for key, count in counted.frozen.items()} | {"offload_reward": counted.reward}
    plan = _with_weights(plan, sum(frozen.values()))
    policy, critic = replace(model, gradients=phases[1].gradients), None
    if recipe.method in ONLINE:
        gathered = parameters - counted.divided + counted.divided // tensor
        before = plan.phases[-1]
        engine = EnginePlan(devices // tensor, longest, prefill_tokens, keeps_cache, cache_room)
        plan = _with_online_parts(plan, recipe, config, shards, gathered, engine)
        critic = _critic_bytes(model, before, plan.phases[len(phases) - 1])
    plan = _with_offload(plan, recipe.parallel, devices, policy, critic, frozen)
    waiting = Freed("model.activation_offload=true", activations.on_host, recipe.model.activation_offload)
    return replace(plan, freed=(*plan.freed, *([waiting] if activations.on_host else [])))


def _critic_bytes(policy: TrainedBytes, without: Phase, with_critic: Phase) -> TrainedBytes | None:
    """The bytes of the critic: the difference between a phase with and without it."""
    state, weights = with_critic.optimizer - without.optimizer, with_critic.weights - without.weights
    return replace(policy, state=state, weights=weights, gradients=0) if weights > 0 else None


def _trained_bytes(recipe: Recipe, config: Any, counted: Counted, shards: int, gradient_size: int) -> TrainedBytes:
    size, masters = DTYPES[recipe.model.dtype].itemsize, bool(recipe.model.master_weights)
    trained = counted.trained
    return TrainedBytes(
        # Two moments and the master weights.
        state=trained * 2 * (4 if masters else size) // shards + (trained * 4 // shards if masters else 0),
        # Weights are sharded. The spare share covers the gathered layer.
        weights=counted.parameters * size // shards,
        gradients=trained * gradient_size // shards,
        layer=counted.parameters * size // max(1, config.num_hidden_layers),
        largest=counted.largest // shards,
    )


@dataclass(frozen=True)
class _Activations:
    """Activation bytes: of all layers, of the last layer in its backward pass, and of the head."""

    layers: int
    last: int
    head: int
    on_host: int
    """Bytes that `model.activation_offload` moves to the host."""
    validation: int

    @classmethod
    def of(cls, recipe: Recipe, config: Any, tokens: int, kernels: LayerKernels, tensor: int) -> _Activations:
        size, checkpointing = DTYPES[recipe.model.dtype].itemsize, recipe.model.gradient_checkpointing
        layers = activation_bytes(config, tokens, size, checkpointing, kernels, tensor=tensor)
        last = kept_by_layer(config, tokens, size, False, kernels, tensor=tensor)
        each = kept_by_layer(config, tokens, size, checkpointing, kernels, tensor=tensor)
        head = head_bytes(config, tokens, recipe.model.lora is None)
        on_host = waiting_activations(config.num_hidden_layers, each)
        return cls(layers, last, head, on_host, layers // max(1, config.num_hidden_layers) + head)


def _forward_backward(recipe: Recipe, model: TrainedBytes, activations: _Activations, arriving: int) -> Phase:
    """The larger end of a backward pass: all activations at its start, or all gradients at its end.

    `arriving`: gradients of one micro-batch, which are added to the fp32 gradients of the previous ones.
    """
    on_host = recipe.parallel.offload in ("params", "all")
    arriving = arriving if recipe.model.master_weights and not on_host else 0
    here = activations.layers - activations.on_host * int(recipe.model.activation_offload)
    ends = (
        Phase("forward and backward", model.weights, model.gradients, model.state, here + activations.head),
        Phase("forward and backward", model.weights, model.gradients + arriving, model.state, activations.last),
    )
    return max(ends, key=lambda phase: phase.total)


def _micro_batch_tokens(recipe: Recipe, rows: int, longest: int) -> int:
    """Tokens per device of the largest micro-batch."""
    most = min(recipe.batch.micro_batch_size or rows, rows) * longest
    return -(-min(recipe.line_tokens or most, most) // recipe.parallel.context_parallel)


def _one_micro_batch(recipe: Recipe, rows: int, longest: int) -> bool:
    """Whether an update is one micro-batch for any row lengths."""
    fits_rows = recipe.batch.micro_batch_size is None or recipe.batch.micro_batch_size >= rows
    return fits_rows and (recipe.line_tokens is None or recipe.line_tokens >= rows * longest)


def _with_offload(
    plan: MemoryPlan,
    settings: Parallel,
    devices: int,
    policy: TrainedBytes,
    critic: TrainedBytes | None,
    frozen: dict[str, int],
) -> MemoryPlan:
    """Removes offloaded parts from the phases that do not need them on the device."""
    phases = tuple(without(one, settings.offload, policy, gathered=one.name == "generation") for one in plan.phases)
    if critic is not None:
        phases = tuple(without(one, settings.offload_critic, critic) for one in phases)
    phases = without_frozen(phases, settings, frozen)
    return replace(plan, phases=phases, freed=tuple(freed_by(settings, devices, policy, critic, frozen)))


def _with_weights(plan: MemoryPlan, weights: int) -> MemoryPlan:
    return replace(plan, phases=tuple(replace(phase, weights=phase.weights + weights) for phase in plan.phases))


@dataclass(frozen=True)
class EnginePlan:
    """Settings of the engine's memory: devices that share the prompts, longest sequence, tokens per prefill pass, and
    the cache bytes that may stay allocated outside generation."""

    devices: int
    longest: int
    prefill_tokens: int
    keeps_cache: int
    cache_room: int | None = None
    """Maximum bytes of the cache; None if it is not limited."""

    def prompts(self, recipe: Recipe) -> int:
        """Prompts per device."""
        return -(-recipe.batch.prompts // self.devices)

    def cache(self, recipe: Recipe, wanted: int, longest: int) -> int:
        """Bytes of the cache: enough for all sequences, limited by the room, but at least one longest sequence."""
        if recipe.rollout.cache_gb:
            return min(wanted, int(recipe.rollout.cache_gb * 1e9))
        return wanted if self.cache_room is None else min(wanted, max(self.cache_room, longest))

    def kept(self, recipe: Recipe, cache: int) -> int:
        """Cache bytes that stay allocated between two generations."""
        free = recipe.rollout.free_cache
        return 0 if (cache > self.keeps_cache if free is None else free) else cache


def _with_online_parts(
    plan: MemoryPlan, recipe: Recipe, config: Any, shards: int, gathered: int, engine: EnginePlan
) -> MemoryPlan:
    """Adds the parts of an online run: a critic with its optimizer, the KV cache and a prefill pass.

    `gathered`: parameters that a device has during generation.
    """
    size = DTYPES[recipe.model.dtype].itemsize
    masters = bool(recipe.model.master_weights)
    lora = recipe.model.lora
    has_critic = estimator_row(recipe.algorithm.advantage).critic
    # With an adapter the critic trains an adapter and its head.
    trained = (plan.trained + config.hidden_size * int(lora is not None)) * int(has_critic)
    weights = plan.parameters * int(has_critic) * size // shards
    state = trained * (2 * (4 if masters else size) + (4 if masters else 0)) // shards
    asked = engine.prompts(recipe)
    sequences = min(recipe.rollout.max_sequences, asked * recipe.rollout.n)
    token = kv_bytes(config, size)
    cached = sequences * engine.longest * token // recipe.parallel.tensor_parallel
    block = recipe.rollout.block_tokens
    least = Scheduler.least_blocks(engine.longest, block) * block * token // recipe.parallel.tensor_parallel
    cache = engine.cache(recipe, cached, least)
    phases = tuple(
        replace(phase, weights=phase.weights + weights, optimizer=phase.optimizer + state) for phase in plan.phases
    )
    standing = phases[-1]
    kept = engine.kept(recipe, cache)
    phases = tuple(
        phase if phase.name == "load" else replace(phase, activations=phase.activations + kept) for phase in phases
    )
    # Generation gathers the policy's weights; all other weights stay sharded.
    beside = standing.weights - plan.parameters * size // shards
    prompts = asked * max(0, engine.longest - recipe.rollout.max_tokens)
    passes = prefill_bytes(config.get_text_config(), min(engine.prefill_tokens, prompts), size)
    generation = Phase("generation", gathered * size + beside, 0, standing.optimizer, cache + passes)
    own = trained * (size + 2 * (4 if masters else size) + (4 if masters else 0))
    stored = plan.checkpoint_bytes + own
    return replace(plan, phases=(*phases, generation), checkpoint_bytes=stored, cache=cache, wanted_cache=cached)


def on_device(recipe: Recipe, memory: int, plan_of: Callable[[int | None], MemoryPlan]) -> MemoryPlan:
    """The plan on a device with this memory. The KV cache of the built-in engine takes a share of the free memory;
    sequences that do not fit wait. `plan_of` gets the maximum of the cache."""
    plan = plan_of(None)
    standing = next((phase for phase in plan.phases if phase.name == "generation"), None)
    if standing is None or recipe.rollout.cache_gb is not None or not ENGINES[recipe.rollout.engine].paged:
        return plan
    room = int(FREE_SHARE * max(0, memory - standing.total + standing.activations))
    return plan if plan.cache <= room else plan_of(room)


def refuse_misfit(memory: MemoryPlan, available: int, device: str) -> None:
    """Refuses a plan that exceeds the memory before the model is loaded."""
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


def _read_by_all(recipe: Recipe, counted: Counted, devices: int) -> tuple[str, ...]:
    if counted.whole is None or devices == 1:
        return ()
    size = counted.parameters * DTYPES[recipe.model.dtype].itemsize
    return (
        f"every process reads all of {recipe.model.path} into the host's memory ({size / 2**30:.1f} GiB each) before "
        f"it keeps its slices: {counted.whole}",
    )
