"""The settings that `lockstep plan --fit` varies: one row per lever, with the recipe keys of each alternative."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.model.router import experts_of_token
from lockstep.preflight.cluster import TargetCluster
from lockstep.preflight.cluster_plan import Outlook
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES, estimator_row

# The rank of the adapter and the tile of the feed-forward that the search proposes.
RANK, TILE = 16, 4096
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# The fraction of the free memory that the search gives to the KV cache. The rest is for fragments.
CACHE_SHARE = 0.9


class Option(NamedTuple):
    """One alternative of a lever: a short label for the table (empty if nothing is to be said), and recipe keys."""

    label: str
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Lever:
    """A setting that the search varies. `options` returns the alternatives for a recipe on a device. If a lever does
    not apply, `options` returns one alternative without keys."""

    name: str
    options: Callable[[Outlook, TargetCluster], Sequence[Option]]
    weights: bool = False
    """Whether the keys change which weights are trained, their format or their optimizer. The recipe is then loaded and
    its parameters are counted again, and settings are compared only with those of the same choice."""
    falls_back: bool = False
    """Whether the alternatives after the first are tried only if those before do not fit."""


AS_IS = Option("", {})


def _precisions(outlook: Outlook, target: TargetCluster) -> list[Option]:
    dtype = outlook.recipe.model.dtype
    if dtype != "fp32" or target.chip.half is None:
        return [Option(dtype, {})]
    return [Option("fp32", {}), Option("bf16", {"model.dtype": "bf16"})]


def _adapters(outlook: Outlook, target: TargetCluster) -> list[Option]:
    lora = outlook.recipe.model.lora
    if lora is not None:
        return [Option("lora" if lora.rank is None else f"lora {lora.rank}", {})]
    return [Option("full", {}), Option(f"lora {RANK}", {"model.lora.rank": RANK})]


def _formats(outlook: Outlook, target: TargetCluster) -> list[Option]:
    model = outlook.recipe.model
    if model.lora is None or model.quantize is not None or model.dtype == "fp32":
        return [Option(model.quantize or "", {})]
    keys: dict[str, Any] = {}
    # Quantised experts get no adapter, and most weights of such a model are those of its experts.
    if model.lora.targets == "all-linear" and experts_of_token(outlook.models.config) is not None:
        keys = {"model.lora.targets": ATTENTION}
    labels = {name: f"{name}, attention" if keys else name for name in ("int8", "nf4")}
    return [AS_IS, *(Option(label, {"model.quantize": name, **keys}) for name, label in labels.items())]


def _optimizers(outlook: Outlook, target: TargetCluster) -> list[Option]:
    """The state of an adapter's optimizer is small, so these alternatives are for the training of all weights."""
    recipe = outlook.recipe
    if recipe.model.lora is not None or recipe.optim.name != "adamw":
        return [AS_IS]
    return [AS_IS, Option("adamw8bit", {"optim.name": "adamw8bit"})]


def _states(outlook: Outlook, target: TargetCluster) -> list[Option]:
    recipe = outlook.recipe
    if recipe.model.lora is not None and recipe.parallel.offload == "none":
        return [AS_IS]
    critic = recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic
    keys = ["parallel.offload", *(["parallel.offload_critic"] if critic else [])]
    return [Option("", dict.fromkeys(keys, "none")), Option("optim. host", dict.fromkeys(keys, "optimizer"))]


def _layers(outlook: Outlook, target: TargetCluster) -> list[Option]:
    checkpointing, offload = "model.gradient_checkpointing", "model.activation_offload"
    found = [Option("", {checkpointing: False, offload: False}), Option("ckpt", {checkpointing: True, offload: False})]
    # transformers does not list the layers of some models, and activations are copied layer by layer.
    if outlook.models.counted.layer:
        found.append(Option("ckpt host", {checkpointing: True, offload: True}))
    return found


def _tiles(outlook: Outlook, target: TargetCluster) -> list[Option]:
    recipe = outlook.recipe
    tokens = recipe.line_tokens or (recipe.batch.micro_batch_size or 1) * outlook.steps.longest(recipe)
    if not outlook.models.counted.tileable or recipe.model.tiled_mlp is not None or tokens <= TILE:
        return [AS_IS]
    return [AS_IS, Option("tiles", {"model.tiled_mlp": TILE})]


def _frozen(outlook: Outlook, target: TargetCluster) -> list[Option]:
    """Frozen models move to the host together: reference, teacher and reward models."""
    recipe = outlook.recipe
    exists = {
        "parallel.offload_reference": reference_kind(recipe) == "model",
        "parallel.offload_teacher": recipe.distill.teacher is not None and recipe.distill.top_k is None,
        "parallel.offload_reward": recipe.method in ONLINE and bool(recipe.reward.model or recipe.reward.process),
    }
    keys = [key for key, found in exists.items() if found]
    if not keys:
        return [AS_IS]
    return [Option("", dict.fromkeys(keys, False)), Option("frozen host", dict.fromkeys(keys, True))]


def _micro_batches(outlook: Outlook, target: TargetCluster) -> list[Option]:
    """The recipe's micro-batch, and smaller ones down to the longest row."""
    recipe, batch = outlook.recipe, outlook.recipe.batch
    found = [AS_IS]
    if batch.tokens is None:
        rows = batch.micro_batch_size or 1
        while rows > 1:
            rows //= 2
            found.append(Option(f"{rows} rows", {"batch.micro_batch_size": rows}))
        return found
    least, tokens = outlook.steps.longest(recipe), batch.tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        found.append(Option(f"{tokens:,} tok", {"batch.tokens": tokens}))
    return found


def _rollouts(outlook: Outlook, target: TargetCluster) -> list[Option]:
    """The KV cache of the engine, if not all sequences fit: half of the free memory, or most of it. If not even the
    smallest cache fits, fewer sequences."""
    recipe = outlook.recipe
    if recipe.method not in ONLINE or not ENGINES[recipe.rollout.engine].paged or recipe.rollout.cache_gb is not None:
        return [AS_IS]
    plan = outlook.memory(target)
    generation = next(phase for phase in plan.phases if phase.name == "generation")
    room = int(CACHE_SHARE * (target.memory - generation.total + plan.cache))
    if plan.cache >= plan.wanted_cache or room <= plan.cache:
        return [AS_IS]
    gigabytes = _rounded_down(min(room, plan.wanted_cache) / 1e9)
    return [AS_IS, Option(f"cache {gigabytes:g} GB", {"rollout.cache_gb": gigabytes})]


def _rounded_down(number: float) -> float:
    """Returns the number with two significant digits."""
    step = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{math.floor(number / step) * step:.2g}")


# Weights first, because the other levers depend on them. A new lever is a row here.
LEVERS: tuple[Lever, ...] = (
    Lever("precision", _precisions, weights=True),
    Lever("adapter", _adapters, weights=True),
    Lever("quantised weights", _formats, weights=True),
    Lever("optimizer", _optimizers, weights=True),
    Lever("optimizer state", _states),
    Lever("layers", _layers),
    Lever("feed-forward", _tiles),
    Lever("frozen models", _frozen),
    Lever("micro-batch", _micro_batches, falls_back=True),
    Lever("rollout share", _rollouts),
)
