"""Supervised fine-tuning: the loss is the negative log-likelihood of the target tokens."""

from __future__ import annotations

from functools import partial

from lockstep.algorithms.token_losses import nll
from lockstep.data.dataset import OpenRows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Plain, Task
from lockstep.model.resolve import image_folder
from lockstep.recipe import Recipe
from lockstep.types import Example, MicroBatch, Sums


def reader(recipe: Recipe) -> OpenRows[Example]:
    return partial(SupervisedRows, images=image_folder(recipe.model))


class Supervised(Plain):
    def __init__(self, recipe: Recipe):
        pass

    def task(self, update: Update[Example], models: MethodModels) -> Task:
        return Task(update.batches, token_loss, update.targets)


def token_loss(scores: Scores, batch: MicroBatch) -> Sums:
    return nll(scores.logprobs_K)
