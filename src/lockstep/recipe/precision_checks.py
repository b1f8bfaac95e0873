"""Checks for invalid combinations of the keys for low precision: `rollout.precision` and `model.matmul`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.errors import Problem, conflict, unfit
from lockstep.recipe.registry import ENGINES

if TYPE_CHECKING:
    from lockstep.recipe.schema import Recipe


def matmul_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of `model.matmul`, which trains the full weights of the policy."""
    model, key = recipe.model, "model.matmul"
    if model.matmul is None:
        return
    if model.lora is not None:
        yield unfit(key, "applies to full fine-tuning: the base of an adapter has no gradients", "remove it")
    if model.dtype == "fp16":
        why = "the scaled losses of fp16 and the scales of fp8 were never tested together"
        yield unfit(key, why, "set model.dtype=bf16")
    if recipe.parallel.tensor_parallel > 1:
        why = "the parts of a projection on the ranks of a tensor-parallel group would have different scales"
        yield unfit(key, why, "remove it, or set parallel.tensor_parallel=1 and shard the model instead")


def rollout_precision_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of `rollout.precision` and `rollout.kv_cache`: an engine that cannot quantise, and a mismatch
    that nothing corrects."""
    rollout, correction = recipe.rollout, recipe.algorithm.rollout_correction
    if rollout.low_precision is None:
        return
    yield from _weight_problems(recipe)
    if rollout.kv_cache is not None and not ENGINES[rollout.engine].paged:
        why = f"engine {rollout.engine} does not use the KV cache of lockstep"
        yield unfit("rollout.kv_cache", why, "remove it, or set rollout.engine=native")
    # `weight` has a default with low precision, so only an explicit `none` disables it.
    if "weight" in correction.model_fields_set and not (correction.compares or correction.bypass):
        yield conflict(
            "algorithm.rollout_correction.weight",
            f"responses of a policy in {rollout.low_precision} are off policy, and nothing would correct for that",
            "remove it (the default is token), set sequence, or set bypass, mask or reject",
        )


def _weight_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of an engine that cannot quantise its weights, or not the weights of an update."""
    rollout, key = recipe.rollout, "rollout.precision"
    if rollout.precision is None:
        return
    if rollout.precision not in ENGINES[rollout.engine].precisions:
        able = [name for name, row in ENGINES.items() if rollout.precision in row.precisions]
        why = f"engine {rollout.engine} does not generate in {rollout.precision}"
        yield unfit(key, why, f"remove it, or set rollout.engine to {' or '.join(able)}")
    if recipe.model.quantize is not None:
        why = f"the engine generates from the weights of model.quantize={recipe.model.quantize}, which are quantised"
        yield conflict(key, why, "remove it, or model.quantize")
    if recipe.parallel.tensor_parallel > 1 and not ENGINES[rollout.engine].served:
        why = "the parts of a projection on the ranks of a tensor-parallel group would have different scales"
        yield unfit(key, why, "remove it, or set parallel.tensor_parallel=1 and shard the model instead")
    if ENGINES[rollout.engine].served and recipe.model.dtype == "fp32":
        yield unfit(key, f"{rollout.engine} quantises weights in bf16 or fp16 only", "set model.dtype=bf16")
    if recipe.model.lora is not None and not ENGINES[rollout.engine].quantizes_adapted:
        why = f"{rollout.engine} quantises only full weights, and the run sends an adapter"
        yield unfit(key, why, "remove it, or use rollout.engine=native")
    args = [word for word in rollout.server.args if word.startswith(("--quantization", "--load-format"))]
    if args:
        yield conflict("rollout.server.args", f"{args[0]} is set by rollout.precision", "remove it from the list")
