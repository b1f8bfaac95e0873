"""How a recipe samples: for training, and for validation."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.recipe import Recipe
from lockstep.types import Sampling


def training_sampling(recipe: Recipe, stop_ids: Sequence[int]) -> Sampling:
    rollout = recipe.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=tuple(sorted({*stop_ids, *rollout.stop_ids})),
        stop_strings=tuple(rollout.stop),
        seed=recipe.run.seed,
        score_truncated=rollout.truncated == "mask",
    )


def validation_sampling(recipe: Recipe, stop_ids: Sequence[int]) -> Sampling:
    return Sampling(
        max_tokens=recipe.val.max_new_tokens,
        temperature=recipe.val.temperature,
        top_p=recipe.val.top_p,
        top_k=recipe.val.top_k,
        stop_ids=tuple(sorted({*stop_ids, *recipe.rollout.stop_ids})),
        stop_strings=tuple(recipe.rollout.stop),
        seed=recipe.run.seed,
    )
