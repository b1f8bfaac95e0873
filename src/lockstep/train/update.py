"""The optimizer updates of a step, for the policy and the critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.algorithms.reduce import aggregation_weights
from lockstep.recipe import Recipe
from lockstep.run.metrics import PhaseTimer
from lockstep.train import update_terms as terms
from lockstep.train.advantages import TrainBatch
from lockstep.train.experience import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.optim import update_rates


def update(
    plans: Sequence[UpdatePlan],
    batch: TrainBatch,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    step: int,
    steps: int,
    phases: PhaseTimer,
) -> dict[str, float]:
    """Runs all updates of a step. Metrics are means over the updates; names that end in `_max` have the maximum."""
    rates = update_rates(step, steps, recipe.algorithm.epochs * len(plans), recipe.optim, recipe.critic.lr)
    done: list[dict[str, float]] = []
    for epoch in range(recipe.algorithm.epochs):
        for number, plan in enumerate(plans):
            metrics: dict[str, float] = {}
            rate, critic_rate = rates[len(done)]
            if models.critic is not None:
                with phases("update_critic"):
                    metrics |= terms.update_critic(plan, batch, models, recipe, critic_rate)
            if models.critic is None or step >= recipe.critic.warmup:
                seed = (recipe.run.seed, step, epoch, number)
                with phases("update_actor"):
                    metrics |= update_policy(plan, batch, models, recipe, kl_coefficient, rate, seed)
            done.append(metrics)
    return terms.combine_updates(done)


def update_policy(
    plan: UpdatePlan,
    batch: TrainBatch,
    models: Models,
    recipe: Recipe,
    kl_coefficient: float,
    lr: float,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """Performs one optimizer step of the policy on one mini-batch. Returns its metrics."""
    algorithm, tokens = recipe.algorithm, plan.tokens
    experience, outputs, advantages = batch.experience, batch.outputs, batch.advantages
    sequence_K = experience.sequence_K[tokens] - plan.responses.start
    sequences, reduce, counts = plan.responses.stop - plan.responses.start, experience.reduce, advantages.counts_masked
    repeats_S = None if advantages.repeats_S is None else advantages.repeats_S[plan.responses]
    counted = sequence_K, advantages.keep_K[tokens], sequences, recipe.rollout.max_tokens, repeats_S, reduce, counts
    loss_weights_K, divisor = aggregation_weights(algorithm.aggregation, *counted)
    penalty_K = loss_weights_K
    if algorithm.penalty_aggregation is not None:
        penalty_K, own_divisor = aggregation_weights(algorithm.penalty_aggregation, *counted)
        penalty_K = penalty_K * (divisor / own_divisor)
    loss = terms.PolicyLoss(
        algorithm,
        terms.make_policy_loss(algorithm),
        models.device,
        kl_coefficient,
        sequence_K=sequence_K,
        advantages_K=advantages.advantages_K[tokens],
        loss_weights_K=loss_weights_K,
        penalty_K=penalty_K,
        is_weights_K=advantages.is_weights_K[tokens],
        rollout_logprobs_K=experience.rollout_logprobs_K[tokens],
        old_K=None if outputs.old_K is None else outputs.old_K[tokens],
        reference_K=None if outputs.reference_K is None else outputs.reference_K[tokens],
        selected_K=terms.select_tokens(algorithm, batch, plan, seed),
    )
    micro_batches = [replace(one, token_grads=loss.token_grads(one)) for one in plan.batches]
    outcome = models.trained.forward_backward(micro_batches, loss, divisor)
    metrics = terms.policy_metrics(outcome, divisor, float(reduce.count(int((loss_weights_K > 0).sum()))))
    terms.refuse_disagreement(metrics, recipe.rollout.max_probs_diff)
    return metrics | models.trained.optim_step(lr)
