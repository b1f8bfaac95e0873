"""The updates of a step: the policy on its loss, the critic on the returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms.kl import divergence
from lockstep.algorithms.policy import PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.device.transfer import sent
from lockstep.kernels.logprob import Scores
from lockstep.recipe import Recipe
from lockstep.recipe.online import Algorithm
from lockstep.run.metrics import PhaseTimer
from lockstep.train.advantages import Learned
from lockstep.train.annotate import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.optim import learning_rate
from lockstep.train.policy_loss import held_tokens, loss_of
from lockstep.train.update_critic import update_critic
from lockstep.train.update_metrics import over_updates, policy_metrics, refuse_disagreement
from lockstep.types import MicroBatch, Sums


def update(
    plans: Sequence[UpdatePlan],
    learned: Learned,
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
    return over_updates(done)


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
    loss = PolicyLoss(
        algorithm,
        loss_of(algorithm),
        models.device,
        kl_coefficient,
        sequence_K=sequence_K,
        advantages_K=advantages.advantages_K[tokens],
        average_K=average_K,
        importance_K=advantages.importance_K[tokens],
        engine_K=experience.engine_K[tokens],
        old_K=None if known.old_K is None else known.old_K[tokens],
        reference_K=None if known.reference_K is None else known.reference_K[tokens],
        held_K=held_tokens(algorithm, learned, tokens, seed),
    )
    outcome = models.trained.forward_backward(plan.batches, loss, divisor)
    metrics = policy_metrics(outcome, divisor, float((average_K > 0).sum()))
    refuse_disagreement(metrics, recipe.rollout.max_probs_diff)
    return metrics | models.trained.optim_step(lr)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a micro-batch, which finds its tokens in the vectors of the update."""

    algorithm: Algorithm
    policy_loss: Callable[[PolicyTokens], Sums]
    device: torch.device
    kl_coefficient: float
    sequence_K: torch.Tensor
    advantages_K: torch.Tensor
    average_K: torch.Tensor
    importance_K: torch.Tensor
    engine_K: torch.Tensor
    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    held_K: torch.Tensor | None

    def __call__(self, scores: Scores, batch: MicroBatch) -> Sums:
        def take(vector: torch.Tensor) -> torch.Tensor:
            return sent(vector[batch.index_K], self.device)

        logprobs, average = scores.logprobs_K, take(self.average_K)
        old = logprobs.detach() if self.old_K is None else take(self.old_K)
        held = None if self.held_K is None else take(self.held_K)
        weights = average * take(self.importance_K)
        local = sent(torch.unique_consecutive(self.sequence_K[batch.index_K], return_inverse=True)[1], self.device)
        sums = self.policy_loss(PolicyTokens(logprobs, old, take(self.advantages_K), weights, local, held))
        loss, metrics = sums.loss, {**sums.metrics, "pg_loss": sums.loss}
        if self.old_K is None:
            del metrics["ppo_kl"]  # 0 by definition
        if self.algorithm.kl.where == "loss" and self.reference_K is not None:
            kl, kl_metrics = self._divergence(logprobs, take(self.reference_K), average)
            loss, metrics = loss + self.kl_coefficient * kl, metrics | kl_metrics
        if scores.entropies_K is not None:
            entropies = torch.where(average > 0, scores.entropies_K, 0.0)
            if self.algorithm.entropy:
                loss = loss - self.algorithm.entropy * (average * entropies).sum()
            metrics["entropy"] = entropies.sum()
        # The first update of a step compares what the engine said with what the trainer says of the same weights: over
        # all tokens, since those that disagree most are left out of everything else.
        difference = (old.exp() - take(self.engine_K).exp()).abs()
        metrics |= {"probs_diff": difference.sum(), "probs_diff_squared": difference.square().sum()}
        largest = difference.max() if len(difference) else difference.new_zeros(())
        return Sums(loss, metrics, {"probs_diff": largest})

    def _divergence(
        self, logprobs: torch.Tensor, reference: torch.Tensor, average: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From the reference: as averaged in the loss, and in the metrics also per token whatever the aggregation."""
        # Zero times the infinity of a token that is left out would be NaN, in the sum or in its gradient.
        kept = average > 0
        own_K, reference_K = torch.where(kept, logprobs, 0.0), torch.where(kept, reference, 0.0)
        kl_K = divergence(self.algorithm.kl.estimator, own_K, reference_K)
        kl = (average * kl_K).sum()
        return kl, {"kl_loss": kl, "kl": kl_K.sum()}
