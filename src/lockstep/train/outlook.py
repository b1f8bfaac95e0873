"""A recipe on a cluster that need not be here: the memory of each phase and the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lockstep.device.select import DEVICES
from lockstep.errors import Problem, refuse_all
from lockstep.model.load import DTYPES, load_config
from lockstep.model.tensor_plan import refuse_heads
from lockstep.recipe import Recipe
from lockstep.recipe.keys_parallel import Parallel
from lockstep.recipe.methods import ONLINE, reference_folder, reference_kind
from lockstep.rollout.native.engine import kept_cache
from lockstep.rollout.native.prefill import fitting_prefill
from lockstep.train.beside import WORKER, with_worker
from lockstep.train.cluster import TargetCluster
from lockstep.train.plan_counts import count_parameters
from lockstep.train.plan_layers import kernels_of, kv_bytes
from lockstep.train.plan_memory import MemoryPlan, Phase, on_device, plan_memory
from lockstep.train.roofline import model_cost
from lockstep.train.step_time import ModelCosts, PhaseTime, StepTimes
from lockstep.train.step_work import StepSource

# Keys of `parallel` that the reckoning follows, or that change nothing in it.
RECKONED = {
    *("devices", "launcher", "stall_seconds", "max_restarts", "elastic", "shard", "replicate", "tensor"),
    *(
        "context",
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
    """A recipe, its models and its steps. Another recipe may have other keys, but the same models and rows."""

    recipe: Recipe
    models: ModelCosts
    steps: StepSource

    @classmethod
    def of(cls, recipe: Recipe, config: Any, steps: StepSource) -> Outlook:
        cost, other = model_cost(config), _other_model(recipe)
        frozen = cost if other is None else model_cost(load_config(other))
        return cls(recipe, ModelCosts(config, cost, count_parameters(recipe, config), frozen), steps)

    def with_recipe(self, recipe: Recipe) -> Outlook:
        return replace(self, recipe=recipe)

    def memory(self, cluster: TargetCluster) -> MemoryPlan:
        device, recipe, config = DEVICES[cluster.chip.kind], self.recipe, self.models.config
        size, text = DTYPES[recipe.model.dtype].itemsize, config.get_text_config()
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
            )

        plan = on_device(recipe, memory, planned)
        if recipe.method not in ONLINE:
            return plan
        # The table has no memory of a device that is the host.
        on_host = cluster.chip.memory is None
        return with_worker(plan, recipe, config, cluster.devices, longest, prefill, on_host=on_host, memory=memory)

    def held(self, cluster: TargetCluster) -> int | None:
        """Sequences of a mean length that the KV cache of a device holds at once; None where it holds all, or where
        not even the least cache fits."""
        plan, work = self.memory(cluster), self.steps.work(self.recipe)
        fits = all(phase.name != "generation" or phase.total <= cluster.memory for phase in plan.phases)
        if plan.cache >= plan.wanted_cache or not fits:
            return None
        size = DTYPES[self.recipe.model.dtype].itemsize
        each = kv_bytes(self.models.config, size) / self.recipe.parallel.tensor
        return max(1, int(plan.cache / (each * (work.prompt_tokens + work.response_tokens))))

    def divided_over(self, tensor: int) -> Outlook:
        """The same with tensor groups of this size. Raises Indivisible where the model has no such parts."""
        refuse_heads(self.models.config, tensor)
        parallel = self.recipe.parallel.model_copy(update={"tensor": tensor})
        recipe = self.recipe.model_copy(update={"parallel": parallel})
        counted = count_parameters(recipe, self.models.config)
        return replace(self, recipe=recipe, models=replace(self.models, counted=counted))

    def phases(self, cluster: TargetCluster) -> list[Phase]:
        """Those of a step and around it: load, generate, reference, update, save."""
        named = {phase.name: phase for phase in self.memory(cluster).phases}
        update = max((named["forward and backward"], named["optimizer step"]), key=lambda phase: phase.total)
        found = [named["load"]]
        if "generation" in named:
            found.append(replace(named["generation"], name="generate"))
        if reference_kind(self.recipe) in ("model", "adapter"):
            found.append(replace(named.get("reference", named["validation"]), name="reference"))
        # A checkpoint is copied to the host from where it stands.
        standing = replace(named["validation"], name="save", activations=0)
        worker = [named[WORKER]] if WORKER in named else []
        return [*found, replace(update, name="update"), standing, *worker]

    def over(self, cluster: TargetCluster) -> list[Phase]:
        """The phases that a device does not hold, the largest first."""
        found = [phase for phase in self.phases(cluster) if phase.total > cluster.memory]
        return sorted(found, key=lambda phase: -phase.total)

    def times(self, cluster: TargetCluster) -> list[PhaseTime] | None:
        """None where the table has no figure for the chip and the number format."""
        if cluster.chip.flops(DTYPES[self.recipe.model.dtype].itemsize) is None:
            return None
        recipe, held = self.recipe, self.held(cluster) if self.recipe.method in ONLINE else None
        kernels = kernels_of(recipe, self.models.counted, DEVICES[cluster.chip.kind], cluster.devices)
        if held is not None and held < recipe.rollout.max_sequences:
            rollout = recipe.rollout.model_copy(update={"max_sequences": held})
            recipe = recipe.model_copy(update={"rollout": rollout})
        return StepTimes(recipe, self.models, self.steps.work(recipe), cluster, kernels).phases()


def _other_model(recipe: Recipe) -> str | None:
    """The folder of a reference or teacher that is another model than the policy."""
    if recipe.method not in ONLINE and recipe.distill.teacher is not None:
        return recipe.distill.teacher
    if reference_kind(recipe) == "model" and reference_folder(recipe) != recipe.model.path:
        return reference_folder(recipe)
    return None


def refuse_uncounted(settings: Parallel) -> None:
    """A key that the reckoning does not know would make it wrong without a word."""
    unknown = {name: field for name, field in type(settings).model_fields.items() if name not in RECKONED}
    changed = [name for name, field in unknown.items() if getattr(settings, name) != field.default]
    why, remedy = "is not in the cost model of --cluster", "plan without it"
    refuse_all([Problem(f"parallel.{name}", why, remedy) for name in changed])


def refuse_over(outlook: Outlook, cluster: TargetCluster, proposal: str | None) -> None:
    """Every phase that does not fit, by its bytes; and what does."""
    remedy = proposal or "no keys make it fit: take larger devices, a smaller model, or an adapter (model.lora)"
    problems: list[Problem] = []
    for phase in outlook.over(cluster):
        why = f"needs about {phase.total / 2**30:,.1f} GiB ({phase.total:,} bytes) on each device"
        room = f"and {cluster.chip.name} has {cluster.memory / 2**30:,.1f} GiB"
        problems.append(Problem(f"{phase.name} on {cluster}", f"{why}, {room}", "" if problems else remedy))
    refuse_all(problems)
