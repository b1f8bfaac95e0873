"""Keys that make a recipe fit on a cluster: of all that do, those with the shortest step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lockstep.device.select import DEVICES
from lockstep.errors import Refusal
from lockstep.model.tensor_plan import Indivisible
from lockstep.parallel.mesh import grid_of
from lockstep.recipe import Recipe
from lockstep.recipe.loader import value_text
from lockstep.recipe.methods import ONLINE, reference_kind
from lockstep.recipe.recipe_checks import combination_problems
from lockstep.recipe.registry import estimator_row
from lockstep.train.beside import WORKER, refuse_beside
from lockstep.train.cluster import TargetCluster
from lockstep.train.outlook import Outlook

KeyValues = dict[str, Any]
# Up to so many times as many nodes are tried where no keys help.
MOST_TIMES = 64
# Keys that save less time than this are not worth saying.
WORTH = 0.05


@dataclass(frozen=True)
class Fit:
    cluster: TargetCluster
    keys: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join(f"{key}={value_text(value)}" for key, value in self.keys.items()) or "the recipe as it is"


def fitting(outlook: Outlook, cluster: TargetCluster) -> Fit | None:
    """What fits on that cluster, or on more nodes of its kind; None where nothing was found."""
    nodes, most = cluster.nodes, min(MOST_TIMES * cluster.nodes, cluster.chip.most_nodes or MOST_TIMES * cluster.nodes)
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
    """By the time of a step, rounded, so that a change that gains next to nothing is left out. Tensor groups only where
    nothing else fits: what their sums wait for is not known."""
    found = list(_timed(outlook, cluster))
    if not found:
        found = [
            (seconds, count + 1, {"parallel.tensor": divided.recipe.parallel.tensor, **keys})
            for divided in _tensors(outlook, cluster)
            for seconds, count, keys in _timed(divided, cluster)
        ]
    if not found:
        return None
    least = min(seconds for seconds, _, _ in found)
    return min((one for one in found if one[0] <= (1 + WORTH) * least), key=lambda one: (one[1], one[0]))[2]


def _timed(outlook: Outlook, cluster: TargetCluster) -> Iterator[tuple[float, int, KeyValues]]:
    """What fits: the seconds of a step, the number of keys, and the keys."""
    for keys, changed in _candidates(outlook, cluster):
        times = changed.times(cluster)
        yield sum(time.open for time in times) if times is not None else 0.0, len(keys), keys


def _tensors(outlook: Outlook, cluster: TargetCluster) -> Iterator[Outlook]:
    """Larger tensor groups inside a node, of a model that can be divided so."""
    recipe = outlook.recipe
    for size in (2, 4, 8, 16):
        if size <= recipe.parallel.tensor or cluster.each % size:
            continue
        try:
            divided = outlook.divided_over(size)
            refuse_beside(divided.recipe, DEVICES[cluster.chip.kind], cluster.each, None)
        except (Indivisible, Refusal):
            continue
        yield divided


def _candidates(outlook: Outlook, cluster: TargetCluster) -> Iterator[tuple[KeyValues, Outlook]]:
    """All combinations that the recipe may have and that fit, with as many sequences at once as have room then."""
    recipe = outlook.recipe
    for parts in product(
        *(one(recipe, cluster) for one in (_slices, _hosts, _references, _rewards, _layers, _contexts))
    ):
        shared: KeyValues = {key: value for part in parts for key, value in part.items()}
        context = shared.get("parallel.context", recipe.parallel.context)
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
    """Whether the recipe may have these keys, and a micro-batch still holds the longest row."""
    recipe = with_keys(outlook.recipe, keys)
    try:
        grid_of(recipe.parallel, cluster.devices)
    except Refusal:
        return False
    held = recipe.line_tokens is None or recipe.line_tokens >= outlook.steps.longest(recipe)
    return held and cluster.devices % recipe.parallel.context == 0 and not list(combination_problems(recipe))


# -- what may be changed: for each, nothing first, then the keys


def _slices(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    try:
        whole = grid_of(recipe.parallel, cluster.devices).replicate == 1
    except Refusal:  # of the recipe's own keys, on more devices than it was written for
        whole = False
    return (
        [{}] if whole else [{}, {"parallel.shard": cluster.devices // recipe.parallel.tensor, "parallel.replicate": 1}]
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
    """Activations wait on the host only where layers keep no more than their inputs: all that a layer keeps would take
    a host's memory, which nobody counts here, and its link."""
    whole: KeyValues = {} if recipe.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    moved: KeyValues = {} if recipe.model.activation_offload else {"model.activation_offload": True}
    return [{}, *([whole] if whole else []), *([{**whole, **moved}] if moved else [])]


def _contexts(recipe: Recipe, cluster: TargetCluster) -> list[KeyValues]:
    """Only inside a node: keys and values travel in every layer."""
    if recipe.batch.tokens is None:
        return [{}]
    counts = (2, 4, 8, 16)
    return [{}, *({"parallel.context": n} for n in counts if n > recipe.parallel.context and cluster.each % n == 0)]


def _micro_batches(outlook: Outlook, context: int) -> Iterator[KeyValues]:
    batch = outlook.recipe.batch
    yield {}
    if batch.tokens is None:
        rows = batch.rows or 1
        while rows > 1:
            rows //= 2
            yield {"batch.rows": rows}
        return
    recipe = with_keys(outlook.recipe, {"parallel.context": context})
    least, tokens = -(-outlook.steps.longest(recipe) // context), batch.tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield {"batch.tokens": tokens}


def _sequences(recipe: Recipe, cluster: TargetCluster) -> Iterator[KeyValues]:
    yield {}
    if recipe.method not in ONLINE:
        return
    share = -(-recipe.batch.prompts // (cluster.devices // recipe.parallel.tensor)) * recipe.rollout.n
    count = min(recipe.rollout.max_sequences, share)
    while count > 1:
        count //= 2
        yield {"rollout.max_sequences": count}
