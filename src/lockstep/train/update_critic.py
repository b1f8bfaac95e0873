"""An update of the critic: its values on the returns."""

from __future__ import annotations

import torch

from lockstep.algorithms.reduce import aggregation_weights
from lockstep.algorithms.token_losses import value_loss
from lockstep.device.base import sent
from lockstep.recipe import Recipe
from lockstep.train.advantages import Learned
from lockstep.train.annotate import UpdatePlan
from lockstep.train.models import Models
from lockstep.train.update_metrics import per_kept
from lockstep.types import MicroBatch, Sums


def update_critic(plan: UpdatePlan, learned: Learned, models: Models, recipe: Recipe, lr: float) -> dict[str, float]:
    """One optimizer step of the critic on a part of the experience."""
    values_K, advantages = learned.known.values_K, learned.advantages
    assert models.critic is not None
    assert values_K is not None
    tokens, clip = plan.tokens, recipe.critic.clip
    old_K, returns_K, keep_K = values_K[tokens], advantages.returns_K[tokens], advantages.keep_K[tokens]
    sequence_K = learned.experience.sequence_K[tokens] - plan.responses.start
    sequences, whole = plan.responses.stop - plan.responses.start, learned.experience.whole
    times_S = None if advantages.times_S is None else advantages.times_S[plan.responses]
    average_K, divisor = aggregation_weights(
        recipe.critic.aggregation, sequence_K, keep_K, sequences, recipe.rollout.max_tokens, times_S, whole
    )

    def loss(values_K: torch.Tensor, batch: MicroBatch) -> Sums:
        old, returns, average = (sent(vector[batch.own_K], models.device) for vector in (old_K, returns_K, average_K))
        return value_loss(values_K, old, returns, average, clip=clip)

    kept = float(whole.count(int((average_K > 0).sum())))
    outcome = models.critic.forward_backward(plan.batches, loss, divisor)
    names = {"vf_clipfrac": "critic/vf_clipfrac", "vpred": "critic/vpred_mean"}
    return {
        "critic/vf_loss": outcome.loss,
        **{names[name]: value for name, value in per_kept(outcome.sums, kept).items()},
        **models.critic.optim_step(lr),
    }
