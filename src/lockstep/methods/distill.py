"""Knowledge distillation: the loss mixes the divergence from the teacher at each target token with the NLL."""

from __future__ import annotations

from lockstep.algorithms.token_losses import nll
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Plain, Task
from lockstep.recipe import Recipe
from lockstep.types import Example, MicroBatch, Sums


class Distilled(Plain):
    def __init__(self, recipe: Recipe):
        self.coefficient = recipe.distill.coefficient

    def task(self, update: Update[Example], models: MethodModels) -> Task:
        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            assert scores.divergences_K is not None
            likelihood, divergence = nll(scores.logprobs_K).loss, scores.divergences_K.sum()
            return Sums(
                (1 - self.coefficient) * likelihood + self.coefficient * divergence,
                {"nll": likelihood.detach(), "divergence": divergence.detach()},
            )

        return Task(models.with_teacher(update), loss, update.targets)
