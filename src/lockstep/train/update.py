"""The updates of a step: the policy on its loss, the critic on the returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.algorithms.reduce import aggregation_weights
from lockstep.recipe import Recipe
from lockstep.run.metrics import PhaseTimer
from lockstep.train.advantages import TrainBatch
from lockstep.train.logprobs import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.optim import learning_rate
from lockstep.train.update_terms import (
    PolicyLoss,
    combine_updates,
    make_policy_loss,
    policy_metrics,
    refuse_disagreement,
    select_tokens,
    update_critic,
)


def update(
    plans: Sequence[UpdatePlan],
    learned: TrainBatch,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    step: int,
    steps: int,
    phases: PhaseTimer,
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
    return combine_updates(done)


def update_policy(
    plan: UpdatePlan,
    learned: TrainBatch,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    lr: float,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """One optimizer step of the policy on a part of the experience."""
    algorithm, tokens = recipe.algorithm, plan.tokens
    experience, known, advantages = learned.experience, learned.outputs, learned.advantages
    sequence_K = experience.sequence_K[tokens] - plan.responses.start
    sequences, whole = plan.responses.stop - plan.responses.start, experience.reduce
    repeats_S = None if advantages.repeats_S is None else advantages.repeats_S[plan.responses]
    counted = sequence_K, advantages.keep_K[tokens], sequences, recipe.rollout.max_tokens, repeats_S, whole
    loss_weights_K, divisor = aggregation_weights(algorithm.aggregation, *counted)
    penalty_K = loss_weights_K
    if algorithm.penalty_aggregation is not None:
        weights_K, own = aggregation_weights(algorithm.penalty_aggregation, *counted)
        penalty_K = weights_K * (divisor / own)
    loss = PolicyLoss(
        algorithm,
        make_policy_loss(algorithm),
        models.device,
        kl_coefficient,
        sequence_K=sequence_K,
        advantages_K=advantages.advantages_K[tokens],
        loss_weights_K=loss_weights_K,
        penalty_K=penalty_K,
        is_weights_K=advantages.is_weights_K[tokens],
        rollout_logprobs_K=experience.rollout_logprobs_K[tokens],
        old_K=None if known.old_K is None else known.old_K[tokens],
        reference_K=None if known.reference_K is None else known.reference_K[tokens],
        selected_K=select_tokens(algorithm, learned, plan, seed),
    )
    batches = [replace(batch, token_grads=loss.token_grads(batch)) for batch in plan.batches]
    outcome = models.trained.forward_backward(batches, loss, divisor)
    metrics = policy_metrics(outcome, divisor, float(whole.count(int((loss_weights_K > 0).sum()))))
    refuse_disagreement(metrics, recipe.rollout.max_probs_diff)
    return metrics | models.trained.optim_step(lr)
