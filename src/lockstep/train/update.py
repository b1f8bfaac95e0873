"""The updates of a step: the policy on its loss, the critic on the returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from lockstep.algorithms import own
from lockstep.algorithms.covariance import HELD
from lockstep.algorithms.kl import divergence
from lockstep.algorithms.policy import PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.algorithms.value import value_loss
from lockstep.device.transfer import sent
from lockstep.errors import Refusal
from lockstep.kernels.logprob import Scores
from lockstep.recipe import Recipe
from lockstep.recipe.online import Algorithm
from lockstep.recipe.rows import loss_row
from lockstep.train.advantages import Advantages
from lockstep.train.annotate import Annotated, Phases, UpdatePlan
from lockstep.train.experience import Experience
from lockstep.train.models import Models
from lockstep.train.optim import learning_rate
from lockstep.train.step import Outcome
from lockstep.types import Loss, MicroBatch, Sums


def loss_of(algorithm: Algorithm) -> Callable[[PolicyTokens], Sums]:
    """The policy loss with the keys it reads."""
    return own.policy_loss(algorithm.loss, _keys(algorithm, loss_row(algorithm.loss).keys))


def _keys(algorithm: Algorithm, names: Mapping[str, str]) -> dict[str, Any]:
    return {argument: getattr(algorithm, key) for argument, key in names.items()}


@dataclass(frozen=True)
class Learned:
    """What the updates of a step learn from: its responses, what the models said of them, and their advantages."""

    experience: Experience
    known: Annotated
    advantages: Advantages


def update(
    plans: Sequence[UpdatePlan],
    learned: Learned,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    step: int,
    steps: int,
    phases: Phases,
) -> dict[str, float]:
    """Every optimizer step of a step of the run; metrics are means over them (of maxima, the largest)."""
    rate = learning_rate(step, steps, recipe.optim)
    critic_rate = learning_rate(step, steps, recipe.optim.model_copy(update={"lr": recipe.critic.lr}))
    done: list[dict[str, float]] = []
    for epoch in range(recipe.algorithm.epochs):
        for number, plan in enumerate(plans):
            metrics: dict[str, float] = {}
            if models.critic is not None:
                with phases("update_critic"):
                    metrics |= update_critic(plan, learned, models, recipe, critic_rate)
            if models.critic is None or step >= recipe.critic.warmup:
                seed = (recipe.run.seed, step, epoch, number)
                with phases("update_actor"):
                    metrics |= update_policy(plan, learned, models, recipe, kl_coefficient, rate, seed)
            done.append(metrics)
    names = dict.fromkeys(name for metrics in done for name in metrics)
    return {name: _over_updates(name, [metrics[name] for metrics in done if name in metrics]) for name in names}


def _over_updates(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def _per_kept(sums: dict[str, float], kept: float) -> dict[str, float]:
    """Sums over the kept tokens of an update as their means. An update that keeps none has no such number."""
    return {name: value / kept for name, value in sums.items()} if kept else {}


def update_policy(
    plan: UpdatePlan,
    learned: Learned,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    lr: float,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """One optimizer step of the policy on a part of the experience."""
    algorithm, tokens = recipe.algorithm, plan.tokens
    experience, known, advantages = learned.experience, learned.known, learned.advantages
    sequence_K = experience.sequence_K[tokens] - plan.responses.start
    sequences = plan.responses.stop - plan.responses.start
    average_K, divisor = aggregation_weights(
        algorithm.aggregation, sequence_K, advantages.keep_K[tokens], sequences, recipe.rollout.max_tokens
    )
    loss = _policy_loss(
        algorithm,
        models.device,
        kl_coefficient,
        sequence_K=sequence_K,
        advantages_K=advantages.advantages_K[tokens],
        average_K=average_K,
        importance_K=advantages.importance_K[tokens],
        engine_K=experience.engine_K[tokens],
        old_K=None if known.old_K is None else known.old_K[tokens],
        reference_K=None if known.reference_K is None else known.reference_K[tokens],
        held_K=_held(algorithm, learned, tokens, seed),
    )
    outcome = models.trained.forward_backward(plan.batches, loss, divisor)
    metrics = _policy_metrics(outcome, divisor, float((average_K > 0).sum()))
    refuse_disagreement(metrics, recipe.rollout.max_probs_diff)
    return metrics | models.trained.optim_step(lr)


def _policy_loss(
    algorithm: Algorithm,
    device: torch.device,
    kl_coefficient: float,
    *,
    sequence_K: torch.Tensor,
    advantages_K: torch.Tensor,
    average_K: torch.Tensor,
    importance_K: torch.Tensor,
    engine_K: torch.Tensor,
    old_K: torch.Tensor | None,
    reference_K: torch.Tensor | None,
    held_K: torch.Tensor | None,
) -> Loss:
    """The loss of a micro-batch, which finds its tokens in the vectors of the update."""
    policy_loss = loss_of(algorithm)

    def of_batch(scores: Scores, batch: MicroBatch) -> Sums:
        def take(vector: torch.Tensor) -> torch.Tensor:
            return sent(vector[batch.index_K], device)

        logprobs, average = scores.logprobs_K, take(average_K)
        # Zero times the infinity of a token that is left out would be NaN, in the sum or in its gradient.
        kept = average > 0
        now = logprobs.detach()
        old = now if old_K is None else take(old_K)
        held = None if held_K is None else take(held_K)
        weights = average * take(importance_K)
        local = sent(torch.unique_consecutive(sequence_K[batch.index_K], return_inverse=True)[1], device)
        sums = policy_loss(PolicyTokens(logprobs, old, take(advantages_K), weights, local, held))
        loss = sums.loss
        metrics = {**sums.metrics, "pg_loss": sums.loss}
        if old_K is None:
            del metrics["ppo_kl"]  # 0 by definition
        if algorithm.kl.where == "loss" and reference_K is not None:
            own_K, reference = torch.where(kept, logprobs, 0.0), torch.where(kept, take(reference_K), 0.0)
            kl_K = divergence(algorithm.kl.estimator, own_K, reference)
            kl = (average * kl_K).sum()
            loss = loss + kl_coefficient * kl
            # As averaged in the loss, and per token whatever the aggregation.
            metrics |= {"kl_loss": kl, "kl": kl_K.sum()}
        if scores.entropies_K is not None:
            entropies = torch.where(kept, scores.entropies_K, 0.0)
            if algorithm.entropy:
                loss = loss - algorithm.entropy * (average * entropies).sum()
            metrics["entropy"] = entropies.sum()
        # The first update of a step compares what the engine said with what the trainer says of the same weights: over
        # all tokens, since those that disagree most are left out of everything else.
        apart = (old.exp() - take(engine_K).exp()).abs()
        metrics |= {"probs_diff": apart.sum(), "probs_diff_squared": apart.square().sum()}
        largest = apart.max() if len(apart) else apart.new_zeros(())
        return Sums(loss, metrics, {"probs_diff": largest})

    return of_batch


def _held(algorithm: Algorithm, learned: Learned, tokens: slice, seed: tuple[int, ...]) -> torch.Tensor | None:
    """Tokens that the covariance losses hold back, chosen over the whole update."""
    held = loss_row(algorithm.loss).held
    if held is None:
        return None
    old_K, advantages = learned.known.old_K, learned.advantages
    assert old_K is not None
    vectors = old_K[tokens], advantages.advantages_K[tokens], advantages.keep_K[tokens]
    draw = torch.Generator().manual_seed(int.from_bytes(sha256(repr(seed).encode()).digest()[:7], "big"))
    return HELD[algorithm.loss](*vectors, **_keys(algorithm, held), generator=draw)


def _policy_metrics(outcome: Outcome, divisor: float, kept: float) -> dict[str, float]:
    """Terms of the loss as the loss averages them, the rest per kept token; engine against trainer per token."""
    sums, means = dict(outcome.sums), outcome.means()
    averaged = {name: sums.pop(name) / divisor for name in ("pg_loss", "kl_loss") if name in sums}
    del sums["probs_diff"], sums["probs_diff_squared"]
    variance = means["probs_diff_squared"] - means["probs_diff"] ** 2
    return {
        "actor/loss": outcome.loss,
        **{f"actor/{name}": value for name, value in averaged.items()},
        **{f"actor/{name}": value for name, value in _per_kept(sums, kept).items()},
        "training/rollout_probs_diff_mean": means["probs_diff"],
        "training/rollout_probs_diff_max": outcome.maxima["probs_diff"],
        "training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5,
    }


def refuse_disagreement(metrics: dict[str, float], most: float | None) -> None:
    """Stop before the update when engine and trainer see different models."""
    mean = metrics["training/rollout_probs_diff_mean"]
    if most is not None and mean > most:
        raise Refusal.at(
            "rollout.max_probs_diff",
            f"engine and trainer differ by {mean:.3g} in the probability of a token on average, over {most:g}",
            "use fp32 or the hf engine to find out which side is off, or set algorithm.correction; the last "
            "checkpoint is untouched",
        )


def update_critic(plan: UpdatePlan, learned: Learned, models: Models, recipe: Recipe, lr: float) -> dict[str, float]:
    """One optimizer step of the critic on a part of the experience."""
    values_K, advantages = learned.known.values_K, learned.advantages
    assert models.critic is not None
    assert values_K is not None
    tokens, clip = plan.tokens, recipe.critic.clip
    old_K, returns_K, keep_K = values_K[tokens], advantages.returns_K[tokens], advantages.keep_K[tokens]

    def loss(values_K: torch.Tensor, batch: MicroBatch) -> Sums:
        old, returns, keep = (sent(vector[batch.index_K], models.device) for vector in (old_K, returns_K, keep_K))
        return value_loss(values_K, old, returns, keep, clip=clip)

    kept = float((keep_K > 0).sum())
    outcome = models.critic.forward_backward(plan.batches, loss, max(kept, 1.0))
    names = {"vf_clipfrac": "critic/vf_clipfrac", "vpred": "critic/vpred_mean"}
    return {
        "critic/vf_loss": outcome.loss,
        **{names[name]: value for name, value in _per_kept(outcome.sums, kept).items()},
        **models.critic.optim_step(lr),
    }
