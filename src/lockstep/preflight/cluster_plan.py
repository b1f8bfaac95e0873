"""Predicts the memory and step time of a recipe on a cluster, and finds the fastest parallel layout that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lockstep.device.select import DEVICES
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.model.division.tensor_plan import Indivisible, refuse_heads
from lockstep.model.load import load_config
from lockstep.model.load_folder import DTYPES
from lockstep.model.text_model import text_config
from lockstep.parallel.sharding import grid_of
from lockstep.preflight.async_worker import WORKER, refuse_beside, with_worker
from lockstep.preflight.cluster import StepSource, TargetCluster, model_cost
from lockstep.preflight.memory_plan import MemoryPlan, Phase, on_device, plan_memory
from lockstep.preflight.model_sizes import count_parameters, kernels_of
from lockstep.preflight.state_sizes import kv_bytes
from lockstep.preflight.step_time import ModelCosts, PhaseTime, StepTimes
from lockstep.preflight.tower_sizes import ANY_IMAGES, ImageLoad
from lockstep.recipe import Recipe
from lockstep.recipe.keys_parallel import Parallel
from lockstep.recipe.loader import value_text
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.recipe_checks import combination_problems
from lockstep.recipe.registry import estimator_row
from lockstep.rollout.native.native_engine import fitting_prefill, kept_cache

# Predicts memory and step time on a cluster, which need not be available.

# The keys of the recipe section `parallel` that the prediction takes into account, or that do not affect it.
RECKONED = {
    *("devices", "launcher", "ray", "stall_seconds", "max_restarts", "elastic"),
    *("shard", "replicate", "tensor_parallel"),
    *(
        "expert_parallel",
        "context_parallel",
        "context_layout",
        "offload",
        "offload_critic",
        "offload_reference",
        "offload_teacher",
        "offload_reward",
    ),
}


@dataclass(frozen=True)
class Outlook:
    """A recipe with the sizes of its models and the tokens of its steps, for predictions. The recipe may be replaced by
    one with the same models and rows."""

    recipe: Recipe
    models: ModelCosts
    steps: StepSource
    images: ImageLoad = ANY_IMAGES

    @classmethod
    def of(cls, recipe: Recipe, config: Any, steps: StepSource, images: ImageLoad = ANY_IMAGES) -> Outlook:
        cost, other = model_cost(config), _other_model(recipe)
        frozen = cost if other is None else model_cost(load_config(other))
        return cls(recipe, ModelCosts(config, cost, count_parameters(recipe, config), frozen), steps, images)

    def with_recipe(self, recipe: Recipe) -> Outlook:
        return replace(self, recipe=recipe)

    def memory(self, cluster: TargetCluster) -> MemoryPlan:
        device, recipe, config = DEVICES[cluster.chip.kind], self.recipe, self.models.config
        size, text = DTYPES[recipe.model.dtype].itemsize, text_config(config)
        prefill = recipe.rollout.prefill_tokens or fitting_prefill(device.prefill_tokens, cluster.memory, text, size)
        longest, memory = self.steps.longest(recipe), cluster.memory

        def planned(cache_room: int | None) -> MemoryPlan:
            return plan_memory(
                recipe,
                config,
                cluster.devices,
                longest,
                self.steps.rows(recipe),
                prefill,
                device=device,
                keeps_cache=kept_cache(memory) if device.graph_capture else 0,
                counted=self.models.counted,
                cache_room=cache_room,
                images=self.images,
            )

        plan = on_device(recipe, memory, planned)
        if recipe.method not in ONLINE:
            return plan
        # The chip table has no memory size for a CPU.
        on_host = cluster.chip.memory is None
        return with_worker(plan, recipe, config, cluster.devices, longest, prefill, on_host=on_host, memory=memory)

    def held(self, cluster: TargetCluster) -> int | None:
        """Returns how many sequences of mean length fit into the KV cache of a device at once. Returns None if all
        sequences fit, or if even the minimum cache does not fit."""
        plan, work = self.memory(cluster), self.steps.work(self.recipe)
        fits = all(phase.name != "generation" or phase.total <= cluster.memory for phase in plan.phases)
        if plan.cache >= plan.wanted_cache or not fits:
            return None
        size = DTYPES[self.recipe.model.dtype].itemsize
        each = kv_bytes(self.models.config, size, self.recipe.parallel.tensor_parallel)
        return max(1, int(plan.cache / (each * (work.prompt_tokens + work.response_tokens))))

    def divided_over(self, tensor: int) -> Outlook:
        """Returns a copy of this `Outlook` with tensor parallelism over `tensor` ranks. Raises Indivisible if the model
        cannot be divided over so many ranks."""
        refuse_heads(self.models.config, tensor)
        parallel = self.recipe.parallel.model_copy(update={"tensor_parallel": tensor})
        recipe = self.recipe.model_copy(update={"parallel": parallel})
        counted = count_parameters(recipe, self.models.config)
        return replace(self, recipe=recipe, models=replace(self.models, counted=counted))

    def phases(self, cluster: TargetCluster) -> list[Phase]:
        """Returns the memory of each phase of a run: load, generate, reference, update, save, and the phase of the
        rollout worker."""
        named = {phase.name: phase for phase in self.memory(cluster).phases}
        update = max((named["forward and backward"], named["optimizer step"]), key=lambda phase: phase.total)
        found = [named["load"]]
        if "generation" in named:
            found.append(replace(named["generation"], name="generate"))
        if reference_kind(self.recipe) in ("model", "adapter"):
            found.append(replace(named.get("reference", named["validation"]), name="reference"))
        # Saving copies a checkpoint to the host and needs no activations.
        standing = replace(named["validation"], name="save", activations=0)
        worker = [named[WORKER]] if WORKER in named else []
        return [*found, replace(update, name="update"), standing, *worker]

    def over(self, cluster: TargetCluster) -> list[Phase]:
        """Returns the phases that exceed the memory of a device, the largest first."""
        found = [phase for phase in self.phases(cluster) if phase.total > cluster.memory]
        return sorted(found, key=lambda phase: -phase.total)

    def times(self, cluster: TargetCluster) -> list[PhaseTime] | None:
        """Returns the times of the phases of a step, or None if the chip table has no FLOP/s for the model's dtype."""
        if cluster.chip.flops(DTYPES[self.recipe.model.dtype].itemsize) is None:
            return None
        recipe, held = self.recipe, self.held(cluster) if self.recipe.method in ONLINE else None
        kernels = kernels_of(recipe, self.models.counted, DEVICES[cluster.chip.kind], cluster.devices)
        if held is not None and held < recipe.rollout.max_sequences:
            rollout = recipe.rollout.model_copy(update={"max_sequences": held})
            recipe = recipe.model_copy(update={"rollout": rollout})
        return StepTimes(recipe, self.models, self.steps.work(recipe), cluster, kernels).phases()


