"""From scores to advantages: the divergence in the reward, the estimator, and the correction of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.algorithms.advantage import Signals, Whitening, informative
from lockstep.algorithms.correction import correct
from lockstep.algorithms.kl import divergence
from lockstep.algorithms.own import estimator
from lockstep.algorithms.reduce import sum_by
from lockstep.recipe import Recipe
from lockstep.recipe.rows import estimator_row
from lockstep.train.annotate import Annotated
from lockstep.train.experience import Experience


@dataclass(frozen=True)
class Advantages:
    """For every token of a step. `keep_K` is 0 for tokens that rollout correction leaves out, `importance_K` their
    weight otherwise."""

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
    algorithm, sequence_K = recipe.algorithm, experience.sequence_K
    metrics: dict[str, float] = {}
    # What was not earned at a step of the response is earned at its end.
    earned_S = sum_by(experience.earned_K, sequence_K, experience.sequences)
    rewards_K = experience.earned_K.clone()
    rewards_K[experience.last_K] += experience.scores_S - earned_S
    kl, taken_off_K = algorithm.kl, None
    if kl.in_reward():
        assert known.old_K is not None
        assert known.reference_K is not None
        alone = kl.where == "reward"
        kl_K = divergence(kl.estimator if alone else kl.reward_estimator, known.old_K, known.reference_K)
        penalty_K = (kl_coefficient if alone else kl.reward_coefficient) * kl_K
        if kl.compared or not estimator_row(algorithm.advantage).groups:
            rewards_K -= penalty_K
        else:
            taken_off_K = penalty_K
        metrics["actor/reward_kl_penalty"] = float(kl_K.double().mean())
    whitening = Whitening(**algorithm.whiten.model_dump())
    signals = Signals(
        rewards_K, sequence_K, experience.group_S, known.values_K, experience.baseline_S, whitening, taken_off_K
    )
    advantage = estimator(algorithm.advantage, algorithm.function_limit)
    estimate = advantage(signals, gamma=algorithm.gamma, lam=algorithm.lam)
    keep_K, importance_K = torch.ones(len(sequence_K)), torch.ones(len(sequence_K))
    settings = algorithm.correction
    if settings.weight != "none" or settings.mask != "none":
        assert known.old_K is not None
        engine_K, sequences = experience.engine_K, experience.sequences
        corrected = correct(known.old_K, engine_K, sequence_K, sequences, **settings.model_dump())
        keep_K, importance_K = corrected.keep_K, corrected.weights_K
        metrics |= corrected.metrics
    rewards_K = rewards_K if taken_off_K is None else rewards_K - taken_off_K
    metrics |= _described(experience, rewards_K, estimate.advantages_K, estimate.returns_K, known.values_K)
    return Advantages(rewards_K, estimate.advantages_K, estimate.returns_K, keep_K, importance_K, metrics)


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
