"""From scores to advantages: the divergence in the reward, the estimator, and the correction of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.algorithms.advantage import Estimate, Signals, Whitening, informative
from lockstep.algorithms.correction import correct
from lockstep.algorithms.kl import divergence
from lockstep.algorithms.own import estimator
from lockstep.algorithms.reduce import EVERYTHING, WholeStep, sum_by
from lockstep.functions import is_function_path
from lockstep.recipe import Recipe
from lockstep.recipe.online import Algorithm
from lockstep.train.annotate import Annotated
from lockstep.train.experience import Experience


@dataclass(frozen=True)
class Advantages:
    """For every token of a step that is here. `keep_K` is 0 for tokens that rollout correction leaves out,
    `importance_K` their weight otherwise."""

    rewards_K: torch.Tensor
    advantages_K: torch.Tensor
    returns_K: torch.Tensor
    keep_K: torch.Tensor
    importance_K: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Learned:
    """What the updates of a step learn from: its responses, what the models said of them, and their advantages."""

    experience: Experience
    known: Annotated
    advantages: Advantages


def estimate_advantages(experience: Experience, known: Annotated, recipe: Recipe, kl_coefficient: float) -> Advantages:
    algorithm, sequence_K, whole = recipe.algorithm, experience.sequence_K, experience.whole
    metrics: dict[str, float] = {}
    # What was not earned at a step of the response is earned at its end.
    earned_S = sum_by(experience.earned_K, sequence_K, experience.sequences)
    rewards_K = experience.earned_K.clone()
    rewards_K[experience.last_K] += (experience.scores_S - earned_S)[list(experience.numbers)]
    kl = algorithm.kl
    if kl.in_reward():
        assert known.old_K is not None
        assert known.reference_K is not None
        alone = kl.where == "reward"
        kl_K = divergence(kl.estimator if alone else kl.reward_estimator, known.old_K, known.reference_K)
        rewards_K -= (kl_coefficient if alone else kl.reward_coefficient) * kl_K
        metrics["actor/reward_kl_penalty"] = whole.mean(kl_K)
    estimate = _estimate(experience, rewards_K, known.values_K, algorithm)
    keep_K, importance_K = torch.ones(len(sequence_K)), torch.ones(len(sequence_K))
    settings = algorithm.correction
    if settings.weight != "none" or settings.mask != "none":
        assert known.old_K is not None
        engine_K, sequences = experience.engine_K, experience.sequences
        corrected = correct(known.old_K, engine_K, sequence_K, sequences, **settings.model_dump(), whole=whole)
        keep_K, importance_K = corrected.keep_K, corrected.weights_K
        metrics |= corrected.metrics
    metrics |= _described(experience, rewards_K, estimate.advantages_K, estimate.returns_K, known.values_K)
    return Advantages(rewards_K, estimate.advantages_K, estimate.returns_K, keep_K, importance_K, metrics)


def _estimate(
    experience: Experience, rewards_K: torch.Tensor, values_K: torch.Tensor | None, algorithm: Algorithm
) -> Estimate:
    whitening = Whitening(**algorithm.whiten.model_dump())
    advantage = estimator(algorithm.advantage, algorithm.function_limit)
    given = {"gamma": algorithm.gamma, "lam": algorithm.lam}
    group_S, baseline_S = experience.group_S, experience.baseline_S
    if not is_function_path(algorithm.advantage) or experience.world.size == 1:
        signals = Signals(
            rewards_K, experience.sequence_K, group_S, values_K, baseline_S, whitening, whole=experience.whole
        )
        return advantage(signals, **given)
    # A function of the user's sees the whole step, as in one process; a rank keeps the numbers of its own tokens.
    every_K = torch.repeat_interleave(torch.arange(experience.sequences), experience.written_S)
    values = None if values_K is None else experience.everywhere(values_K)
    found = advantage(
        Signals(experience.everywhere(rewards_K), every_K, group_S, values, baseline_S, whitening), **given
    )
    own = experience.places_of(slice(0, experience.sequences))
    return Estimate(found.advantages_K[own], found.returns_K[own])


def _described(
    experience: Experience,
    rewards_K: torch.Tensor,
    advantages_K: torch.Tensor,
    returns_K: torch.Tensor,
    values_K: torch.Tensor | None,
) -> dict[str, float]:
    whole = experience.whole
    rewards_S = whole.sum_by(rewards_K.double(), experience.sequence_K, experience.sequences)
    metrics = {
        **_spread("critic/score", experience.scores_S, EVERYTHING),
        **_spread("critic/rewards", rewards_S, EVERYTHING),
        **_spread("critic/advantages", advantages_K, whole),
        **_spread("critic/returns", returns_K, whole),
    }
    mixed = experience.group_S[informative(experience.scores_S, experience.group_S)].unique()
    metrics["critic/mixed_groups"] = len(mixed) / len(experience.group_S.unique())
    if values_K is not None:
        metrics |= _spread("critic/values", values_K, whole)
        unexplained, total = _variance(returns_K - values_K, whole), _variance(returns_K, whole)
        metrics["critic/vf_explained_var"] = 1 - unexplained / total if total > 0 else 0.0
    return metrics


def _variance(values_K: torch.Tensor, whole: WholeStep) -> float:
    centred_K = values_K.double() - whole.mean(values_K)
    return whole.mean(centred_K.square())


def _spread(name: str, values: torch.Tensor, whole: WholeStep) -> dict[str, float]:
    return {
        f"{name}/mean": whole.mean(values),
        f"{name}/max": whole.greatest(values),
        f"{name}/min": -whole.greatest(-values),
    }
