"""KTO: single responses with a verdict, against what the policy says of responses to other prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from lockstep.algorithms.kto import imbalance_note, kl_estimate, kto_loss, mismatched, row_logratios, row_means
from lockstep.algorithms.reduce import sum_by
from lockstep.data.dataset import Dataset, load_rows
from lockstep.data.encode.kto_rows import JudgedRows
from lockstep.data.updates import Update
from lockstep.errors import Problem, Refusal
from lockstep.kernels.logprob import Scores
from lockstep.methods.base import MethodModels, Reader, Task
from lockstep.recipe import Recipe
from lockstep.types import Example, Judged, MicroBatch, Sums


def reader(recipe: Recipe) -> Reader[Judged]:
    return partial(load_rows, Dataset, JudgedRows)


def check(recipe: Recipe, rows: Dataset[Judged], key: str) -> tuple[list[Problem], list[str]]:
    """Rows of both kinds, and never an update of one: its mismatched pair would be the pair itself."""
    problems, settings = [], recipe.preference
    verdicts = [item.desirable for item in rows.items]
    good, bad = sum(verdicts), len(verdicts) - sum(verdicts)
    if len(verdicts) < 2:
        problems.append(
            Problem(
                key, "has one row, and the KL estimate needs another prompt's response", "add rows", code="too-few-rows"
            )
        )
    if key != "data.train":
        return problems, []
    if not (good and bad):
        only = "desirable" if good else "undesirable"
        problems.append(
            Problem(
                key,
                f"every row is {only}: there is nothing to tell apart",
                "add rows of both kinds",
                code="one-class-only",
            )
        )
        return problems, []
    if recipe.run.steps is None and len(verdicts) * (recipe.run.epochs or 1) % recipe.batch.rows_per_update == 1:
        problems.append(
            Problem(
                "batch.rows_per_update",
                f"{recipe.batch.rows_per_update} leaves a last update of one row, which has no mismatched pair",
                "choose another number, or set run.steps",
                code="too-few-rows",
            )
        )
    note = imbalance_note(good, bad, settings.desirable, settings.undesirable)
    return problems, [note] if note else []


class JudgedResponses:
    def __init__(self, recipe: Recipe):
        settings = recipe.preference
        self.free = settings.reference_free
        self.keys = settings.model_dump(include={"beta", "desirable", "undesirable"})

    def task(self, update: Update[Judged], models: MethodModels) -> Task:
        strangers, cut = _strangers(update.items, models.longest)
        logratios = self._logratios(models.arrange(strangers), models)
        # Without a reference the baseline is the policy's own mean, which is below zero: only a divergence is clamped.
        kl = float(logratios.mean()) if self.free else kl_estimate(logratios)
        reference_S = None if self.free else _by_sequence(models.reference_logprobs(update), update)
        desirable_S = torch.tensor([item.desirable for item in update.items])

        def loss(scores: Scores, batch: MicroBatch) -> Sums:
            policy = scores.logprobs_K
            sequences, local_K = update.sequences_of(batch)
            own = sum_by(policy, local_K.to(policy.device), len(sequences))
            if reference_S is None:
                ratios = row_means(own, update.lengths_S[sequences].to(policy.device))
            else:
                ratios = row_logratios(own, reference_S[sequences].to(policy.device))
            sums = kto_loss(ratios, desirable_S[sequences].to(policy.device), kl=kl, **self.keys)
            # Each row brings its share of what belongs to the whole update.
            share = policy.new_tensor(len(sequences))
            sums.metrics |= {"kl": share * kl, "kl_cut": share * cut / len(update.items)}
            return sums

        return Task(update.batches, loss, len(update.items))

    def _logratios(self, update: Update[Example], models: MethodModels) -> torch.Tensor:
        own = _by_sequence(models.logprobs(update), update)
        if self.free:
            return row_means(own, update.lengths_S)
        return row_logratios(own, _by_sequence(models.reference_logprobs(update), update))

    def report(self, sums: Mapping[str, float], divisor: float) -> dict[str, float]:
        good, bad = sums["desirable"], sums["undesirable"]
        found = {"label_accuracy": sums["accuracy"] / divisor, "kl": sums["kl"] / divisor}
        if good:
            found["chosen"] = sums["reward_desirable"] / good
        if bad:
            found["rejected"] = sums["reward_undesirable"] / bad
        if good and bad:
            found["margin"] = found["chosen"] - found["rejected"]
        return found | ({"kl_cut": sums["kl_cut"]} if sums["kl_cut"] else {})

    def start(self) -> float | None:
        """Each row starts at half its weight, so it is a number only where the weights are one."""
        return (
            0.5 * self.keys["desirable"]
            if self.keys["desirable"] == self.keys["undesirable"] and not self.free
            else None
        )


def _by_sequence(values_K: torch.Tensor, update: Update[Judged] | Update[Example]) -> torch.Tensor:
    return sum_by(values_K, update.sequence_K, len(update.examples))


def _strangers(items: Sequence[Judged], longest: int) -> tuple[list[Example], int]:
    """Each prompt with the response to another one, and how many of these had to be cut to fit."""
    firsts = [next(i for i, trained in enumerate(item.example.trained) if trained) for item in items]
    prompts = [list(item.example.ids[:first]) for item, first in zip(items, firsts, strict=True)]
    responses = [list(item.example.ids[first:]) for item, first in zip(items, firsts, strict=True)]
    try:
        partners = mismatched(prompts, responses)
    except ValueError as error:
        where = ", ".join(str(item.origin) for item in items[:2])
        raise Refusal.at(
            where, f"the KL estimate of this update is impossible: {error}", "shuffle the rows", code="too-few-rows"
        ) from error
    examples, cut = [], 0
    for item, prompt, partner in zip(items, prompts, partners, strict=True):
        room = longest - len(prompt)
        response = responses[partner][:room]
        trained = items[partner].example.trained[firsts[partner] :][:room]
        cut += len(response) < len(responses[partner])
        examples.append(Example([*prompt, *response], [*[0] * len(prompt), *trained], item.origin))
    return examples, cut
