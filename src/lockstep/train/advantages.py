"""From scores to advantages: KL in the reward, the estimator, rollout correction, and the KL coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.advantage import Estimate, Signals, Whitening, informative
from lockstep.algorithms.correction import Band, Corrected, correct
from lockstep.algorithms.divergence import adapted, divergence
from lockstep.algorithms.reduce import EVERYTHING, WholeStep, sum_by
from lockstep.algorithms.token_selection import drawn_times
from lockstep.algorithms.user_functions import estimator
from lockstep.functions import is_function_path
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Algorithm, RolloutCorrection
from lockstep.recipe.registry import estimator_row
from lockstep.reward.scorer import active_weights
from lockstep.run.runtime import generator_of
from lockstep.train.experience import Experience, part_of
from lockstep.train.logprobs import Annotated

# From scores to advantages: the divergence in the reward, the estimator, and the correction of rollouts.

# Relative error of a return: single precision, added up over a response.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Advantages:
    """For every token of a step that is here. `keep_K` is 0 for tokens that are left out of the loss, `importance_K`
    their weight otherwise; `times_S` is how often a response of the step counts, where that is not once."""

    rewards_K: torch.Tensor
    advantages_K: torch.Tensor
    returns_K: torch.Tensor
    keep_K: torch.Tensor
    importance_K: torch.Tensor
    metrics: dict[str, float]
    times_S: torch.Tensor | None = None


@dataclass(frozen=True)
class Learned:
    """What the updates of a step learn from: its responses, what the models said of them, and their advantages."""

    experience: Experience
    known: Annotated
    advantages: Advantages


def estimate_advantages(
    experience: Experience, known: Annotated, recipe: Recipe, kl_coefficient: float, seed: tuple[int, ...] = (0,)
) -> Advantages:
    """`seed` is of what is drawn: which responses count how often."""
    algorithm, sequence_K, whole = recipe.algorithm, experience.sequence_K, experience.whole
    metrics: dict[str, float] = {}
    # What was not earned at a step of the response is earned at its end.
    earned_S = sum_by(experience.earned_K, sequence_K, experience.sequences)
    rewards_K = experience.earned_K.clone()
    rewards_K[experience.last_K] += (experience.scores_S - earned_S)[list(experience.numbers)]
    kl, taken_off_K = algorithm.kl, None
    if kl.in_reward():
        assert known.old_K is not None
        assert known.reference_K is not None
        alone = kl.where == "reward"
        kl_K = divergence(kl.estimator if alone else kl.reward_estimator, known.old_K, known.reference_K)
        penalty_K = (kl_coefficient if alone else kl.reward_coefficient) * kl_K
        if kl.before_baseline or not estimator_row(algorithm.advantage).groups:
            rewards_K -= penalty_K
        else:
            taken_off_K = penalty_K
        metrics["actor/reward_kl_penalty"] = whole.mean(kl_K)
    corrected = _corrected(experience, known, algorithm.rollout_correction)
    keep_K, importance_K = corrected.keep_K, corrected.weights_K
    metrics |= corrected.metrics
    if algorithm.overlong.mask_truncated:
        cut_S = torch.tensor([summary.stop == "length" for summary in experience.summaries])
        keep_K = torch.where(cut_S[sequence_K], 0.0, keep_K)
        metrics["response/skipped_ratio"] = float(cut_S.double().mean())
    signals = Signals(
        rewards_K,
        sequence_K,
        experience.group_S,
        known.values_K,
        experience.baseline_S,
        Whitening(**algorithm.whiten.model_dump()),
        _energy(known, importance_K),
        _parts(experience, recipe) if estimator_row(algorithm.advantage).parts else (),
        taken_off_K,
        whole,
    )
    estimate = _estimate(experience, signals, algorithm)
    times_S = None
    if algorithm.pf_ppo.method != "none":
        # Every rank knows all scores, and draws the same.
        times_S = drawn_times(experience.scores_S, **algorithm.pf_ppo.model_dump(), generator=generator_of(seed))
        metrics["actor/filtered_share"] = float((times_S == 0).double().mean())
    rewards_K = rewards_K if taken_off_K is None else rewards_K - taken_off_K
    metrics |= _described(experience, rewards_K, estimate.advantages_K, estimate.returns_K, known.values_K)
    return Advantages(rewards_K, estimate.advantages_K, estimate.returns_K, keep_K, importance_K, metrics, times_S)


def _estimate(experience: Experience, signals: Signals, algorithm: Algorithm) -> Estimate:
    advantage = estimator(algorithm.advantage, algorithm.function_timeout)
    given = {"gamma": algorithm.gamma, "lam": algorithm.lam}
    if not is_function_path(algorithm.advantage) or experience.world.size == 1:
        return advantage(signals, **given)

    # A function of the user's sees the whole step, as in one process; a rank keeps the numbers of its own tokens.
    def every(vector_K: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector_K is None else experience.everywhere(vector_K)

    everything = replace(
        signals,
        rewards_K=experience.everywhere(signals.rewards_K),
        sequence_K=torch.repeat_interleave(torch.arange(experience.sequences), experience.written_S),
        values_K=every(signals.values_K),
        energy_K=every(signals.energy_K),
        taken_off_K=every(signals.taken_off_K),
        whole=EVERYTHING,
    )
    found = advantage(everything, **given)
    own = experience.places_of(slice(0, experience.sequences))
    return Estimate(found.advantages_K[own], found.returns_K[own])


def _corrected(experience: Experience, known: Annotated, settings: RolloutCorrection) -> Corrected:
    """What rollout correction leaves of the tokens; all of them where it is off."""
    if not settings.compares:
        whole_K = torch.ones(len(experience.sequence_K))
        return Corrected(whole_K, whole_K)
    trainer_K = known.trainer_K if settings.bypass else known.old_K
    assert trainer_K is not None
    keys = settings.model_dump(exclude={"bypass", "reject"})
    bands = [Band(**band.model_dump()) for band in settings.reject]
    engine_K, sequence_K, sequences = experience.engine_K, experience.sequence_K, experience.sequences
    return correct(trainer_K, engine_K, sequence_K, sequences, **keys, reject=bands, whole=experience.whole)


def _energy(known: Annotated, importance_K: torch.Tensor) -> torch.Tensor | None:
    """The squared gradient of each token's log-probability by the logits, as it enters the loss."""
    if known.squares_K is None:
        return None
    own_K = known.old_K if known.trainer_K is None else known.trainer_K
    assert own_K is not None
    return (1 - 2 * own_K.exp() + known.squares_K) * importance_K.square()


