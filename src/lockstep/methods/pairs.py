"""Pairs of responses: DPO and its family, with and without a reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from lockstep.algorithms.preference import REFERENCE_FREE, Pairs, preference_loss
from lockstep.algorithms.reduce import sum_by
from lockstep.data.dataset import Dataset, load_rows
from lockstep.data.preferences import RankingRows
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Plain, Reader, Task
from lockstep.recipe import Recipe
from lockstep.types import MicroBatch, Ranking, Sums


def reader(recipe: Recipe) -> Reader[Ranking]:
    return partial(load_rows, Dataset, partial(RankingRows, read="response", several=False))


def scores(items: Sequence[Ranking], models: MethodModels) -> list[dict[str, Any]]:
    """Of each response its log-prob over the reference's, summed; without a reference, averaged."""
    update = models.arrange(items)
    scores_S = _sums(update, models.logprobs(update))
    if models.reference is not None:
        scores_S = scores_S - _sums(update, models.reference_logprobs(update))
    else:
        scores_S = scores_S / update.lengths_S
    shares = scores_S.split([len(item.examples) for item in items])
    return [{"row": str(item.origin), "scores": share.tolist()} for item, share in zip(items, shares, strict=True)]


def _sums(update: Update[Any], values_K: torch.Tensor) -> torch.Tensor:
    return sum_by(values_K, update.sequence_K, len(update.examples))


class Pairwise(Plain):
    names: ClassVar = {"accuracy": "pair_accuracy"}

    def __init__(self, recipe: Recipe):
        settings = recipe.preference
        self.free = settings.loss in REFERENCE_FREE
        self.keys = settings.model_dump(include={"beta", "label_smoothing", "gamma", "average", "nll"})
        self.kind = settings.loss

    def task(self, update: Update[Ranking], models: MethodModels) -> Task:
        reference_S = None
        if not self.free:
            reference_S = _sums(update, models.reference_logprobs(update))

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            policy = scores.logprobs_K
            sequences, local_K = update.sequences_of(batch)
            # A micro-batch holds its pairs whole, the chosen response before the rejected one.
            chosen, rejected = _two(sum_by(policy, local_K.to(policy.device), len(sequences)))
            lengths = _two(update.lengths_S[sequences].to(policy.device))
            known = (None, None) if reference_S is None else _two(reference_S[sequences].to(policy.device))
            return preference_loss(Pairs(chosen, rejected, *lengths, *known), kind=self.kind, **self.keys)

        return Task(update.batches, loss, len(update.items))

    def start(self) -> float | None:
        nothing, one = torch.zeros(1), torch.ones(1)
        if self.free:
            return None
        alike = Pairs(nothing, nothing, one, one, nothing, nothing)
        return float(preference_loss(alike, kind=self.kind, **{**self.keys, "nll": 0.0}).loss)


def _two(values_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values_S[0::2], values_S[1::2]
