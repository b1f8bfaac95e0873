"""A recipe on a cluster that need not be here: memory of each phase, the time of a step, and keys that make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lockstep.device.select import DEVICES
from lockstep.errors import Problem, refuse_all
from lockstep.model.load import DTYPES, load_config
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE, reference_folder, reference_kind
from lockstep.recipe.parallel import Parallel
from lockstep.rollout.native.engine import kept_cache
from lockstep.rollout.native.prefill import fitting_prefill
from lockstep.train.cluster import Cluster
from lockstep.train.plan import Counted, MemoryPlan, Phase, count_parameters, plan_memory
from lockstep.train.roofline import model_cost
from lockstep.train.step_time import ModelCosts, PhaseTime, StepTimes
from lockstep.train.step_work import StepWork

# Keys of `parallel` that the reckoning follows, or that change nothing in it.
RECKONED = {
    *("devices", "launcher", "stall_seconds", "max_restarts", "elastic", "shard", "replicate", "context"),
    *("context_layout", "offload", "offload_critic", "offload_reference", "offload_teacher", "offload_reward"),
}


@dataclass(frozen=True)
class Task:
    """What is to be planned: a recipe with its model, and the longest row and the rows of an update."""

    recipe: Recipe
    config: Any
    counted: Counted
    longest: int
    rows: int

    @classmethod
    def of(cls, recipe: Recipe, config: Any, longest: int, rows: int) -> Task:
        return cls(recipe, config, count_parameters(recipe, config), longest, rows)

    def with_recipe(self, recipe: Recipe) -> Task:
        """Of the same model with other keys for its memory."""
        return replace(self, recipe=recipe)

    def memory(self, cluster: Cluster) -> MemoryPlan:
        device, recipe = DEVICES[cluster.chip.kind], self.recipe
        size, text = DTYPES[recipe.model.dtype].itemsize, self.config.get_text_config()
        prefill = recipe.rollout.prefill_tokens or fitting_prefill(device.prefill_tokens, cluster.memory, text, size)
        return plan_memory(
            recipe,
            self.config,
            cluster.devices,
            self.longest,
            self.rows,
            prefill,
            lean_layers=device.lean_layers,
            keeps_cache=kept_cache(cluster.memory) if device.graph_capture else 0,
            counted=self.counted,
        )

    def phases(self, cluster: Cluster) -> list[Phase]:
        return cluster_phases(self.recipe, self.memory(cluster))

    def over(self, cluster: Cluster) -> list[Phase]:
        """The phases that a device does not hold, the largest first."""
        found = [phase for phase in self.phases(cluster) if phase.total > cluster.memory]
        return sorted(found, key=lambda phase: -phase.total)

    def times(self, cluster: Cluster, work: StepWork) -> list[PhaseTime] | None:
        """None where the table has no figure for the chip and the number format."""
        recipe = self.recipe
        if cluster.chip.flops(DTYPES[recipe.model.dtype].itemsize) is None:
            return None
        cost = model_cost(self.config)
        other = other_model(recipe)
        models = ModelCosts(self.config, cost, self.counted, cost if other is None else model_cost(load_config(other)))
        lean = DEVICES[cluster.chip.kind].lean_layers and cluster.devices == 1 and self.counted.fused
        return StepTimes(recipe, models, work, cluster, lean=lean).phases()


def other_model(recipe: Recipe) -> str | None:
    """The folder of a reference or teacher that is another model than the policy."""
    if recipe.method not in ONLINE and recipe.distill.teacher is not None:
        return recipe.distill.teacher
    if reference_kind(recipe) == "model" and reference_folder(recipe) != recipe.model.path:
        return reference_folder(recipe)
    return None


def cluster_phases(recipe: Recipe, memory: MemoryPlan) -> list[Phase]:
    """The phases of a step and around it: load, generate, reference, update, save."""
    named = {phase.name: phase for phase in memory.phases}
    update = max((named["forward and backward"], named["optimizer step"]), key=lambda phase: phase.total)
    found = [named["load"]]
    if "generation" in named:
        found.append(replace(named["generation"], name="generate"))
    if reference_kind(recipe) in ("model", "adapter"):
        found.append(replace(named.get("reference", named["validation"]), name="reference"))
    # A checkpoint is copied to the host from where it stands.
    standing = replace(named["validation"], name="save", activations=0)
    return [*found, replace(update, name="update"), standing]


def refuse_uncounted(settings: Parallel) -> None:
    """A key that the reckoning does not know would make it wrong without a word."""
    unknown = [name for name in type(settings).model_fields if name not in RECKONED]
    why, remedy = "is not in the cost model of --cluster", "plan without it"
    refuse_all([Problem(f"parallel.{name}", why, remedy) for name in unknown if name in settings.model_fields_set])


def refuse_over(task: Task, cluster: Cluster, proposal: str | None) -> None:
    """Every phase that does not fit, by its bytes; and what does."""
    remedy = proposal or "no keys make it fit: take larger devices, a smaller model, or an adapter (model.lora)"
    problems: list[Problem] = []
    for phase in task.over(cluster):
        why = f"needs about {phase.total / 2**30:,.1f} GiB ({phase.total:,} bytes) on each device"
        room = f"and {cluster.chip.name} has {cluster.memory / 2**30:,.1f} GiB"
        problems.append(Problem(f"{phase.name} on {cluster}", f"{why}, {room}", "" if problems else remedy))
    refuse_all(problems)
