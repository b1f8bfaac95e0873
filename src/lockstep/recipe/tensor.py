"""What does not go together with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.errors import Problem
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.rows import ENGINES

if TYPE_CHECKING:
    from lockstep.recipe.schema import Recipe


def tensor_problems(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    if parallel.tensor == 1:
        return
    key, alone = "parallel.tensor", "or set parallel.tensor=1"
    if parallel.context > 1:
        why = f"{parallel.tensor} is set together with parallel.context={parallel.context}"
        yield Problem(key, why, "set one of the two to 1")
    for name in ("offload", "offload_critic"):
        if getattr(parallel, name) in ("params", "all"):
            yield Problem(f"parallel.{name}", "divided weights stay on the device", f"use optimizer, {alone}")
    for name in ("offload_reference", "offload_teacher"):
        if getattr(parallel, name):
            yield Problem(f"parallel.{name}", "divided weights stay on the device", f"remove it, {alone}")
    if recipe.tape.record:
        yield Problem(
            "tape", "holds what one device computed, and modules are divided", "record with parallel.tensor=1"
        )
    if recipe.method in ONLINE or recipe.val.questions:
        if not ENGINES[recipe.rollout.engine].divided:
            why = f"{recipe.rollout.engine} generates from a whole model"
            yield Problem("rollout.engine", why, f"use native, {alone}")
        if recipe.rollout.function is not None:
            why = "each of the processes that divide a model would run it, and they must ask for the same"
            yield Problem("rollout.function", why, f"remove it, {alone}")
