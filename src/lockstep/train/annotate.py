"""What the models say of a step's responses before the first update: log-probs and values, where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.recipe import Recipe
from lockstep.recipe.rows import loss_row
from lockstep.recipe.schema import Batch
from lockstep.run.metrics import PhaseTimer
from lockstep.train.experience import Experience
from lockstep.train.models import Models
from lockstep.types import MicroBatch


@dataclass(frozen=True)
class UpdatePlan:
    """The responses of one optimizer step, this rank's share of them in micro-batches."""

    responses: slice
    tokens: slice
    batches: list[MicroBatch]

    @property
    def targets(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class Annotated:
    """For every token of a step; what a recipe does not use is None."""

    old_K: torch.Tensor | None
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None


def plan_updates(experience: Experience, models: Models, batch: Batch) -> list[UpdatePlan]:
    """The step cut into optimizer steps by prompts, each packed by itself, a prompt once before its responses.

    Old and new log-probs come from the same micro-batches, so that their ratio is exactly 1 before an update.
    """
    each = batch.prompts_per_update or batch.prompts
    plans = []
    for first in range(0, batch.prompts, each):
        responses = experience.of_prompts(first, first + each)
        groups = experience.groups(responses)
        if groups:
            batches = models.arrange_groups(groups)
            plans.append(UpdatePlan(responses, experience.tokens_of(responses), batches))
    return plans


def old_needed(recipe: Recipe, updates: int) -> bool:
    """With one update a step the old log-probs are the current ones, unless something before it needs them."""
    algorithm = recipe.algorithm
    corrected = algorithm.correction.weight != "none" or algorithm.correction.mask != "none"
    in_reward = algorithm.kl.in_reward()
    chosen_before = loss_row(algorithm.loss).held is not None
    return updates * algorithm.epochs > 1 or corrected or in_reward or chosen_before


def annotate(plans: Sequence[UpdatePlan], models: Models, recipe: Recipe, phases: PhaseTimer) -> Annotated:
    old_K = reference_K = values_K = None
    if old_needed(recipe, len(plans)):
        with phases("old_log_prob"):
            old_K = torch.cat([models.logprobs(plan) for plan in plans])
    if recipe.algorithm.kl.where != "none":
        with phases("ref"):
            reference_K = torch.cat([models.reference_logprobs(plan) for plan in plans])
    if models.critic is not None:
        with phases("values"):
            values_K = torch.cat([models.values(plan) for plan in plans])
    return Annotated(old_K, reference_K, values_K)
