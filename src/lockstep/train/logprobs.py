"""Log-probs and values of a step's responses before its first update; redistribution of responses over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from lockstep.algorithms.correction import logprob_difference
from lockstep.data.batching import PackedRow
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.preflight.batch_plan import logprob_limit, old_needed
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Batch
from lockstep.run.metrics import PhaseTimer
from lockstep.train.experience import Experience
from lockstep.train.models import Models
from lockstep.types import MicroBatch, Origin, Prompt, Question, Rollout

# What the models say of a step's responses before the first update: log-probs and values, where they are needed.


@dataclass(frozen=True)
class UpdateLines:
    """The responses of one optimizer step by their numbers, and who trains on which of them in which micro-batch."""

    responses: slice
    shares: list[list[PackedRow]]
    """The lines of each share; numbers are counted from the first response of the update."""

    def owners(self) -> Iterator[tuple[int, int]]:
        """The share that has each response, and the response's number in the step."""
        for share, lines in enumerate(self.shares):
            yield from ((share, self.responses.start + laid.number) for line in lines for laid in line)


@dataclass(frozen=True)
class UpdatePlan:
    """The responses of one optimizer step, this rank's share of them in micro-batches."""

    responses: slice
    tokens: slice
    """Of the vectors of the tokens that are here."""
    batches: list[MicroBatch]
    spread = True

    @property
    def targets(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class Annotated:
    """For every token of a step that is here; what a recipe does not use is None."""

    old_K: torch.Tensor | None
    """What new log-probs are compared with: the policy's own before the first update, or the engine's."""
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None
    trainer_K: torch.Tensor | None = None
    """The policy's own before the first update, where they are not the old ones."""
    squares_K: torch.Tensor | None = None
    """The sum of the squared probabilities of all words."""


def lay_updates(experience: Experience, models: Models, batch: Batch) -> list[UpdateLines]:
    """The step cut into optimizer steps by prompts, each packed by itself, a prompt once before its responses."""
    each = batch.prompts_per_update or batch.prompts
    runs = [experience.of_prompts(first, first + each) for first in range(0, batch.prompts, each)]
    return [UpdateLines(run, models.lay(experience.outlines(run))) for run in runs if run.stop > run.start]


def plan_updates(experience: Experience, updates: Sequence[UpdateLines], models: Models) -> list[UpdatePlan]:
    """The micro-batches of this rank, whose responses are here.

    Old and new log-probs come from the same micro-batches, so that their ratio is exactly 1 before an update.
    """
    return [_planned(experience, update, models) for update in updates]


def _planned(experience: Experience, update: UpdateLines, models: Models) -> UpdatePlan:
    run, tokens = update.responses, experience.tokens_of(update.responses)
    starts = [0, *accumulate(experience.written_S[run].tolist())]
    here = {number: place for place, number in enumerate(experience.numbers) if run.start <= number < run.stop}
    places = dict(zip(here, [0, *accumulate(experience.written_S[list(here)].tolist())], strict=False))
    batches = []
    for line in update.shares[models.world.dp_rank]:
        numbers = [run.start + laid.number for laid in line]
        batches.append(
            models.packing.batch(
                line,
                [experience.examples[here[number]] for number in numbers],
                starts=[starts[laid.number] for laid in line],
                places=[places[number] for number in numbers],
            )
        )
    return UpdatePlan(run, tokens, batches)


def annotate(
    plans: Sequence[UpdatePlan], models: Models, recipe: Recipe, phases: PhaseTimer, engine_K: torch.Tensor
) -> Annotated:
    old_K = trainer_K = squares_K = reference_K = values_K = None
    settings, energy = recipe.algorithm.rollout_correction, estimator_row(recipe.algorithm.advantage).energy
    if old_needed(recipe, len(plans)):
        with phases("old_log_prob"):
            if energy:
                both = torch.cat([models.logprobs_and_squares(plan) for plan in plans], 1)
                old_K, squares_K = both[0], both[1]
            else:
                old_K = torch.cat([models.logprobs(plan) for plan in plans])
    if settings.bypass:
        old_K, trainer_K = engine_K, old_K
    if recipe.algorithm.kl.where != "none":
        with phases("ref"):
            reference_K = torch.cat([models.reference_logprobs(plan) for plan in plans])
    if models.critic is not None:
        with phases("values"):
            values_K = torch.cat([models.values(plan) for plan in plans])
    return Annotated(old_K, reference_K, values_K, trainer_K, squares_K)


def check_engine_logprobs(
    plans: Sequence[UpdatePlan],
    models: Models,
    recipe: Recipe,
    phases: PhaseTimer,
    experience: Experience,
    known: Annotated,
) -> dict[str, float]:
    """Compare the engine's log-probs of the step's tokens with the trainer's own, before any update.

    The weights are those that the responses were drawn with. The trainer scores the responses here where nothing else
    of the recipe needed it (`old_needed`). Nothing is compared where there is no limit.
    """
    if (limit := logprob_limit(recipe)) is None:
        return {}
    trainer_K = known.trainer_K if recipe.algorithm.rollout_correction.bypass else known.old_K
    if trainer_K is None:
        with phases("old_log_prob"):
            trainer_K = torch.cat([models.logprobs(plan) for plan in plans])
    mean, k3 = logprob_difference(trainer_K, experience.engine_K, experience.whole)
    if not (mean <= limit and k3 <= limit / 2):
        tokens = experience.whole.count(len(trainer_K))
        raise Refusal.at(
            "rollout.max_logprob_diff",
            f"the log-probs that engine {recipe.rollout.engine} returned differ from the trainer's for the same tokens "
            f"and weights: mean |difference| {mean:.3g} (limit {limit:.3g}), k3 {k3:.3g} (limit {limit / 2:.3g}), over "
            f"{tokens:,} tokens of {experience.sequences:,} responses",
            "look for a proxy or load balancer that mixes up answers, and for settings that change how the server "
            "samples. A larger number accepts the difference, null switches the check off. The last checkpoint is "
            "untouched",
            code="logprobs-differ",
        )
    return {"training/rollout_logprob_diff_mean": mean}


# Responses travel once: from the rank that generated them to the rank, or the group of ranks, that trains on them.

# Every rank knows the prompts: a response travels without its own.
_KNOWN = Prompt(Question("", [], "", Origin("", 0)), ())


def moved(experience: Experience, updates: Sequence[UpdateLines], world: World) -> Experience:
    """The step with the responses here that this rank trains on, and no other."""
    if world.size == 1:
        return experience
    owner = {number: share for update in updates for share, number in update.owners()}
    parcels: list[list[tuple[int, Rollout]]] = [[] for _ in range(world.size)]
    for number, rollout in zip(experience.numbers, experience.rollouts, strict=True):
        for rank in world.ranks_of(owner[number]):
            parcels[rank].append((number, replace(rollout, prompt=_KNOWN)))
    arrived = [pair for parcel in world.exchange(parcels) for pair in parcel]
    return experience.with_own(
        {number: replace(rollout, prompt=experience.prompts[rollout.prompt_index]) for number, rollout in arrived}
    )
