"""The responses of a step as flat vectors, their distribution over ranks, and the models' log-probs and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch

from lockstep.algorithms.correction import logprob_difference
from lockstep.algorithms.reduce import SINGLE_PROCESS, StepReduce
from lockstep.data.batching import Outline, PackedRow, common_prompt
from lockstep.errors import Problem, Refusal, shortened
from lockstep.parallel.world import World
from lockstep.preflight.batch_plan import logprob_limit, old_needed
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Batch
from lockstep.run.metrics import PhaseTimer
from lockstep.train.models import Models
from lockstep.types import Example, MicroBatch, Origin, Prompt, Question, Rollout, RolloutMeta, Score

# The responses of a step as flat vectors, one entry for each token that the policy produced.
#
# Shapes: S responses of the step, K tokens of those that are here, one response after another. What is known of every
# response everywhere is small (`RolloutMeta`); its tokens, and all that is said of them, are on one rank: at first
# where they were generated, then where they are trained (`moving.py`). What is counted over the step comes from sums
# over the ranks.

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Experience:
    metas: Sequence[RolloutMeta]
    """Of all responses of the step, by prompt and sample; a response's number is its place here."""
    prompts: Mapping[int, Prompt]
    """By their index in the step."""
    local_numbers: Sequence[int]
    """Of the responses that are here, in order."""
    rollouts: list[Rollout]
    examples: list[Example]
    sequence_K: torch.Tensor
    """The number of a token's response."""
    group_S: torch.Tensor
    rollout_logprobs_K: torch.Tensor
    """The engine's log-probabilities."""
    scores_S: torch.Tensor
    token_rewards_K: torch.Tensor
    """The shares of the scores that belong to a token before the last."""
    baseline_S: torch.Tensor | None
    world: World
    """The ranks that the responses are spread over; one of its own where all of them are here."""

    @property
    def sequences(self) -> int:
        return len(self.metas)

    @property
    def reduce(self) -> StepReduce:
        """From sums over what is here to those over the step."""
        return SINGLE_PROCESS if self.world.size == 1 else StepReduce(self.world.sum_tensor, self.world.max_tensor)

    @cached_property
    def num_response_tokens_S(self) -> torch.Tensor:
        """Tokens that the policy wrote, of every response."""
        return torch.tensor([summary.num_response_tokens for summary in self.metas], dtype=torch.long)

    @property
    def last_K(self) -> torch.Tensor:
        """Where each response that is here ends."""
        return self.num_response_tokens_S[list(self.local_numbers)].cumsum(0) - 1

    def responses_to(self, first: int, last: int) -> slice:
        """Numbers of the responses to the prompts of index `first` up to `last`."""
        inside = [i for i, summary in enumerate(self.metas) if first <= summary.prompt_index < last]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    def outlines(self, responses: slice) -> list[Outline]:
        return [Outline(one.prompt_index, one.length, one.shared) for one in self.metas[responses]]

    def local_tokens(self, responses: slice) -> slice:
        """Tokens that are here of a run of responses."""
        before = [number for number in self.local_numbers if number < responses.start]
        inside = [number for number in self.local_numbers if responses.start <= number < responses.stop]
        start = int(self.num_response_tokens_S[before].sum())
        return slice(start, start + int(self.num_response_tokens_S[inside].sum()))

    def all_gather(self, vector_K: torch.Tensor, responses: slice | None = None) -> torch.Tensor:
        """Numbers for the tokens that are here as those for all tokens of the step, or of a run of responses; on every
        rank, so only for what cannot be had from sums."""
        every = responses or slice(0, self.sequences)
        if self.world.size == 1:
            return vector_K
        whole = vector_K.new_zeros(int(self.num_response_tokens_S[every].sum()))
        whole[self.local_positions(every)] = vector_K
        return self.world.sum_tensor(whole)

    def local_positions(self, responses: slice) -> torch.Tensor:
        """Where the tokens that are here of a run of responses stand among all tokens of the run."""
        ends_S = self.num_response_tokens_S[responses].cumsum(0)
        starts_S = ends_S - self.num_response_tokens_S[responses]
        inside = [n - responses.start for n in self.local_numbers if responses.start <= n < responses.stop]
        runs = [torch.arange(int(starts_S[n]), int(ends_S[n])) for n in inside]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)

    def all_rollouts(self) -> list[Rollout]:
        """All responses of the step, on every rank: for a tape and for a replay."""
        return [rollout for rollout, _ in self.all_rollouts_and_examples()]

    def all_rollouts_and_examples(self) -> list[tuple[Rollout, Example]]:
        """All responses and what is trained of them, on every rank."""
        pairs = zip(self.rollouts, self.examples, strict=True)
        shares = self.world.gather(list(zip(self.local_numbers, pairs, strict=True)))
        return [pair for _, pair in sorted(dict(one for share in shares for one in share).items(), key=itemgetter(0))]

    def with_local_rollouts(self, own: Mapping[int, Rollout]) -> Experience:
        """The same step where other responses are here, by their numbers."""
        return _experience(self.metas, self.prompts, own, self.baseline_S, self.world)


