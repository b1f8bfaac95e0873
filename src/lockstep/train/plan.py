"""What a run will do and what it will take, told before a weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lockstep.data.batching import plan_micro_batches
from lockstep.data.dataset import Dataset, Loader, steps_and_rows
from lockstep.data.prompts import PromptSet
from lockstep.data.updates import row_size
from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.logprob import FUSED_CHUNK_BYTES
from lockstep.kernels.plain_modules import fused_feed_forwards
from lockstep.model.decoder import decoder_layers
from lockstep.model.load import DTYPES, load_config, with_lora
from lockstep.model.streamed import beyond_copying
from lockstep.model.tensor_plan import divided_parameters
from lockstep.parallel.mesh import Grid, grid_of
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE, reference_folder, reference_kind
from lockstep.recipe.parallel import Parallel
from lockstep.recipe.rows import estimator_row
from lockstep.rollout.native.prefill import prefill_bytes
from lockstep.train.plan_offload import Freed, TrainedBytes, freed_by, waiting_activations, without, without_frozen
from lockstep.train.plan_reward import reward_bytes

# Updates whose packing is tried out for the plan; the rest look alike.
SAMPLED_UPDATES = 100


@dataclass(frozen=True)
class BatchPlan:
    """Rows into updates into micro-batches."""

    rows: int
    rows_per_update: int
    steps: int
    total_rows: int
    devices: int
    fewest: int
    most: int
    fill: float
    group: int = 1
    """Devices that have one share of the rows between them."""

    @property
    def steps_per_epoch(self) -> float:
        return self.rows / self.rows_per_update

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch

    def lines(self) -> list[tuple[str, str]]:
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        return [
            ("rows", f"{self.rows:,} an epoch, {self.total_rows:,} in all"),
            ("updates", f"{self.steps:,} of {self.rows_per_update} rows ({self.steps_per_epoch:,.1f} an epoch)"),
            (
                "micro-batches",
                f"{each} an update on each of {_places(self.devices, self.group)}, {self.fill:.0%} full",
            ),
        ]


@dataclass(frozen=True)
class OnlinePlan:
    """Prompts into sequences into updates."""

    rows: int
    prompts: int
    samples: int
    prompts_per_update: int
    epochs: int
    steps: int
    devices: int
    tokens: int | None
    longest: int
    group: int = 1
    """Devices that have one share of the rows between them."""

    @property
    def updates(self) -> int:
        return self.prompts // self.prompts_per_update * self.epochs

    def lines(self) -> list[tuple[str, str]]:
        sequences = self.prompts * self.samples
        each = self.prompts_per_update * self.samples
        # A sequence is never cut in two: as many of the longest as fit into one.
        shares = self.devices // self.group
        most = -(-each // (self.tokens // self.longest * shares)) if self.tokens else None
        places = _places(self.devices, self.group)
        packed = "" if most is None else f", at most {most} micro-batches on each of {places}"
        return [
            ("steps", f"{self.steps:,} of {self.prompts} prompts ({self.rows / self.prompts:,.1f} an epoch)"),
            ("sequences", f"{self.prompts} prompts x {self.samples} = {sequences} a step, up to {self.longest} tokens"),
            ("updates", f"{self.updates} a step of {each} sequences{packed}"),
        ]


def _places(devices: int, group: int) -> str:
    return f"{devices} device(s)" if group == 1 else f"{devices // group} group(s) of {group} devices"


def plan_online(recipe: Recipe, prompts: PromptSet, devices: int) -> OnlinePlan:
    batch, rollout = recipe.batch, recipe.rollout
    rows = sum(len(source) for source in prompts.sources)
    steps, _ = _steps(recipe, rows, batch.prompts)
    per_update = batch.prompts_per_update or batch.prompts
    longest = prompts.counts.longest + rollout.max_tokens
    epochs = recipe.algorithm.epochs
    tokens, group = recipe.line_tokens, recipe.parallel.group
    return OnlinePlan(rows, batch.prompts, rollout.n, per_update, epochs, steps, devices, tokens, longest, group)


def plan_batches(recipe: Recipe, dataset: Dataset[Any], devices: int) -> BatchPlan:
    batch, context, group = recipe.batch, recipe.parallel.context, recipe.parallel.group
    rows = sum(len(source) for source in dataset.sources)
    steps, total = _steps(recipe, rows, batch.rows_per_update)
    loader = make_loader(recipe, dataset)
    counts, used, room = [], 0, 0
    for step in range(min(steps, SAMPLED_UPDATES)):
        lengths = [row_size(item, packed=batch.tokens is not None, shared=context == 1) for item in loader.take(step)]
        bins = plan_micro_batches(lengths, devices=devices // group, tokens=recipe.line_tokens, rows=batch.rows)
        counts.append(len(bins[0]))
        used += sum(lengths)
        room += sum(_room(members, lengths, recipe.line_tokens) for share in bins for members in share)
    most, fill = max(counts), used / room
    return BatchPlan(rows, batch.rows_per_update, steps, total, devices, min(counts), most, fill, group)


def make_loader(recipe: Recipe, read: Dataset[Any] | PromptSet) -> Loader[Any]:
    """Rows of the whole run. Prompts have no end: dynamic sampling takes as many as it needs."""
    batch = recipe.batch
    if isinstance(read, PromptSet):
        each, total = batch.prompts, None
    else:
        rows, each = sum(len(source) for source in read.sources), batch.rows_per_update
        _, total = _steps(recipe, rows, each)
    return Loader(
        read.sources,
        read.weights,
        rows_per_update=each,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        total_rows=total,
        drop_last=recipe.data.drop_last,
    )


def _steps(recipe: Recipe, rows: int, rows_per_update: int) -> tuple[int, int]:
    run, drop_last = recipe.run, recipe.data.drop_last
    return steps_and_rows(rows, rows_per_update, epochs=run.epochs, steps=run.steps, drop_last=drop_last)


def _room(members: Sequence[int], lengths: Sequence[int], tokens: int | None) -> int:
    if tokens is not None:
        return tokens
    return max((lengths[i] for i in members), default=1) * max(1, len(members))


@dataclass(frozen=True)
class Phase:
    """Bytes on one device while something happens."""

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Counted:
    """Numbers of parameters: of the policy, those that are trained, and of what is frozen beside it, by the key that
    keeps it on the host."""

    parameters: int
    trained: int
    divided: int
    """Those that the ranks of a tensor group divide."""
    largest: int
    """Those of the largest tensor that is trained."""
    layer: int
    """Those of the largest layer, whole."""
    outside: int
    """Those that no layer has: the embedding, the output head, the last norm."""
    made: bool
    """Whether transformers makes its tensors of others that are in the files, so that every process loads all."""
    fused: bool
    """Whether every feed-forward is one that devices with lean layers have fused, where no adapter is in it."""
    frozen: dict[str, int]
    reward: int = 0
    """Bytes of the reward models, which have a precision of their own and are whole on every device."""


def count_parameters(recipe: Recipe, config: Any) -> Counted:
    """From shapes alone: the models are built without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        # The norms, biases and adapters of a tensor group are too small to count apart.
        divided = divided_parameters(base, recipe.parallel.tensor)
        layers, made = decoder_layers(base), beyond_copying(base)
        fused = recipe.model.attention != "sdpa" and fused_feed_forwards(base) == config.num_hidden_layers
        model = with_lora(base, recipe.model.lora, seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = _frozen(recipe, parameters - (sum(trained) if recipe.model.lora is not None else 0))
    each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    outside, largest = parameters - sum(each), max(trained, default=0)
    sizes = (parameters, sum(trained), divided, largest, max(each, default=0), outside)
    return Counted(*sizes, made, fused, frozen, reward_bytes(recipe))


def loaded_beside(counted: Counted, config: Any, grid: Grid) -> int:
    """Numbers that a device has for a moment beside its slices, while a sharded model is loaded: in the pass that
    enters it, what no layer has is gathered, and of the layers one, in the buffer that it came in, while that of the
    layer before it is there still. Fused operators, which are tried one layer at a time, hold less."""
    kept = counted.divided // grid.tensor
    layer = counted.layer - (counted.divided - kept) // max(1, config.num_hidden_layers)
    entered = counted.outside + 2 * layer + max(counted.outside, layer)
    # What every process has whole on the host is divided over a tensor group before it is sliced.
    parted = kept - kept // grid.shard if counted.made and grid.tensor > 1 else 0
    return max(entered, parted)


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int
    trained: int
    phases: tuple[Phase, ...]
    checkpoint_bytes: int
    freed: tuple[Freed, ...] = ()
    """What could be kept on the host, or is."""

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
) -> MemoryPlan:
    """Estimates from shapes alone; `counted` saves counting again.

    A micro-batch holds at most the token budget, and at most the longest row times the `rows` of an update.
    `prefill_tokens` are those of one pass of the engine over prompts, `keeps_cache` up to how many bytes of KV cache
    the engine keeps while the device trains. Only what holds for all devices of its kind is asked of `device`.
    """
    grid = grid_of(recipe.parallel, devices)
    shards, tensor = grid.shard * grid.tensor, grid.tensor
    counted = counted or count_parameters(recipe, config)
    parameters, trained = counted.parameters, counted.trained
    size, masters = DTYPES[recipe.model.dtype].itemsize, bool(recipe.model.master_weights)
    tokens = _micro_batch_tokens(recipe, rows, longest)
    # Slices are divided over the devices of a copy; a layer at a time is gathered, which the spare share covers.
    weights = parameters * size // shards
    moments = trained * 2 * (4 if masters else size) // shards
    master_bytes = trained * 4 // shards if masters else 0
    single = _one_micro_batch(recipe, rows, longest)
    # A step of AdamW of the device's own takes the gradients of a single micro-batch as they are.
    in_half = masters and device.adamw != Device.adamw and devices == 1 and single
    gradients = trained * (4 if masters and not in_half else size) // shards
    kernels = kernels_of(recipe, counted, device, devices)
    checkpointing = recipe.model.gradient_checkpointing
    layers = activation_bytes(config, tokens, size, checkpointing, kernels, tensor=tensor)
    last, each = (kept_by_layer(config, tokens, size, one, kernels, tensor=tensor) for one in (False, checkpointing))
    waiting = waiting_activations(config.num_hidden_layers, each)
    here = layers - waiting * int(recipe.model.activation_offload)
    head = head_bytes(config, tokens, recipe.model.lora is None)
    kept = Phase("", weights, 0, moments + master_bytes)
    # Gradients of a micro-batch grow while its activations go. Beside those of the micro-batches before, which masters
    # have in fp32, they are all there at its end, and with few activations that is the larger end.
    on_host = recipe.parallel.offload in ("params", "all")
    arriving = trained * size // shards if masters and not single and not on_host else 0
    ends = (
        Phase("forward and backward", kept.weights, gradients, kept.optimizer, here + head),
        Phase("forward and backward", kept.weights, gradients + arriving, kept.optimizer, last),
    )
    beside = loaded_beside(counted, config, grid) * size if devices > 1 else 0
    phases = (
        Phase("load", weights + beside),
        max(ends, key=lambda phase: phase.total),
        Phase("optimizer step", kept.weights, gradients, kept.optimizer),
        Phase("validation", kept.weights, 0, kept.optimizer, layers // max(1, config.num_hidden_layers) + head),
    )
    state = size + 2 * (4 if masters else size) + (4 if masters else 0)
    plan = MemoryPlan(parameters, trained, phases, trained * state)
    frozen = {key: count * size // shards for key, count in counted.frozen.items()} | {"offload_reward": counted.reward}
    plan = _with_weights(plan, sum(frozen.values()))
    layer = parameters * size // max(1, config.num_hidden_layers)
    largest = counted.largest // shards
    policy, critic = TrainedBytes(moments + master_bytes, weights, phases[1].gradients, layer, largest), None
    if recipe.method in ONLINE:
        gathered = parameters - counted.divided + counted.divided // tensor
        before = plan.phases[-1]
        engine = EnginePlan(devices // tensor, longest, prefill_tokens, keeps_cache)
        plan = _with_online_parts(plan, recipe, config, shards, gathered, engine)
        after = plan.phases[len(phases) - 1]
        if after.weights > before.weights:
            state, critic_weights = after.optimizer - before.optimizer, after.weights - before.weights
            critic = TrainedBytes(state, critic_weights, 0, layer, largest)
    plan = _with_offload(plan, recipe.parallel, devices, policy, critic, frozen)
    activations = Freed("model.activation_offload=true", waiting, recipe.model.activation_offload)
    return replace(plan, freed=(*plan.freed, *([activations] if waiting else [])))


def _micro_batch_tokens(recipe: Recipe, rows: int, longest: int) -> int:
    """Of the largest micro-batch: those of one device, where several divide it."""
    most = min(recipe.batch.rows or rows, rows) * longest
    return -(-min(recipe.line_tokens or most, most) // recipe.parallel.context)


def _one_micro_batch(recipe: Recipe, rows: int, longest: int) -> bool:
    """Whether an update surely is one, however long its rows are."""
    fits_rows = recipe.batch.rows is None or recipe.batch.rows >= rows
    return fits_rows and (recipe.line_tokens is None or recipe.line_tokens >= rows * longest)


def _with_offload(
    plan: MemoryPlan,
    settings: Parallel,
    devices: int,
    policy: TrainedBytes,
    critic: TrainedBytes | None,
    frozen: dict[str, int],
) -> MemoryPlan:
    """What lives on the host is on a device only where a phase needs it there."""
    phases = tuple(without(one, settings.offload, policy, gathered=one.name == "generation") for one in plan.phases)
    if critic is not None:
        phases = tuple(without(one, settings.offload_critic, critic) for one in phases)
    phases = without_frozen(phases, settings, frozen)
    return replace(plan, phases=phases, freed=tuple(freed_by(settings, devices, policy, critic, frozen)))


def _frozen(recipe: Recipe, own: int) -> dict[str, int]:
    """Parameters of a reference or a teacher beside what is trained; `own` are those of a reference that is the policy
    at its start."""
    if reference_kind(recipe) == "model":
        folder = reference_folder(recipe)
        return {"offload_reference": own if folder == recipe.model.path else _parameters_of(folder)}
    if recipe.distill.teacher is not None and recipe.distill.top_k is None:
        return {"offload_teacher": _parameters_of(recipe.distill.teacher)}
    return {}


def _parameters_of(folder: str) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(folder), trust_remote_code=False)
    return sum(p.numel() for p in model.parameters())


def _with_weights(plan: MemoryPlan, weights: int) -> MemoryPlan:
    return replace(plan, phases=tuple(replace(phase, weights=phase.weights + weights) for phase in plan.phases))


@dataclass(frozen=True)
class EnginePlan:
    """What of the engine's memory follows from: the devices that share the prompts, the longest sequence, the tokens of
    a pass over prompts, and up to how many bytes of cache are kept while something else happens."""

    devices: int
    longest: int
    prefill_tokens: int
    keeps_cache: int

    def prompts(self, recipe: Recipe) -> int:
        """Those that one device answers."""
        return -(-recipe.batch.prompts // self.devices)

    def kept(self, recipe: Recipe, cache: int) -> int:
        """Bytes of the cache that stay on the device between two generations."""
        free = recipe.rollout.free_cache
        return 0 if (cache > self.keeps_cache if free is None else free) else cache


def _with_online_parts(
    plan: MemoryPlan, recipe: Recipe, config: Any, shards: int, gathered: int, engine: EnginePlan
) -> MemoryPlan:
    """What else stands beside the policy in an online run: a critic with its optimizer, the cache, a prefill pass.

    `gathered` are the parameters that a device has while it generates.
    """
    size = DTYPES[recipe.model.dtype].itemsize
    masters = bool(recipe.model.master_weights)
    lora = recipe.model.lora
    has_critic = estimator_row(recipe.algorithm.advantage).critic
    # With an adapter the critic trains one too, and its head.
    trained = (plan.trained + config.hidden_size * int(lora is not None)) * int(has_critic)
    weights = plan.parameters * int(has_critic) * size // shards
    state = trained * (2 * (4 if masters else size) + (4 if masters else 0)) // shards
    asked = engine.prompts(recipe)
    sequences = min(recipe.rollout.max_sequences, asked * recipe.rollout.n)
    cached = sequences * engine.longest * kv_bytes(config, size) // recipe.parallel.tensor
    cache = min(cached, int(recipe.rollout.cache_gb * 1e9)) if recipe.rollout.cache_gb else cached
    phases = tuple(
        replace(phase, weights=phase.weights + weights, optimizer=phase.optimizer + state) for phase in plan.phases
    )
    standing = phases[-1]
    kept = engine.kept(recipe, cache)
    phases = tuple(
        phase if phase.name == "load" else replace(phase, activations=phase.activations + kept) for phase in phases
    )
    # The policy's weights are gathered to generate; what stands beside them stays divided.
    beside = standing.weights - plan.parameters * size // shards
    prompts = asked * max(0, engine.longest - recipe.rollout.max_tokens)
    passes = prefill_bytes(config.get_text_config(), min(engine.prefill_tokens, prompts), size)
    generation = Phase("generation", gathered * size + beside, 0, standing.optimizer, cache + passes)
    own = trained * (size + 2 * (4 if masters else size) + (4 if masters else 0))
    return MemoryPlan(plan.parameters, plan.trained, (*phases, generation), plan.checkpoint_bytes + own)


def kv_bytes(config: Any, size: int) -> int:
    """Keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * size


class LayerKernels(NamedTuple):
    """By which kernels a device computes the layers, as far as it decides what they keep."""

    lean: bool = False
    """Norms, rotary and attention of the device's own."""
    fused: bool = False
    """And its own feed-forward."""


def kernels_of(recipe: Recipe, counted: Counted, device: Device | type[Device], devices: int) -> LayerKernels:
    model = recipe.model
    # In fp32 attention is torch's own, which copies what it is given.
    half = DTYPES[model.dtype].itemsize < 4
    lean = device.lean_layers and devices == 1 and counted.fused and half and not (model.lora and model.lora.dropout)
    return LayerKernels(lean, lean and model.lora is None)


def activation_bytes(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels | None = None, *, tensor: int = 1
) -> int:
    """What the decoder layers keep for the backward pass, counted over the tensors of a Llama-like layer.

    Per token: the inputs of two norms and of the projections, queries, keys, values, the attention's output, and
    four tensors as wide as the feed-forward; the norms also keep fp32 copies of their input. Lean layers keep no such
    copies, and queries, keys and values once; a fused feed-forward keeps two tensors of its width.
    """
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", heads) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    lean, fused = kernels or LayerKernels()
    attention = (1 if lean else 3) * (heads + 2 * key_heads) * head_size + heads * head_size
    copies = 0 if lean else 2 * 2 * 4 * hidden
    # Heads and feed-forward are divided over a tensor group, the stream between them is not.
    layer = tokens * (size * (4 * hidden + (attention + (2 if fused else 4) * inner) // tensor) + copies)
    if checkpointing:
        return config.num_hidden_layers * tokens * hidden * size + layer
    return config.num_hidden_layers * layer


def kept_by_layer(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels, *, tensor: int = 1
) -> int:
    """Of what the layers keep until the backward pass reaches them, the part of one: with checkpointing its input."""
    if checkpointing:
        return tokens * int(config.hidden_size) * size
    return activation_bytes(config, tokens, size, False, kernels, tensor=tensor) // max(1, config.num_hidden_layers)


def head_bytes(config: Any, tokens: int, head_trained: bool) -> int:
    """A chunk of logits with its working copies, and the head's fp32 gradient."""
    chunk = min(FUSED_CHUNK_BYTES, 3 * 4 * config.vocab_size * tokens)
    return chunk + (4 * config.vocab_size * config.hidden_size if head_trained else 0)


def refuse_misfit(memory: MemoryPlan, available: int, device: str) -> None:
    """Say it now rather than after the model is loaded."""
    peak = memory.peak
    if peak.total > available:
        raise Refusal.at(
            "memory",
            f"{peak.name} needs about {peak.total / 2**30:.1f} GiB on each device, "
            f"and {device} has {available / 2**30:.1f} GiB",
            "lower batch.tokens, set model.gradient_checkpointing or model.activation_offload, train a LoRA adapter "
            "(model.lora.rank), use model.dtype=bf16, keep the optimizer on the host (parallel.offload=optimizer), or "
            "shard over more devices (parallel.devices, torchrun)",
        )
