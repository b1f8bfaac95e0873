"""Computes advantages: the KL penalty in the reward, the estimator, rollout correction, and the KL coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.advantage import ESTIMATORS, Estimate, Signals, TrajectoryTurns, Whitening, informative
from lockstep.algorithms.correction import Band, Corrected, correct
from lockstep.algorithms.divergence import adapt_coefficient, divergence
from lockstep.algorithms.reduce import SINGLE_PROCESS, StepReduce, sum_by
from lockstep.algorithms.token_selection import draw_repeats
from lockstep.algorithms.user_functions import user_estimator
from lockstep.errors import Refusal
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Algorithm, RolloutCorrection
from lockstep.recipe.registry import estimator_row
from lockstep.reward.environment_rewards import ENVIRONMENT_PARTS
from lockstep.reward.scorer import recipe_weights
from lockstep.run.runtime import generator_of
from lockstep.train.experience import Experience, ModelOutputs, reward_part, turn_returns
from lockstep.types import Score

# The assumed relative rounding error of a return in fp32.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Advantages:
    """Rewards, advantages and returns of the tokens on this rank. `keep_K` is 0 for tokens that are excluded from the
    loss. `is_weights_K` are importance sampling weights. `repeats_S` is the number of times that each response is
    trained on (None: once)."""

    rewards_K: torch.Tensor
    advantages_K: torch.Tensor
    returns_K: torch.Tensor
    keep_K: torch.Tensor
    is_weights_K: torch.Tensor
    metrics: dict[str, float]
    repeats_S: torch.Tensor | None = None
    counts_masked: bool = False
    """Whether the divisors of the loss also count tokens and sequences that are excluded from the loss."""


@dataclass(frozen=True)
class TrainBatch:
    """The training batch of a step: responses, model outputs and advantages."""

    experience: Experience
    outputs: ModelOutputs
    advantages: Advantages


def estimate_advantages(
    experience: Experience, outputs: ModelOutputs, recipe: Recipe, kl_coefficient: float, seed: tuple[int, ...] = (0,)
) -> Advantages:
    """Computes the advantages of a step. `seed` is the seed of the random resampling of PF-PPO."""
    algorithm, sequence_K, reduce = recipe.algorithm, experience.sequence_K, experience.reduce
    metrics: dict[str, float] = {}
    # `token_rewards_K` may assign parts of a score to earlier tokens. The last token gets the rest of the score.
    earlier_S = sum_by(experience.token_rewards_K, sequence_K, experience.sequences)
    rewards_K = experience.token_rewards_K.clone()
    rewards_K[experience.last_K] += (experience.scores_S - earlier_S)[list(experience.local_numbers)]
    kl, kl_penalty_K = algorithm.kl, None
    turns = _turns(experience, algorithm)
    totals_S: torch.Tensor | None = experience.scores_S
    if turns is not None and not estimator_row(algorithm.advantage).turns:
        returns = [turn_returns(meta.turn_rewards, turns.discount)[:1] for meta in experience.metas]
        totals_S = torch.tensor([value for first in returns for value in first]) if all(returns) else None
    if kl.in_reward():
        assert outputs.old_K is not None
        assert outputs.reference_K is not None
        alone = kl.where == "reward"
        kl_K = divergence(kl.estimator if alone else kl.reward_estimator, outputs.old_K, outputs.reference_K)
        penalty_K = (kl_coefficient if alone else kl.reward_coefficient) * kl_K
        if kl.before_baseline or not estimator_row(algorithm.advantage).groups:
            rewards_K -= penalty_K
            totals_S = None
            turns = None if turns is None else replace(turns, rewards_U=None)
        else:
            kl_penalty_K = penalty_K
        metrics["actor/reward_kl_penalty"] = reduce.mean(kl_K)
    measured = recipe.rollout.low_precision is not None
    corrected = _correct(experience, outputs, algorithm.rollout_correction, measured=measured)
    keep_K, is_weights_K = corrected.keep_K, corrected.weights_K
    metrics |= corrected.metrics
    if algorithm.overlong.mask_truncated:
        cut_S = torch.tensor([meta.stop == "length" for meta in experience.metas])
        keep_K = torch.where(cut_S[sequence_K], 0.0, keep_K)
        metrics["response/skipped_ratio"] = float(cut_S.double().mean())
    signals = Signals(
        rewards_K,
        sequence_K,
        experience.group_S,
        outputs.values_K,
        experience.baseline_S,
        Whitening(**algorithm.whiten.model_dump()),
        _energy(outputs, is_weights_K),
        _parts(experience, recipe) if estimator_row(algorithm.advantage).parts else (),
        kl_penalty_K,
        reduce,
        turns,
        totals_S,
        divide_by_std=algorithm.divide_by_std,
        gpg_nonzero=algorithm.gpg_count == "nonzero",
        lone_score=algorithm.lone_response == "score",
    )
    estimate = _estimate(experience, signals, algorithm, corrected.keep_K > 0)
    repeats_S = None
    if algorithm.pf_ppo.method != "none":
        # Every rank has all scores, so every rank samples the same number of repeats per response.
        repeats_S = draw_repeats(experience.scores_S, **algorithm.pf_ppo.model_dump(), generator=generator_of(seed))
        metrics["actor/filtered_share"] = float((repeats_S == 0).double().mean())
    rewards_K = rewards_K if kl_penalty_K is None else rewards_K - kl_penalty_K
    metrics |= _batch_metrics(experience, rewards_K, estimate.advantages_K, estimate.returns_K, outputs.values_K)
    estimated = estimate.advantages_K, estimate.returns_K
    return Advantages(rewards_K, *estimated, keep_K, is_weights_K, metrics, repeats_S, corrected.counts_masked)


def _turns(experience: Experience, algorithm: Algorithm) -> TrajectoryTurns | None:
    """Returns the turns of the step, if the estimator or the discount between turns needs them."""
    wanted = estimator_row(algorithm.advantage).turns
    if not wanted and algorithm.turn_discount == 1.0:
        return None
    if wanted and not any(anchor for meta in experience.metas for anchor in meta.anchors):
        raise Refusal.at(
            "algorithm.advantage",
            f"{algorithm.advantage} compares turns that start in the same state, and the environment names no state",
            "let the environment return Start(..., anchor=...) and Turn(..., anchor=...), or use the advantage grpo; "
            "the last checkpoint is untouched",
            code="missing-input",
        )
    return experience.turns(algorithm.turn_discount, algorithm.turn_weight)


def _estimate_kept(experience: Experience, signals: Signals, algorithm: Algorithm, kept_K: torch.Tensor) -> Estimate:
    """Estimates advantages as if the policy had generated only the tokens of `kept_K`. A group still has the scores of
    all its sequences. Tokens that are not kept get advantage 0 and return 0."""

    def kept(vector_K: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector_K is None else vector_K[kept_K]

    ones_K = torch.ones_like(signals.rewards_K)
    part = replace(
        signals,
        rewards_K=signals.rewards_K[kept_K],
        sequence_K=signals.sequence_K[kept_K],
        values_K=kept(signals.values_K),
        energy_K=kept(signals.energy_K),
        kl_penalty_K=kept(signals.kl_penalty_K),
        turns=None if signals.turns is None else replace(signals.turns, turn_K=signals.turns.turn_K[kept_K]),
        totals_S=signals.scores_S,
        present_S=signals.reduce.sum_by(ones_K, signals.sequence_K, len(signals.group_S)) > 0,
    )
    estimate = _estimate(experience, part, algorithm)
    vectors_K = torch.zeros_like(ones_K), torch.zeros_like(ones_K)
    for vector_K, values_K in zip(vectors_K, (estimate.advantages_K, estimate.returns_K), strict=True):
        vector_K[kept_K] = values_K
    return Estimate(*vectors_K)


def _estimate(
    experience: Experience, signals: Signals, algorithm: Algorithm, kept_K: torch.Tensor | None = None
) -> Estimate:
    if algorithm.rollout_correction.mask_first and kept_K is not None:
        return _estimate_kept(experience, signals, algorithm, kept_K)
    settings = {"gamma": algorithm.gamma, "lam": algorithm.lam}
    if algorithm.advantage in ESTIMATORS:
        return ESTIMATORS[algorithm.advantage](signals, **settings)
    user_function = user_estimator(algorithm.advantage, algorithm.function_timeout)
    if experience.world.size == 1:
        return user_function(signals, **settings)

    # A user function gets the tokens of all ranks, as in a run of one process. Each rank keeps only the results for its
    # own tokens.
    def every(vector_K: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector_K is None else experience.all_gather(vector_K)

    everything = replace(
        signals,
        rewards_K=experience.all_gather(signals.rewards_K),
        sequence_K=torch.repeat_interleave(torch.arange(experience.sequences), experience.num_response_tokens_S),
        values_K=every(signals.values_K),
        energy_K=every(signals.energy_K),
        kl_penalty_K=every(signals.kl_penalty_K),
        reduce=SINGLE_PROCESS,
        turns=None
        if signals.turns is None
        else replace(signals.turns, turn_K=experience.all_gather(signals.turns.turn_K)),
    )
    estimate = user_function(everything, **settings)
    local = experience.local_positions(slice(0, experience.sequences))
    return Estimate(estimate.advantages_K[local], estimate.returns_K[local])


def _correct(
    experience: Experience, outputs: ModelOutputs, settings: RolloutCorrection, *, measured: bool
) -> Corrected:
    """Returns the weights of rollout correction. If the recipe has no rollout correction, every token has weight 1.
    `measured`: the metrics of the mismatch are computed also without weights."""
    if not settings.compares and not measured:
        ones_K = torch.ones(len(experience.sequence_K))
        return Corrected(ones_K, ones_K)
    trainer_K = outputs.trainer_K if settings.bypass else outputs.old_K
    assert trainer_K is not None
    keys = settings.model_dump(exclude={"bypass", "reject", "mask_first"})
    bands = [Band(**band.model_dump()) for band in settings.reject]
    rollout_logprobs_K, sequence_K, sequences = (
        experience.rollout_logprobs_K,
        experience.sequence_K,
        experience.sequences,
    )
    return correct(trainer_K, rollout_logprobs_K, sequence_K, sequences, **keys, reject=bands, reduce=experience.reduce)


def _energy(outputs: ModelOutputs, is_weights_K: torch.Tensor) -> torch.Tensor | None:
    """Returns the squared norm of the gradient of each log-prob with respect to the logits, times the squared
    importance weight."""
    if outputs.squares_K is None:
        return None
    logprobs_K = outputs.old_K if outputs.trainer_K is None else outputs.trainer_K
    assert logprobs_K is not None
    return (1 - 2 * logprobs_K.exp() + outputs.squares_K) * is_weights_K.square()


def _parts(experience: Experience, recipe: Recipe) -> tuple[tuple[float, torch.Tensor], ...]:
    """Returns the weight and the values of each separate reward: of the rewards in `gdpo_rewards`, or of all rewards if
    that key is not set."""
    weights = recipe.algorithm.gdpo_rewards or recipe_weights(recipe)[0]
    if recipe.algorithm.overlong.buffer and not recipe.algorithm.gdpo_rewards:
        weights = {**weights, "overlong": 1.0}
    metas, prompts, key = experience.metas, experience.prompts, "algorithm.gdpo_rewards"
    if not recipe.algorithm.gdpo_rewards:
        # An environment may give no `score` and no `group`.
        given = {name for meta in metas if isinstance(meta.score, Score) for name in meta.score.parts}
        weights = {name: weight for name, weight in weights.items() if name in given or name not in ENVIRONMENT_PARTS}
    return tuple(
        (weight, torch.tensor([reward_part(meta, prompts, name, key) for meta in metas]))
        for name, weight in weights.items()
    )


def _batch_metrics(
    experience: Experience,
    rewards_K: torch.Tensor,
    advantages_K: torch.Tensor,
    returns_K: torch.Tensor,
    values_K: torch.Tensor | None,
) -> dict[str, float]:
    reduce = experience.reduce
    rewards_S = reduce.sum_by(rewards_K.double(), experience.sequence_K, experience.sequences)
    metrics = {
        **_spread("critic/score", experience.scores_S, SINGLE_PROCESS),
        **_spread("critic/rewards", rewards_S, SINGLE_PROCESS),
        **_spread("critic/advantages", advantages_K, reduce),
        **_spread("critic/returns", returns_K, reduce),
    }
    mixed = experience.group_S[informative(experience.scores_S, experience.group_S)].unique()
    metrics["critic/mixed_groups"] = len(mixed) / len(experience.group_S.unique())
    if values_K is not None:
        metrics |= _spread("critic/values", values_K, reduce)
        metrics |= _explained_variance(returns_K, values_K, reduce)
    return metrics


def _explained_variance(returns_K: torch.Tensor, values_K: torch.Tensor, reduce: StepReduce) -> dict[str, float]:
    """Returns the metric 1 - Var(return - value) / Var(return), or an empty dict if all returns are equal up to
    rounding. Returns are sums in fp32, so their rounding error is proportional to the largest return or value."""
    unexplained, total = _variance(returns_K - values_K, reduce), _variance(returns_K, reduce)
    scale = max(reduce.max(returns_K.abs()), reduce.max(values_K.abs()))
    return {"critic/vf_explained_var": 1 - unexplained / total} if total > (ROUNDING * scale) ** 2 else {}


def _variance(values_K: torch.Tensor, reduce: StepReduce) -> float:
    centred_K = values_K.double() - reduce.mean(values_K)
    return reduce.mean(centred_K.square())


def _spread(name: str, values: torch.Tensor, reduce: StepReduce) -> dict[str, float]:
    return {
        f"{name}/mean": reduce.mean(values),
        f"{name}/max": reduce.max(values),
        f"{name}/min": -reduce.max(-values),
    }


def next_coefficient(recipe: Recipe, beta: float, metrics: dict[str, float], sequences: int) -> float:
    """Returns the KL coefficient of the next step, given the number of responses of this step (`sequences`). Adds the
    current coefficient to the metrics."""
    kl = recipe.algorithm.kl
    if kl.where == "none":
        return beta
    metrics["actor/kl_coef"] = beta
    measured = metrics.get("actor/kl" if kl.where == "loss" else "actor/reward_kl_penalty")
    if kl.target is None or measured is None:  # a critic warm-up step has no policy metrics
        return beta
    return adapt_coefficient(beta, measured, kl.target, kl.horizon, sequences)
