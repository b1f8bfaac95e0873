"""Computes the log-probs of a reference model or teacher for all rows once, and then reads them from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.data.array_store import Joined, sequences
from lockstep.data.batching import of_all, own_part, to_device
from lockstep.device.base import Device
from lockstep.kernels.logit_divergence import Whole, likeliest
from lockstep.model.policy import Policy, Teacher, evaluating
from lockstep.model.text_model import text_config
from lockstep.preflight.prepared import Prepared
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.run.console import Console
from lockstep.train.logprob_cache import Columns, LogprobCache, Shape, fingerprint, open_cache
from lockstep.train.models import Models, load_reference, load_teacher, score_targets
from lockstep.types import Item


def add_cache(models: Models, recipe: Recipe, prepared: Prepared, device: Device, console: Console) -> None:
    """Adds to `models` the cached outputs of the reference model or the teacher, or loads the teacher, as the recipe
    requires."""
    world = models.world
    if reference_kind(recipe) == "disk":
        models.cache = _of_reference(models, recipe, prepared, device, console)
    if recipe.distill.teacher is None:
        return
    if recipe.distill.top_k is None:
        models.teacher = load_teacher(recipe, device, world, models.device)
    else:
        models.cache = _of_teacher(models, recipe, prepared, device, console, recipe.distill.top_k)


def _of_reference(models: Models, recipe: Recipe, prepared: Prepared, device: Device, console: Console) -> LogprobCache:
    loaded: list[Policy] = []
    world = models.world

    def compute(items: Sequence[Item]) -> Columns:
        if not loaded:
            loaded.append(load_reference(recipe, device, world, models.device))
        update = models.arrange(items)
        return {"logprobs": score_targets(loaded[0], update, world, models.device, lambda scores: scores.logprobs_K)}

    shapes, settings = {"logprobs": Shape("float32")}, {"dtype": recipe.model.dtype}
    return _open(models, recipe, prepared, console, "reference", reference_folder(recipe), settings, shapes, compute)


def _of_teacher(
    models: Models, recipe: Recipe, prepared: Prepared, device: Device, console: Console, k: int
) -> LogprobCache:
    k = min(k, text_config(prepared.config).vocab_size)
    temperature, world = recipe.distill.temperature, models.world
    loaded: list[Teacher] = []

    @torch.no_grad()
    def compute(items: Sequence[Item]) -> Columns:
        if not loaded:
            loaded.append(load_teacher(recipe, device, world, models.device))
        update = models.arrange(items)
        ids, logprobs = torch.zeros(update.targets, k), torch.zeros(update.targets, k + 1)
        with evaluating(loaded[0]):
            for batch in update.batches:
                distributions = loaded[0](to_device(own_part(batch), models.device))
                assert isinstance(distributions, Whole)
                top = likeliest(distributions, k, temperature)
                # Token ids are stored as fp32, because the ranks sum fp32 tensors. fp32 represents token ids exactly.
                ids[batch.index_K] = of_all(batch, top.ids_Kk.float()).cpu()
                logprobs[batch.index_K] = of_all(batch, top.logprobs_Kk1).cpu()
        return {"ids": world.sum_tensor(ids).int(), "logprobs": world.sum_tensor(logprobs)}

    shapes = {"ids": Shape("int32", k), "logprobs": Shape("float32", k + 1)}
    settings = {"dtype": recipe.model.dtype, "top_k": k, "temperature": temperature}
    return _open(models, recipe, prepared, console, "teacher", str(recipe.distill.teacher), settings, shapes, compute)


def _open(
    models: Models,
    recipe: Recipe,
    prepared: Prepared,
    console: Console,
    kind: str,
    path: str,
    settings: dict[str, Any],
    shapes: dict[str, Shape],
    compute: Callable[[Sequence[Item]], Columns],
) -> LogprobCache:
    items: Sequence[Item] = Joined([prepared.train.items, prepared.val.items if prepared.val else []])
    identity = fingerprint(path, sequences(items), settings)
    parent = Path(recipe.run.folder) / "tables"
    with console.task(f"Computing the outputs of the {kind}", len(items)) as task:
        return open_cache(parent, kind, identity, shapes, items, compute, models.world, task.advance)
