"""Keys that make a recipe fit on a cluster: the cheapest change first, until it fits; then what was not needed goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.parallel.mesh import grid_of
from lockstep.recipe import Recipe
from lockstep.recipe.checks import combination_problems
from lockstep.recipe.load import value_text
from lockstep.recipe.methods import reference_kind
from lockstep.recipe.rows import estimator_row
from lockstep.train.cluster import Cluster
from lockstep.train.outlook import Task

Keys = dict[str, Any]
# Up to so many times as many nodes are tried where no keys help.
MOST_TIMES = 64


@dataclass(frozen=True)
class Fit:
    cluster: Cluster
    keys: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{key}={value_text(value)}" for key, value in self.keys.items())


def fitting(task: Task, cluster: Cluster) -> Fit | None:
    """What fits on that cluster, or on more nodes of its kind; None where nothing was found."""
    nodes = cluster.nodes
    most = min(MOST_TIMES * nodes, cluster.chip.most_nodes or MOST_TIMES * nodes)
    while nodes <= most:
        larger = replace(cluster, nodes=nodes)
        keys = _keys(task, larger)
        if keys is not None:
            return Fit(larger, keys)
        nodes *= 2
    return None


def with_keys(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    for key, value in keys.items():
        section, name = key.split(".")
        recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={name: value})})
    return recipe


def _keys(task: Task, cluster: Cluster) -> Keys | None:
    chosen: Keys = {}
    while over := task.with_recipe(with_keys(task.recipe, chosen)).over(cluster):
        found = _next(task, cluster, chosen, over[0].name, over[0].total)
        if found is None:
            return None
        chosen = found
    for key in list(chosen):
        fewer = {name: value for name, value in chosen.items() if name != key}
        if _possible(task, cluster, fewer) and not task.with_recipe(with_keys(task.recipe, fewer)).over(cluster):
            chosen = fewer
    return chosen


def _next(task: Task, cluster: Cluster, chosen: Keys, phase: str, total: int) -> Keys | None:
    """One change more, which makes the phase smaller."""
    recipe = with_keys(task.recipe, chosen)
    for change in CHANGES:
        keys = change(recipe, task, cluster, phase)
        if keys is None or not _possible(task, cluster, {**chosen, **keys}):
            continue
        changed = task.with_recipe(with_keys(recipe, keys))
        if next(one.total for one in changed.phases(cluster) if one.name == phase) < total:
            return {**chosen, **keys}
    return None


def _possible(task: Task, cluster: Cluster, keys: Keys) -> bool:
    """Whether the recipe may have these keys, and a micro-batch still holds the longest row."""
    recipe = with_keys(task.recipe, keys)
    held = recipe.line_tokens is None or recipe.line_tokens >= task.longest
    return held and cluster.devices % recipe.parallel.context == 0 and not list(combination_problems(recipe))


# -- changes, the cheapest first. Each gives keys, or None where it has nothing (more) to offer.

Change = Callable[[Recipe, Task, Cluster, str], Keys | None]


def smaller_micro_batches(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    batch = recipe.batch
    if batch.tokens is None:
        return {"batch.rows": batch.rows // 2} if batch.rows is not None and batch.rows > 1 else None
    least = -(-task.longest // recipe.parallel.context)
    return {"batch.tokens": max(least, batch.tokens // 2)} if batch.tokens > least else None


def more_slices(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    whole = grid_of(recipe.parallel, cluster.devices).replicate == 1
    return None if whole else {"parallel.shard": cluster.devices, "parallel.replicate": 1}


def reference_on_host(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    absent = reference_kind(recipe) != "model" or recipe.parallel.offload_reference
    return None if absent else {"parallel.offload_reference": True}


def fewer_sequences(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    if phase != "generate":
        return None
    share = -(-recipe.batch.prompts // cluster.devices) * recipe.rollout.n
    now = min(recipe.rollout.max_sequences, share)
    return {"rollout.max_sequences": now // 2} if now > 1 else None


def recomputed_layers(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    return None if recipe.model.gradient_checkpointing else {"model.gradient_checkpointing": True}


def optimizer_on_host(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    keys: Keys = {} if recipe.parallel.offload != "none" else {"parallel.offload": "optimizer"}
    if estimator_row(recipe.algorithm.advantage).critic and recipe.parallel.offload_critic == "none":
        keys["parallel.offload_critic"] = "optimizer"
    return keys or None


def divided_sequences(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    """Only inside a node: keys and values travel in every layer."""
    count = 2 * recipe.parallel.context
    if phase != "update" or recipe.batch.tokens is None or cluster.each % count:
        return None
    return {"parallel.context": count, "batch.tokens": -(-task.longest // count)}


def all_on_host(recipe: Recipe, task: Task, cluster: Cluster, phase: str) -> Keys | None:
    if cluster.devices == 1:
        return None
    keys: Keys = {} if recipe.parallel.offload == "all" else {"parallel.offload": "all"}
    if estimator_row(recipe.algorithm.advantage).critic and recipe.parallel.offload_critic != "all":
        keys["parallel.offload_critic"] = "all"
    return keys or None


CHANGES: tuple[Change, ...] = (
    smaller_micro_batches,
    more_slices,
    reference_on_host,
    fewer_sequences,
    recomputed_layers,
    optimizer_on_host,
    divided_sequences,
    all_on_host,
)
