"""Process reward models: the score of each solution step is the probability of a label token after the step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from lockstep.algorithms.token_losses import good_probability, step_loss
from lockstep.data.dataset import OpenRows
from lockstep.data.encode.step_rows import StepRows
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Plain, Task
from lockstep.model.resolve import image_folder
from lockstep.recipe import Recipe
from lockstep.reward.process_model import PROCESS
from lockstep.types import MicroBatch, StepLabels, Sums


def reader(recipe: Recipe) -> OpenRows[StepLabels]:
    images = image_folder(recipe.model)
    return partial(StepRows, placeholder=recipe.prm.placeholder, tokens=recipe.prm.tokens, images=images)


def files(recipe: Recipe) -> dict[str, str]:
    """Returns a file with the label tokens. Users of the exported model need this file."""
    return {PROCESS: json.dumps(recipe.prm.model_dump(), ensure_ascii=False, indent=2)}


def scores(items: Sequence[StepLabels], models: MethodModels) -> list[dict[str, Any]]:
    """Returns for each row the probability that each of its steps is good, and the labels of the steps."""
    lines = []
    logprobs_K = models.logprobs(models.arrange(items))
    for item, share in zip(items, logprobs_K.split([item.example.targets for item in items]), strict=True):
        good = good_probability(share.view(len(item.labels), -1)).tolist()
        lines.append({"row": str(item.origin), "steps": good, "labels": [label[0] for label in item.labels]})
    return lines


class Stepwise(Plain):
    names: ClassVar = {"accuracy": "step_accuracy"}

    def __init__(self, recipe: Recipe):
        self.label_tokens = len(recipe.prm.tokens)

    def task(self, update: Update[StepLabels], models: MethodModels) -> Task:
        # Each labelled position has all label tokens as targets, in the order of `prm.tokens`.
        labels_K = torch.tensor([p for item in update.items for label in item.labels for p in label])

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            logprobs = scores.logprobs_K
            labels = labels_K[batch.index_K].to(logprobs.device)
            return step_loss(logprobs.view(-1, self.label_tokens), labels.view(-1, self.label_tokens))

        return Task(update.batches, loss, update.targets / self.label_tokens, self.label_tokens)
