"""The weight of the divergence from the reference, from one step to the next."""

from __future__ import annotations

from lockstep.algorithms.divergence import adapted
from lockstep.recipe import Recipe


def next_coefficient(recipe: Recipe, beta: float, metrics: dict[str, float], sequences: int) -> float:
    """The next step's, after a step of `sequences` responses; writes the one that was used into the metrics."""
    kl = recipe.algorithm.kl
    if kl.where == "none":
        return beta
    metrics["actor/kl_coef"] = beta
    measured = metrics.get("actor/kl" if kl.where == "loss" else "actor/reward_kl_penalty")
    if kl.target is None or measured is None:  # a critic's warm-up does not look at the policy
        return beta
    return adapted(beta, measured, kl.target, kl.horizon, sequences)
