"""KTO: learns from single responses with binary labels; estimates the KL on responses to other prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from lockstep.algorithms.kto import imbalance_note, kl_estimate, kto_loss, mismatched_rows, row_logratios, row_means
from lockstep.algorithms.reduce import sum_by
from lockstep.data.dataset import Dataset, OpenRows
from lockstep.data.encode.kto_rows import LabeledRows
from lockstep.data.updates import Update
from lockstep.errors import Problem, Refusal
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Task
from lockstep.model.resolve import image_folder
from lockstep.recipe import Recipe
from lockstep.types import Example, LabeledResponse, MicroBatch, Sums


def reader(recipe: Recipe) -> OpenRows[LabeledResponse]:
    return partial(LabeledRows, images=image_folder(recipe.model))


def check(recipe: Recipe, rows: Dataset[LabeledResponse], key: str) -> tuple[list[Problem], list[str]]:
    """Checks that the data has desirable and undesirable rows. Each update needs at least two rows, so that a prompt
    can be paired with the response to another prompt."""
    problems, settings = [], recipe.preference
    verdicts = [item.desirable for item in rows.items]
    good, bad = sum(verdicts), len(verdicts) - sum(verdicts)
    if len(verdicts) < 2:
        problems.append(
            Problem(
                key, "has one row, but the KL estimate needs another prompt's response", "add rows", code="too-few-rows"
            )
        )
    if key != "data.train":
        return problems, []
    if not (good and bad):
        only = "desirable" if good else "undesirable"
        problems.append(Problem(key, f"every row is {only}", "add rows with the other label", code="one-class-only"))
        return problems, []
    if recipe.run.steps is None and len(verdicts) * (recipe.run.epochs or 1) % recipe.batch.rows_per_update == 1:
        problems.append(
            Problem(
                "batch.rows_per_update",
                f"{recipe.batch.rows_per_update} leaves one row for the last update, but the KL estimate needs two",
                "choose another value, or set run.steps",
                code="too-few-rows",
            )
        )
    note = imbalance_note(good, bad, settings.desirable, settings.undesirable)
    return problems, [note] if note else []


class KtoObjective:
    def __init__(self, recipe: Recipe):
        settings = recipe.preference
        self.free = settings.reference_free
        self.keys = settings.model_dump(include={"beta", "desirable", "undesirable"})

    def task(self, update: Update[LabeledResponse], models: MethodModels) -> Task:
        mismatched, cut = _mismatched_examples(update.items, models.longest)
        logratios = self._logratios(models.arrange(mismatched), models)
        # Without a reference model the KL baseline is the mean log-prob of the policy. The mean log-prob is negative
        # and not clamped at 0.
        kl = float(logratios.mean()) if self.free else kl_estimate(logratios)
        reference_S = None if self.free else _by_sequence(models.reference_logprobs(update), update)
        desirable_S = torch.tensor([item.desirable for item in update.items])

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            policy = scores.logprobs_K
            sequences, local_K = update.sequences_of(batch)
            sums_S = sum_by(policy, local_K.to(policy.device), len(sequences))
            if reference_S is None:
                ratios = row_means(sums_S, update.lengths_S[sequences].to(policy.device))
            else:
                ratios = row_logratios(sums_S, reference_S[sequences].to(policy.device))
            sums = kto_loss(ratios, desirable_S[sequences].to(policy.device), kl=kl, **self.keys)
            # `kl` and `kl_cut` are values of the whole update. Each micro-batch adds a part of `kl` and `kl_cut`, in
            # proportion to its number of rows.
            share = policy.new_tensor(len(sequences))
            sums.metrics |= {"kl": share * kl, "kl_cut": share * cut / len(update.items)}
            return sums

        return Task(update.batches, loss, len(update.items))

    def _logratios(self, update: Update[Example], models: MethodModels) -> torch.Tensor:
        policy_S = _by_sequence(models.logprobs(update), update)
        if self.free:
            return row_means(policy_S, update.lengths_S)
        return row_logratios(policy_S, _by_sequence(models.reference_logprobs(update), update))

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        good, bad = sums["desirable"], sums["undesirable"]
        metrics = {"label_accuracy": sums["accuracy"] / divisor, "kl": sums["kl"] / divisor}
        if good:
            metrics["chosen"] = sums["reward_desirable"] / good
        if bad:
            metrics["rejected"] = sums["reward_undesirable"] / bad
        if good and bad:
            metrics["margin"] = metrics["chosen"] - metrics["rejected"]
        return metrics | ({"kl_cut": sums["kl_cut"]} if sums["kl_cut"] else {})

    def initial_loss(self) -> float | None:
        """The loss of each row starts at half its weight. So the initial loss is constant only if desirable and
        undesirable rows have equal weights."""
        return (
            0.5 * self.keys["desirable"]
            if self.keys["desirable"] == self.keys["undesirable"] and not self.free
            else None
        )


def _by_sequence(values_K: torch.Tensor, update: Update[LabeledResponse] | Update[Example]) -> torch.Tensor:
    return sum_by(values_K, update.sequence_K, len(update.examples))


def _mismatched_examples(items: Sequence[LabeledResponse], longest: int) -> tuple[list[Example], int]:
    """Returns an example for each prompt, with the response to another prompt. Also returns how many responses were
    truncated."""
    firsts = [next(i for i, mask in enumerate(item.example.loss_mask) if mask) for item in items]
    prompts = [item.example.cut(slice(0, first)) for item, first in zip(items, firsts, strict=True)]
    responses = [item.example.cut(slice(first, len(item.example))) for item, first in zip(items, firsts, strict=True)]
    try:
        partners = mismatched_rows(list(map(_content, prompts)), list(map(_content, responses)))
    except ValueError as error:
        where = ", ".join(str(item.origin) for item in items[:2])
        raise Refusal.at(
            where, f"cannot estimate the KL of this update: {error}", "shuffle the rows", code="too-few-rows"
        ) from error
    examples, cut = [], 0
    for item, prompt, partner in zip(items, prompts, partners, strict=True):
        # A response is not cut inside an image, so the cut is before the first image that does not fit.
        room = min([longest - len(prompt), *_starts_over(responses[partner], longest - len(prompt))])
        response = responses[partner].cut(slice(0, min(room, len(responses[partner]))))
        cut += len(response) < len(responses[partner])
        images = (*prompt.images, *(replace(one, start=one.start + len(prompt)) for one in response.images))
        mask = [*[0] * len(prompt), *response.loss_mask]
        examples.append(Example([*prompt.ids, *response.ids], mask, item.origin, images=images))
    return examples, cut


def _content(part: Example) -> list[int]:
    """Returns the tokens of a prompt or response and the hashes of its images. Prompts that differ only in their images
    have the same tokens."""
    return [*part.ids, *(byte for image in part.images for byte in bytes.fromhex(image.ref.digest))]


def _starts_over(response: Example, room: int) -> list[int]:
    return [image.start for image in response.images if image.stop > room]