def build_experience(rollouts: Sequence[Rollout], baselines: dict[int, float] | None = None) -> Experience:
    """What can be learned from, where all responses are here."""
    prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
    return build_spread_experience(rollout_metas(rollouts), prompts, rollouts, baselines, World())


def build_spread_experience(
    summaries: Sequence[RolloutMeta],
    prompts: Mapping[int, Prompt],
    here: Sequence[Rollout],
    baselines: dict[int, float] | None,
    world: World,
) -> Experience:
    """What can be learned from: responses without a score, or without their baseline, are left out.

    A response without a token is refused: nothing could carry its score, which would fall on its neighbour.
    """
    scored = [
        summary
        for summary in summaries
        if isinstance(summary.score, Score) and (baselines is None or summary.prompt_index in baselines)
    ]
    _refuse_empty(scored, prompts)
    number = {(summary.prompt_index, summary.sample): i for i, summary in enumerate(scored)}
    own = {number[key]: rollout for rollout in here if (key := (rollout.prompt_index, rollout.sample)) in number}
    baseline_S = None if baselines is None else torch.tensor([baselines[summary.prompt_index] for summary in scored])
    return _experience(scored, prompts, own, baseline_S, world)


def rollout_metas(rollouts: Sequence[Rollout]) -> list[RolloutMeta]:
    """What is known everywhere of these responses, among which are all to a prompt or none."""
    found: list[RolloutMeta] = []
    for _, members in groupby(rollouts, key=lambda rollout: rollout.prompt_index):
        group = list(members)
        scored = [make_example(rollout) for rollout in group if isinstance(rollout.score, Score)]
        shared = common_prompt(scored) if scored else 0
        found += [_summary(rollout, shared) for rollout in group]
    return found


def _summary(rollout: Rollout, shared: int) -> RolloutMeta:
    score = replace(rollout.score, steps=()) if isinstance(rollout.score, Score) else rollout.score
    return RolloutMeta(
        rollout.prompt_index,
        rollout.sample,
        len(rollout.prompt.ids),
        len(rollout.ids),
        rollout.num_response_tokens,
        shared,
        rollout.stop,
        score,
    )


def _experience(
    summaries: Sequence[RolloutMeta],
    prompts: Mapping[int, Prompt],
    own: Mapping[int, Rollout],
    baseline_S: torch.Tensor | None,
    world: World,
) -> Experience:
    numbers = sorted(own)
    here = [own[number] for number in numbers]
    lengths = torch.tensor([rollout.num_response_tokens for rollout in here], dtype=torch.long)
    return Experience(
        metas=summaries,
        prompts=prompts,
        local_numbers=numbers,
        rollouts=here,
        examples=[make_example(rollout) for rollout in here],
        sequence_K=torch.repeat_interleave(torch.tensor(numbers, dtype=torch.long), lengths),
        group_S=torch.tensor([summary.prompt_index for summary in summaries], dtype=torch.long),
        rollout_logprobs_K=torch.from_numpy(np.concatenate([_written(rollout) for rollout in here] or [_NONE])),
        scores_S=torch.tensor([s.score.total for s in summaries if isinstance(s.score, Score)], dtype=torch.float32),
        token_rewards_K=_earned(here, int(lengths.sum())),
        baseline_S=baseline_S,
        world=world,
    )