def _other_model(recipe: Recipe) -> str | None:
    """Returns the folder of a reference or teacher model that differs from the policy's model, or None."""
    if recipe.method not in ONLINE and recipe.distill.teacher is not None:
        return recipe.distill.teacher
    if reference_kind(recipe) == "model" and reference_folder(recipe) != recipe.model.path:
        return reference_folder(recipe)
    return None


def refuse_uncounted(settings: Parallel) -> None:
    """Refuses keys of the recipe section `parallel` that the prediction does not take into account."""
    unknown = {name: field for name, field in type(settings).model_fields.items() if name not in RECKONED}
    changed = [name for name, field in unknown.items() if getattr(settings, name) != field.default]
    why, remedy = "is not supported by the prediction of --cluster", "plan without it"
    refuse_all([Problem(f"parallel.{name}", why, remedy, code="unsupported-setting") for name in changed])


def refuse_over(outlook: Outlook, cluster: TargetCluster, proposal: str | None) -> None:
    """Refuses a recipe that exceeds the memory of the cluster's devices. The message contains the bytes of each phase
    and a proposal that fits."""
    remedy = proposal or "no recipe keys make it fit: use larger devices, a smaller model, or an adapter (model.lora)"
    problems: list[Problem] = []
    for phase in outlook.over(cluster):
        why = f"needs about {phase.total / 2**30:,.1f} GiB ({phase.total:,} bytes) on each device"
        room = f"and {cluster.chip.name} has {cluster.memory / 2**30:,.1f} GiB"
        problems.append(
            Problem(
                f"{phase.name} on {cluster}", f"{why}, {room}", "" if problems else remedy, code="not-enough-memory"
            )
        )
    refuse_all(problems)


