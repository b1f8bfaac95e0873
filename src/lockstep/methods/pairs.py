"""Preference losses on pairs of responses (DPO and variants), with and without a reference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from lockstep.algorithms import preference as transport
from lockstep.algorithms.preference import (
    RANKED,
    REFERENCE_FREE,
    Pairs,
    Partners,
    preference_loss,
    shared_length_weights,
)
from lockstep.algorithms.reduce import sum_by
from lockstep.data.dataset import OpenRows
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.updates import Update
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Plain, Task
from lockstep.model.resolve import image_folder
from lockstep.recipe import Recipe
from lockstep.types import MicroBatch, Ranking, Sums


def reader(recipe: Recipe) -> OpenRows[Ranking]:
    return partial(RankingRows, read="response", several=False, images=image_folder(recipe.model))


def scores(items: Sequence[Ranking], models: MethodModels) -> list[dict[str, Any]]:
    """Returns the score of each response: its summed log-ratio to the reference model. Without a reference model the
    score is the mean log-prob."""
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
        self.keys = settings.model_dump(
            include={"beta", "label_smoothing", "gamma", "discopop_tau", "divergence", "alpha", "average", "nll"}
        )
        self.kind, self.ld_alpha = settings.loss, settings.ld_alpha

    def task(self, update: Update[Ranking], models: MethodModels) -> Task:
        weights_K = self._weights(update)
        reference_S = partners = None
        if not self.free:
            reference_S = _sums(update, _weighed(models.reference_logprobs(update), weights_K))
        if self.kind in RANKED:
            assert reference_S is not None
            # The AOT losses sort the scores of the whole update. So the policy scores all pairs before the first
            # micro-batch.
            partners = _partners(self.kind, _sums(update, _weighed(models.logprobs(update), weights_K)), reference_S)

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            policy = scores.logprobs_K
            sequences, local_K = update.sequences_of(batch)
            # A micro-batch contains complete pairs. The chosen response of a pair comes first.
            local_K = local_K.to(policy.device)
            plain_S = sum_by(policy, local_K, len(sequences))
            weighed_S = plain_S
            if self.ld_alpha != 1:
                weighed_S = sum_by(_weighed(policy, weights_K[batch.index_K].to(policy)), local_K, len(sequences))
            lengths = _two(update.lengths_S[sequences].to(policy.device))
            reference = (None, None) if reference_S is None else _two(reference_S[sequences].to(policy.device))
            pairs = replace(Pairs(*_two(weighed_S), *lengths, *reference), likelihood_P=_two(plain_S)[0])
            batch_partners = None if partners is None else _select(partners, sequences[0::2] // 2, policy.device)
            return preference_loss(pairs, kind=self.kind, partners=batch_partners, **self.keys)

        return Task(update.batches, loss, len(update.items))

    def _weights(self, update: Update[Ranking]) -> torch.Tensor:
        return shared_length_weights(update.sequence_K, update.lengths_S, self.ld_alpha)

    def initial_loss(self) -> float | None:
        nothing, one = torch.zeros(1), torch.ones(1)
        if self.free:
            return None
        alike = Pairs(nothing, nothing, one, one, nothing, nothing)
        none = Partners(nothing, nothing)
        return float(preference_loss(alike, kind=self.kind, partners=none, **{**self.keys, "nll": 0.0}).loss)


def _partners(kind: str, policy_S: torch.Tensor, reference_S: torch.Tensor) -> Partners:
    if kind == "aot":
        return transport.paired_partners(*_two(policy_S), *_two(reference_S))
    return transport.unpaired_partners(*_two(policy_S - reference_S))


def _weighed(values_K: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Multiplies log-probs by token weights. A token of weight 0 gives 0, even if its log-prob is -inf."""
    return torch.where(weights_K > 0, values_K * weights_K, 0.0)


def _select(partners: Partners, pairs: torch.Tensor, device: torch.device) -> Partners:
    return Partners(partners.chosen_P[pairs].to(device), partners.rejected_P[pairs].to(device))


def _two(values_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values_S[0::2], values_S[1::2]