def reward_part(summary: RolloutMeta, prompts: Mapping[int, Prompt], name: str, key: str) -> float:
    """One part of what a response earned. `key` is where the recipe names it."""
    assert isinstance(summary.score, Score)
    if name not in summary.score.parts:
        raise Refusal.at(
            key,
            f"response {summary.sample} to {prompts[summary.prompt_index].question.origin} has no part {name!r} in its "
            "score",
            f"it has {', '.join(summary.score.parts) or 'none'}; the last checkpoint is untouched",
        )
    return summary.score.parts[name]


def _refuse_empty(summaries: Sequence[RolloutMeta], prompts: Mapping[int, Prompt]) -> None:
    problems = [
        Problem(
            f"response {summary.sample} to {prompts[summary.prompt_index].question.origin}",
            "has no token of the policy's, so there is none to carry its score",
            "an engine returns at least the token that ended the response; the last checkpoint is untouched",
        )
        for summary in summaries
        if not summary.num_response_tokens
    ]
    if problems:
        raise Refusal(shortened(problems, "responses"))


def _earned(rollouts: Sequence[Rollout], tokens: int) -> torch.Tensor:
    token_rewards_K, start = torch.zeros(tokens), 0
    for rollout in rollouts:
        for token, share in rollout.token_rewards:
            # What is earned while an environment writes belongs to the policy's last token before it.
            token_rewards_K[start + max(sum(rollout.loss_mask[: token + 1]) - 1, 0)] += share
        start += rollout.num_response_tokens
    return token_rewards_K


def _written(rollout: Rollout) -> np.ndarray:
    """The engine's log-probabilities of the policy's own tokens."""
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    return logprobs[np.asarray(rollout.loss_mask, dtype=bool)]


def make_example(rollout: Rollout) -> Example:
    """The whole sequence, of which the policy's own tokens are trained."""
    prompt = list(rollout.prompt.ids)
    return Example(prompt + rollout.ids, [0] * len(prompt) + list(rollout.loss_mask), rollout.prompt.question.origin)


# Log-probs and values of a step's responses before its first update; redistribution of responses over ranks.

# What the models say of a step's responses before the first update: log-probs and values, where they are needed.