# Search for recipe keys with which the recipe fits on a cluster and has the shortest step time.

KeyValues = dict[str, Any]
# If no keys make the recipe fit, clusters with up to this many times as many nodes are tried.
MOST_TIMES = 64
# Changes of keys that save less than this fraction of the step time are not proposed.
WORTH = 0.05


@dataclass(frozen=True)
class Fit:
    cluster: TargetCluster
    keys: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{key}={value_text(value)}" for key, value in self.keys.items()) or "the unchanged recipe"


def fitting(outlook: Outlook, cluster: TargetCluster) -> Fit | None:
    """Finds the recipe keys with which the recipe fits on the cluster and is fastest. If no keys make the recipe fit,
    tries more nodes of the same type. Returns None if the recipe fits on no tried cluster."""
    nodes, most = cluster.nodes, cluster.nodes * (1 if cluster.chip.between is None else MOST_TIMES)
    while nodes <= most:
        larger = replace(cluster, nodes=nodes)
        keys = _fastest(outlook, larger)
        if keys is not None:
            return Fit(larger, keys)
        nodes *= 2
    return None


def with_keys(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    for key, value in keys.items():
        section, name = key.split(".")
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={name: value})})
    return recipe


def _fastest(outlook: Outlook, cluster: TargetCluster) -> KeyValues | None:
    """Returns the smallest set of changed keys whose step time is within 5 % of the shortest, so that changes with a
    negligible gain are not proposed. Tensor parallelism is tried only if nothing else fits, because the latency of its
    all-reduces is not modelled."""
    found = list(_timed(outlook, cluster))
    if not found:
        found = [
            (seconds, count + 1, {"parallel.tensor_parallel": divided.recipe.parallel.tensor_parallel, **keys})
            for divided in _tensors(outlook, cluster)
            for seconds, count, keys in _timed(divided, cluster)
        ]
    if not found:
        return None
    least = min(seconds for seconds, _, _ in found)
    return min((one for one in found if one[0] <= (1 + WORTH) * least), key=lambda one: (one[1], one[0]))[2]


def _timed(outlook: Outlook, cluster: TargetCluster) -> Iterator[tuple[float, int, KeyValues]]:
    """Yields the combinations of keys with which the recipe fits, as (step seconds, number of keys, keys)."""
    for keys, changed in _candidates(outlook, cluster):
        times = changed.times(cluster)
        yield sum(time.open for time in times) if times is not None else 0.0, len(keys), keys


def _tensors(outlook: Outlook, cluster: TargetCluster) -> Iterator[Outlook]:
    """Yields a copy of `outlook` for each larger tensor-parallel size that fits inside a node and divides the model."""
    recipe = outlook.recipe
    for size in (2, 4, 8, 16):
        if size <= recipe.parallel.tensor_parallel or cluster.each % size:
            continue
        try:
            divided = outlook.divided_over(size)
            refuse_beside(divided.recipe, DEVICES[cluster.chip.kind], cluster.each, None)
        except (Indivisible, Refusal):
            continue
        yield divided


