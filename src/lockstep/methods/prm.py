"""Process reward models: a verdict on each step of a solution, as the probability of a word after it."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch

from lockstep.algorithms.process import step_loss
from lockstep.data.dataset import Dataset, load_rows
from lockstep.data.steps import StepRows
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import Models, Plain, Reader, Task
from lockstep.recipe import Recipe
from lockstep.types import MicroBatch, Steps, Sums


def reader(recipe: Recipe) -> Reader[Steps]:
    return partial(load_rows, Dataset, partial(StepRows, placeholder=recipe.prm.placeholder, tokens=recipe.prm.tokens))


class Stepwise(Plain):
    names: ClassVar = {"accuracy": "step_accuracy"}

    def __init__(self, recipe: Recipe):
        self.judging = len(recipe.prm.tokens)

    def task(self, update: Update[Steps], models: Models) -> Task:
        # The targets are every judging token at every position, so the labels in order stand beside them one for one.
        labels_K = torch.tensor([p for item in update.items for label in item.labels for p in label])

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            logprobs = scores.logprobs_K
            labels = labels_K[batch.index_K].to(logprobs.device)
            return step_loss(logprobs.view(-1, self.judging), labels.view(-1, self.judging))

        return Task(update.batches, loss, update.targets / self.judging)