@dataclass(frozen=True)
class UpdateRows:
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
    local_only = True

    @property
    def targets(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class ModelOutputs:
    """For every token of a step that is here; what a recipe does not use is None."""

    old_K: torch.Tensor | None
    """What new log-probs are compared with: the policy's own before the first update, or the engine's."""
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None
    trainer_K: torch.Tensor | None = None
    """The policy's own before the first update, where they are not the old ones."""
    squares_K: torch.Tensor | None = None
    """The sum of the squared probabilities of all words."""


def pack_minibatches(experience: Experience, models: Models, batch: Batch) -> list[UpdateRows]:
    """The step cut into optimizer steps by prompts, each packed by itself, a prompt once before its responses."""
    each = batch.prompts_per_update or batch.prompts
    runs = [experience.responses_to(first, first + each) for first in range(0, batch.prompts, each)]
    return [UpdateRows(run, models.pack(experience.outlines(run))) for run in runs if run.stop > run.start]


def plan_updates(experience: Experience, updates: Sequence[UpdateRows], models: Models) -> list[UpdatePlan]:
    """The micro-batches of this rank, whose responses are here.

    Old and new log-probs come from the same micro-batches, so that their ratio is exactly 1 before an update.
    """
    return [_planned(experience, update, models) for update in updates]


def _planned(experience: Experience, update: UpdateRows, models: Models) -> UpdatePlan:
    run, tokens = update.responses, experience.local_tokens(update.responses)
    starts = [0, *accumulate(experience.num_response_tokens_S[run].tolist())]
    here = {number: place for place, number in enumerate(experience.local_numbers) if run.start <= number < run.stop}
    places = dict(zip(here, [0, *accumulate(experience.num_response_tokens_S[list(here)].tolist())], strict=False))
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


def compute_model_outputs(
    plans: Sequence[UpdatePlan], models: Models, recipe: Recipe, phases: PhaseTimer, rollout_logprobs_K: torch.Tensor
) -> ModelOutputs:
    old_K = trainer_K = squares_K = reference_K = values_K = None
    settings, energy = recipe.algorithm.correction, estimator_row(recipe.algorithm.advantage).energy
    if old_needed(recipe, len(plans)):
        with phases("old_log_prob"):
            if energy:
                both = torch.cat([models.logprobs_and_squares(plan) for plan in plans], 1)
                old_K, squares_K = both[0], both[1]
            else:
                old_K = torch.cat([models.logprobs(plan) for plan in plans])
    if settings.bypass:
        old_K, trainer_K = rollout_logprobs_K, old_K
    if recipe.algorithm.kl.where != "none":
        with phases("ref"):
            reference_K = torch.cat([models.reference_logprobs(plan) for plan in plans])
    if models.critic is not None:
        with phases("values"):
            values_K = torch.cat([models.values(plan) for plan in plans])
    return ModelOutputs(old_K, reference_K, values_K, trainer_K, squares_K)


def check_rollout_logprobs(
    plans: Sequence[UpdatePlan],
    models: Models,
    recipe: Recipe,
    phases: PhaseTimer,
    experience: Experience,
    known: ModelOutputs,
) -> dict[str, float]:
    """Compare the engine's log-probs of the step's tokens with the trainer's own, before any update.

    The weights are those that the responses were drawn with. The trainer scores the responses here where nothing else
    of the recipe needed it (`old_needed`). Nothing is compared where there is no limit.
    """
    if (limit := logprob_limit(recipe)) is None:
        return {}
    trainer_K = known.trainer_K if recipe.algorithm.correction.bypass else known.old_K
    if trainer_K is None:
        with phases("old_log_prob"):
            trainer_K = torch.cat([models.logprobs(plan) for plan in plans])
    mean, k3 = logprob_difference(trainer_K, experience.rollout_logprobs_K, experience.reduce)
    if not (mean <= limit and k3 <= limit / 2):
        tokens = experience.reduce.count(len(trainer_K))
        raise Refusal.at(
            "rollout.max_logprob_diff",
            f"the log-probs that engine {recipe.rollout.engine} returned differ from the trainer's for the same tokens "
            f"and weights: mean |difference| {mean:.3g} (limit {limit:.3g}), k3 {k3:.3g} (limit {limit / 2:.3g}), over "
            f"{tokens:,} tokens of {experience.sequences:,} responses",
            "look for a proxy or load balancer that mixes up answers, and for settings that change how the server "
            "samples. A larger number accepts the difference, null switches the check off. The last checkpoint is "
            "untouched",
        )
    return {"training/rollout_logprob_diff_mean": mean}


# Responses travel once: from the rank that generated them to the rank, or the group of ranks, that trains on them.

# Every rank knows the prompts: a response travels without its own.
_KNOWN = Prompt(Question("", [], "", Origin("", 0)), ())


def redistribute(experience: Experience, updates: Sequence[UpdateRows], world: World) -> Experience:
    """The step with the responses here that this rank trains on, and no other."""
    if world.size == 1:
        return experience
    owner = {number: share for update in updates for share, number in update.owners()}
    parcels: list[list[tuple[int, Rollout]]] = [[] for _ in range(world.size)]
    for number, rollout in zip(experience.local_numbers, experience.rollouts, strict=True):
        for rank in world.ranks_of(owner[number]):
            parcels[rank].append((number, replace(rollout, prompt=_KNOWN)))
    arrived = [pair for parcel in world.exchange(parcels) for pair in parcel]
    return experience.with_local_rollouts(
        {number: replace(rollout, prompt=experience.prompts[rollout.prompt_index]) for number, rollout in arrived}
    )
