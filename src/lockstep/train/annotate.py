"""From responses to advantages: log-probabilities only where they are needed, the divergence, the estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from lockstep.algorithms.advantage import Signals, informative
from lockstep.algorithms.correction import correct
from lockstep.algorithms.kl import divergence
from lockstep.algorithms.own import estimator
from lockstep.algorithms.reduce import sum_by
from lockstep.data.updates import arrange
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.train.experience import Experience
from lockstep.train.roles import Roles
from lockstep.types import MicroBatch

Phases = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Part:
    """The responses of one optimizer step, this rank's share of them in micro-batches."""

    responses: slice
    tokens: slice
    batches: list[MicroBatch]

    @property
    def count(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class Annotated:
    """Every token of a step with what the losses need. What a recipe does not use is None.

    `keep_K` is 0 for tokens that rollout correction leaves out, `importance_K` their weight otherwise.
    """

    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None
    rewards_K: torch.Tensor
    advantages_K: torch.Tensor
    returns_K: torch.Tensor
    keep_K: torch.Tensor
    importance_K: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def vectors(self) -> dict[str, torch.Tensor | None]:
        """By name, for the tape."""
        return {name.removesuffix("_K"): value for name, value in vars(self).items() if name.endswith("_K")}


def plan_updates(experience: Experience, recipe: Recipe, world: World, pad_id: int) -> list[Part]:
    """The step cut into optimizer steps by prompts, each packed by itself.

    Old and new log-probabilities come from the same micro-batches, so that their ratio is exactly 1 before an update.
    """
    batch = recipe.batch
    each = batch.prompts_per_update or batch.prompts
    parts = []
    for first in range(0, batch.prompts, each):
        responses = experience.of_prompts(first, first + each)
        examples = experience.examples[responses]
        if examples:
            own = arrange(examples, world, tokens=batch.tokens, rows=batch.rows, pad_id=pad_id)
            parts.append(Part(responses, experience.tokens_of(responses), own.batches))
    return parts


def old_needed(recipe: Recipe, updates: int) -> bool:
    """With one update a step the old log-probabilities are the current ones, unless something before it needs them."""
    algorithm = recipe.algorithm
    corrected = algorithm.correction.weight != "none" or algorithm.correction.mask != "none"
    in_reward = algorithm.kl.where == "reward"
    chosen_before = algorithm.loss in ("clip_cov", "kl_cov")
    return updates * algorithm.epochs > 1 or corrected or in_reward or chosen_before


def annotate(
    experience: Experience, parts: Sequence[Part], roles: Roles, recipe: Recipe, kl_coefficient: float, phases: Phases
) -> Annotated:
    algorithm = recipe.algorithm
    old_K = reference_K = values_K = None
    if old_needed(recipe, len(parts)):
        with phases("old_log_prob"):
            old_K = torch.cat([roles.logprobs(part.batches, part.count) for part in parts])
    if algorithm.kl.where != "none":
        with phases("ref"):
            reference_K = torch.cat([roles.reference_logprobs(part.batches, part.count) for part in parts])
    if roles.critic is not None:
        with phases("values"):
            values_K = torch.cat([roles.values(part.batches, part.count) for part in parts])
    with phases("adv"):
        return _estimate(experience, recipe, old_K, reference_K, values_K, kl_coefficient)


def _estimate(
    experience: Experience,
    recipe: Recipe,
    old_K: torch.Tensor | None,
    reference_K: torch.Tensor | None,
    values_K: torch.Tensor | None,
    kl_coefficient: float,
) -> Annotated:
    algorithm, sequence_K = recipe.algorithm, experience.sequence_K
    metrics: dict[str, float] = {}
    # What was not earned at a step of the response is earned at its end.
    earned_S = sum_by(experience.earned_K, sequence_K, experience.sequences)
    rewards_K = experience.earned_K.clone()
    rewards_K[experience.last_K] += experience.scores_S - earned_S
    if algorithm.kl.where == "reward":
        assert old_K is not None
        assert reference_K is not None
        kl_K = divergence(algorithm.kl.estimator, old_K, reference_K)
        rewards_K -= kl_coefficient * kl_K
        metrics["actor/reward_kl_penalty"] = float(kl_K.double().mean())
    signals = Signals(rewards_K, sequence_K, experience.group_S, values_K, experience.baseline_S)
    estimate = estimator(algorithm.advantage)(signals, gamma=algorithm.gamma, lam=algorithm.lam)
    keep_K, importance_K = torch.ones(len(sequence_K)), torch.ones(len(sequence_K))
    settings = algorithm.correction
    if settings.weight != "none" or settings.mask != "none":
        assert old_K is not None
        corrected = correct(old_K, experience.engine_K, sequence_K, experience.sequences, **settings.model_dump())
        keep_K, importance_K = corrected.keep_K, corrected.weights_K
        metrics |= corrected.metrics
    metrics |= _described(experience, rewards_K, estimate.advantages_K, estimate.returns_K, values_K)
    return Annotated(
        old_K,
        reference_K,
        values_K,
        rewards_K,
        estimate.advantages_K,
        estimate.returns_K,
        keep_K,
        importance_K,
        metrics,
    )


def _described(
    experience: Experience,
    rewards_K: torch.Tensor,
    advantages_K: torch.Tensor,
    returns_K: torch.Tensor,
    values_K: torch.Tensor | None,
) -> dict[str, float]:
    rewards_S = sum_by(rewards_K.double(), experience.sequence_K, experience.sequences)
    metrics = {
        **_spread("critic/score", experience.scores_S),
        **_spread("critic/rewards", rewards_S),
        **_spread("critic/advantages", advantages_K),
        **_spread("critic/returns", returns_K),
    }
    mixed = experience.group_S[informative(experience.scores_S, experience.group_S)].unique()
    metrics["critic/mixed_groups"] = len(mixed) / len(experience.group_S.unique())
    if values_K is not None:
        metrics |= _spread("critic/values", values_K)
        unexplained = (returns_K - values_K).double().var(unbiased=False)
        total = returns_K.double().var(unbiased=False)
        metrics["critic/vf_explained_var"] = float(1 - unexplained / total) if total > 0 else 0.0
    return metrics


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
