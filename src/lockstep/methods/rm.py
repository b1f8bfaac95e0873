"""Reward models give one score per text, and are trained on ranked responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.algorithms.ranking import ranking_loss
from lockstep.data.dataset import OpenRows
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.updates import Update
from lockstep.methods.base import MethodModels, Task
from lockstep.model.resolve import image_folder
from lockstep.recipe import Recipe
from lockstep.types import MicroBatch, Ranking, Sums


def reader(recipe: Recipe) -> OpenRows[Ranking]:
    return partial(RankingRows, read="score", several=True, images=image_folder(recipe.model))


def scores(items: Sequence[Ranking], models: MethodModels) -> list[dict[str, Any]]:
    """Returns the reward model's score of each response."""
    update = models.arrange(items)
    shares = models.scores(update).split([len(item.examples) for item in items])
    return [{"row": str(item.origin), "scores": share.tolist()} for item, share in zip(items, shares, strict=True)]


class Ranked:
    def __init__(self, recipe: Recipe):
        self.kind, self.ranking, self.centre = recipe.rm.loss, recipe.rm.ranking, recipe.rm.center_rewards_coef

    def task(self, update: Update[Ranking], models: MethodModels) -> Task:
        margins_R = torch.tensor([item.margin for item in update.items])

        def loss(scores_S: torch.Tensor, batch: MicroBatch) -> Sums:
            # One target per sequence.
            rankings, local_S = torch.unique_consecutive(update.item_S[batch.index_K], return_inverse=True)
            device = scores_S.device
            sums = ranking_loss(
                scores_S,
                local_S.to(device),
                margins_R[rankings].to(device),
                kind=self.kind,
                ranking=self.ranking,
                centre=self.centre,
            )
            scores = scores_S.detach()
            count = scores.new_tensor(len(scores))
            sums.metrics |= {"scores": count, "score": scores.sum(), "score_squared": scores.square().sum()}
            return sums

        return Task(update.batches, loss, len(update.items))

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        count = sums["scores"]
        mean = sums["score"] / count
        deviation = max(sums["score_squared"] / count - mean * mean, 0.0) ** 0.5
        return {
            "pair_accuracy": sums["accuracy"] / divisor,
            **{name: sums[name] / divisor for name in ("margin", "chosen", "rejected")},
            "score_mean": mean,
            **({"score_std": deviation} if count > 1 else {}),
        }

    def initial_loss(self) -> float | None:
        return None