def _parts(experience: Experience, recipe: Recipe) -> tuple[tuple[float, torch.Tensor], ...]:
    """The rewards one by one: those that the recipe names, else all that count in the score."""
    weights = recipe.algorithm.gdpo_rewards or active_weights(recipe.reward)[0]
    if recipe.algorithm.overlong.buffer and not recipe.algorithm.gdpo_rewards:
        weights = {**weights, "overlong": 1.0}
    summaries, prompts, key = experience.summaries, experience.prompts, "algorithm.gdpo_rewards"
    return tuple(
        (weight, torch.tensor([part_of(summary, prompts, name, key) for summary in summaries]))
        for name, weight in weights.items()
    )


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
        metrics |= _explained_variance(returns_K, values_K, whole)
    return metrics


def _explained_variance(returns_K: torch.Tensor, values_K: torch.Tensor, whole: WholeStep) -> dict[str, float]:
    """1 - Var(return - value) / Var(return); undefined, and left out, where the returns are the same but for rounding.

    A return is a sum of rewards and values in single precision: its rounding error grows with the largest of them.
    """
    unexplained, total = _variance(returns_K - values_K, whole), _variance(returns_K, whole)
    scale = max(whole.greatest(returns_K.abs()), whole.greatest(values_K.abs()))
    return {"critic/vf_explained_var": 1 - unexplained / total} if total > (ROUNDING * scale) ** 2 else {}


def _variance(values_K: torch.Tensor, whole: WholeStep) -> float:
    centred_K = values_K.double() - whole.mean(values_K)
    return whole.mean(centred_K.square())


def _spread(name: str, values: torch.Tensor, whole: WholeStep) -> dict[str, float]:
    return {
        f"{name}/mean": whole.mean(values),
        f"{name}/max": whole.greatest(values),
        f"{name}/min": -whole.greatest(-values),
    }


# The weight of the divergence from the reference, from one step to the next.


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