def _candidates(outlook: Outlook, cluster: TargetCluster) -> Iterator[tuple[KeyValues, Outlook]]:
    """Yields all valid combinations of keys with which the recipe fits. Each combination generates as many sequences
    concurrently as fit into memory."""
    recipe = outlook.recipe
    for parts in product(
        *(one(recipe, cluster) for one in (_slices, _hosts, _references, _rewards, _layers, _contexts))
    ):
        shared: KeyValues = {key: value for part in parts for key, value in part.items()}
        context = shared.get("parallel.context_parallel", recipe.parallel.context_parallel)
        for micro in _micro_batches(outlook, context):
            keys = {**shared, **micro}
            if not _possible(outlook, cluster, keys):
                continue
            for sequences in _sequences(recipe, cluster):
                changed = outlook.with_recipe(with_keys(recipe, {**keys, **sequences}))
                over = changed.over(cluster)
                if not over:
                    yield {**keys, **sequences}, changed
                if all(phase.name not in ("generate", WORKER) for phase in over):
                    break


def _possible(outlook: Outlook, cluster: TargetCluster, keys: KeyValues) -> bool:
    """Returns True if the recipe is valid with these keys and the longest row still fits into a micro-batch."""
    recipe = with_keys(outlook.recipe, keys)
    try:
        grid_of(recipe.parallel, cluster.devices)
    except Refusal:
        return False
    held = recipe.line_tokens is None or recipe.line_tokens >= outlook.steps.longest(recipe)
    return held and cluster.devices % recipe.parallel.context_parallel == 0 and not list(combination_problems(recipe))


# -- alternatives for each recipe setting: the first alternative is no change


def _slices(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    try:
        whole = grid_of(recipe.parallel, cluster.devices).replicate == 1
    except Refusal:  # the parallel keys of the recipe may be invalid for this number of devices
        whole = False
    return (
        [{}]
        if whole
        else [{}, {"parallel.shard": cluster.devices // recipe.parallel.tensor_parallel, "parallel.replicate": 1}]
    )


def _hosts(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    kinds = ["optimizer"] if cluster.devices == 1 else ["optimizer", "all"]
    critic = recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic
    keys = ["parallel.offload", *(["parallel.offload_critic"] if critic else [])]
    return [{}, *(dict.fromkeys(keys, kind) for kind in kinds)]


def _references(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    absent = reference_kind(recipe) != "model" or recipe.parallel.offload_reference
    return [{}] if absent else [{}, {"parallel.offload_reference": True}]


def _rewards(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    absent = recipe.method not in ONLINE or not (recipe.reward.model or recipe.reward.process)
    return [{}] if absent or recipe.parallel.offload_reward else [{}, {"parallel.offload_reward": True}]


def _layers(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    """Returns alternative settings of gradient checkpointing and activation offload. Offload is proposed only together
    with checkpointing. Without checkpointing, offload would need host memory and bandwidth that are not modelled."""
    whole: KeyValues = {} if recipe.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    moved: KeyValues = {} if recipe.model.activation_offload else {"model.activation_offload": True}
    return [{}, *([whole] if whole else []), *([{**whole, **moved}] if moved else [])]


def _contexts(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    """Returns alternative settings of context parallelism. Groups stay inside a node, because every layer exchanges
    keys and values."""
    if recipe.batch.tokens is None:
        return [{}]
    counts = (2, 4, 8, 16)
    return [
        {},
        *(
            {"parallel.context_parallel": n}
            for n in counts
            if n > recipe.parallel.context_parallel and cluster.each % n == 0
        ),
    ]


def _micro_batches(outlook: Outlook, context: int) -> Iterator[KeyValues]:
    batch = outlook.recipe.batch
    yield {}
    if batch.tokens is None:
        rows = batch.micro_batch_size or 1
        while rows > 1:
            rows //= 2
            yield {"batch.micro_batch_size": rows}
        return
    recipe = with_keys(outlook.recipe, {"parallel.context_parallel": context})
    least, tokens = -(-outlook.steps.longest(recipe) // context), batch.tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield {"batch.tokens": tokens}


def _sequences(recipe: Recipe, cluster: TargetCluster) -> Iterator[KeyValues]:
    yield {}
    if recipe.method not in ONLINE:
        return
    share = -(-recipe.batch.prompts // (cluster.devices // recipe.parallel.tensor_parallel)) * recipe.rollout.n
    count = min(recipe.rollout.max_sequences, share)
    while count > 1:
        count //= 2
        yield {"rollout.max_sequences": count}
