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

# Shapes: S responses of the step, K policy tokens of the local responses, concatenated. Every rank has the metadata of
# all responses (`RolloutMeta`). The tokens of a response are on one rank: first on the rank that generated it, then on
# the rank that trains on it (`redistribute`). Totals over the step are all-reduced.

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Experience:
    """The responses of a step: metadata of all, tokens of the local ones."""

    metas: Sequence[RolloutMeta]
    """All responses of the step, ordered by prompt and sample. The number of a response is its index here."""
    prompts: Mapping[int, Prompt]
    """Prompts by index in the step."""
    local_numbers: Sequence[int]
    """Numbers of the local responses, in order."""
    rollouts: list[Rollout]
    examples: list[Example]
    sequence_K: torch.Tensor
    """The response number of each token."""
    group_S: torch.Tensor
    rollout_logprobs_K: torch.Tensor
    """Log-probs from the engine."""
    scores_S: torch.Tensor
    token_rewards_K: torch.Tensor
    """Parts of the scores assigned to tokens before the last one."""
    baseline_S: torch.Tensor | None
    world: World
    """The ranks that hold the responses; a world of one if all responses are local."""

    @property
    def sequences(self) -> int:
        return len(self.metas)

    @property
    def reduce(self) -> StepReduce:
        """Reduces local values over all ranks."""
        return SINGLE_PROCESS if self.world.size == 1 else StepReduce(self.world.sum_tensor, self.world.max_tensor)

    @cached_property
    def num_response_tokens_S(self) -> torch.Tensor:
        """Number of policy tokens of every response."""
        return torch.tensor([meta.num_response_tokens for meta in self.metas], dtype=torch.long)

    @property
    def last_K(self) -> torch.Tensor:
        """Index of the last token of each local response."""
        return self.num_response_tokens_S[list(self.local_numbers)].cumsum(0) - 1

    def responses_to(self, first: int, last: int) -> slice:
        """Numbers of the responses to the prompts from index `first` up to `last`."""
        inside = [i for i, meta in enumerate(self.metas) if first <= meta.prompt_index < last]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    def outlines(self, responses: slice) -> list[Outline]:
        return [Outline(one.prompt_index, one.length, one.shared) for one in self.metas[responses]]

    def local_tokens(self, responses: slice) -> slice:
        """The local tokens of a range of responses."""
        before = [number for number in self.local_numbers if number < responses.start]
        inside = [number for number in self.local_numbers if responses.start <= number < responses.stop]
        start = int(self.num_response_tokens_S[before].sum())
        return slice(start, start + int(self.num_response_tokens_S[inside].sum()))

    def all_gather(self, vector_K: torch.Tensor, responses: slice | None = None) -> torch.Tensor:
        """All-gathers a vector over local tokens to all tokens of the step, or of a range of responses."""
        span = responses or slice(0, self.sequences)
        if self.world.size == 1:
            return vector_K
        gathered = vector_K.new_zeros(int(self.num_response_tokens_S[span].sum()))
        gathered[self.local_positions(span)] = vector_K
        return self.world.sum_tensor(gathered)

    def local_positions(self, responses: slice) -> torch.Tensor:
        """Indices of the local tokens among all tokens of a range of responses."""
        ends_S = self.num_response_tokens_S[responses].cumsum(0)
        starts_S = ends_S - self.num_response_tokens_S[responses]
        inside = [n - responses.start for n in self.local_numbers if responses.start <= n < responses.stop]
        runs = [torch.arange(int(starts_S[n]), int(ends_S[n])) for n in inside]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)

    def all_rollouts(self) -> list[Rollout]:
        """All responses of the step, on every rank (a collective)."""
        return [rollout for rollout, _ in self.all_rollouts_and_examples()]

    def all_rollouts_and_examples(self) -> list[tuple[Rollout, Example]]:
        """All responses with their training examples, on every rank (a collective)."""
        pairs = zip(self.rollouts, self.examples, strict=True)
        shares = self.world.gather(list(zip(self.local_numbers, pairs, strict=True)))
        return [pair for _, pair in sorted(dict(one for share in shares for one in share).items(), key=itemgetter(0))]

    def with_local_rollouts(self, local: Mapping[int, Rollout]) -> Experience:
        """The same step with other local responses, given by number."""
        return _experience(self.metas, self.prompts, local, self.baseline_S, self.world)


def build_experience(rollouts: Sequence[Rollout], baselines: dict[int, float] | None = None) -> Experience:
    """The experience of one process, which has all responses."""
    prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
    return build_spread_experience(rollout_metas(rollouts), prompts, rollouts, baselines, World())


def build_spread_experience(
    metas: Sequence[RolloutMeta],
    prompts: Mapping[int, Prompt],
    local: Sequence[Rollout],
    baselines: dict[int, float] | None,
    world: World,
) -> Experience:
    """The experience of responses that are spread over the ranks; responses without score or baseline are excluded.

    A response without a policy token is an error, because no token can carry its score.
    """
    scored = [
        meta
        for meta in metas
        if isinstance(meta.score, Score) and (baselines is None or meta.prompt_index in baselines)
    ]
    _refuse_empty(scored, prompts)
    number = {(meta.prompt_index, meta.sample): i for i, meta in enumerate(scored)}
    numbered = {number[key]: rollout for rollout in local if (key := (rollout.prompt_index, rollout.sample)) in number}
    baseline_S = None if baselines is None else torch.tensor([baselines[meta.prompt_index] for meta in scored])
    return _experience(scored, prompts, numbered, baseline_S, world)


def rollout_metas(rollouts: Sequence[Rollout]) -> list[RolloutMeta]:
    """The metadata of responses, which include all responses to a prompt or none."""
    found: list[RolloutMeta] = []
    for _, members in groupby(rollouts, key=lambda rollout: rollout.prompt_index):
        group = list(members)
        scored = [make_example(rollout) for rollout in group if isinstance(rollout.score, Score)]
        shared = common_prompt(scored) if scored else 0
        found += [_meta(rollout, shared) for rollout in group]
    return found


def _meta(rollout: Rollout, shared: int) -> RolloutMeta:
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
    metas: Sequence[RolloutMeta],
    prompts: Mapping[int, Prompt],
    local: Mapping[int, Rollout],
    baseline_S: torch.Tensor | None,
    world: World,
) -> Experience:
    numbers = sorted(local)
    rollouts = [local[number] for number in numbers]
    lengths = torch.tensor([rollout.num_response_tokens for rollout in rollouts], dtype=torch.long)
    return Experience(
        metas=metas,
        prompts=prompts,
        local_numbers=numbers,
        rollouts=rollouts,
        examples=[make_example(rollout) for rollout in rollouts],
        sequence_K=torch.repeat_interleave(torch.tensor(numbers, dtype=torch.long), lengths),
        group_S=torch.tensor([meta.prompt_index for meta in metas], dtype=torch.long),
        rollout_logprobs_K=torch.from_numpy(
            np.concatenate([_policy_logprobs(rollout) for rollout in rollouts] or [_NONE])
        ),
        scores_S=torch.tensor([s.score.total for s in metas if isinstance(s.score, Score)], dtype=torch.float32),
        token_rewards_K=_token_rewards(rollouts, int(lengths.sum())),
        baseline_S=baseline_S,
        world=world,
    )


def reward_part(meta: RolloutMeta, prompts: Mapping[int, Prompt], name: str, key: str) -> float:
    """One reward of a response. `key` is the recipe key that names it."""
    assert isinstance(meta.score, Score)
    if name not in meta.score.parts:
        raise Refusal.at(
            key,
            f"response {meta.sample} to {prompts[meta.prompt_index].question.origin} has no reward {name!r} in its "
            "score",
            f"it has {', '.join(meta.score.parts) or 'none'}; the last checkpoint is untouched",
            code="missing-reward-part",
        )
    return meta.score.parts[name]


def _refuse_empty(metas: Sequence[RolloutMeta], prompts: Mapping[int, Prompt]) -> None:
    problems = [
        Problem(
            f"response {meta.sample} to {prompts[meta.prompt_index].question.origin}",
            "has no token of the policy, so no token can carry its score",
            "an engine returns at least the token that ended the response; the last checkpoint is untouched",
            code="empty-response",
        )
        for meta in metas
        if not meta.num_response_tokens
    ]
    if problems:
        raise Refusal(shortened(problems, "responses"))


def _token_rewards(rollouts: Sequence[Rollout], tokens: int) -> torch.Tensor:
    token_rewards_K, start = torch.zeros(tokens), 0
    for rollout in rollouts:
        for token, share in rollout.token_rewards:
            # A reward at an environment token belongs to the last policy token before it.
            token_rewards_K[start + max(sum(rollout.loss_mask[: token + 1]) - 1, 0)] += share
        start += rollout.num_response_tokens
    return token_rewards_K


def _policy_logprobs(rollout: Rollout) -> np.ndarray:
    """The engine's log-probs of the policy tokens."""
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    return logprobs[np.asarray(rollout.loss_mask, dtype=bool)]


def make_example(rollout: Rollout) -> Example:
    """Prompt and response as a training example; only the policy tokens are trained."""
    prompt = list(rollout.prompt.ids)
    return Example(prompt + rollout.ids, [0] * len(prompt) + list(rollout.loss_mask), rollout.prompt.question.origin)


# Mini-batches of a step, and the models' log-probs and values before the first update.


@dataclass(frozen=True)
class UpdateRows:
    """The responses of one update, and the packed rows of each data-parallel rank."""

    responses: slice
    rows_by_rank: list[list[PackedRow]]
    """The packed rows of each rank; numbers count from the first response of the update."""

    def owners(self) -> Iterator[tuple[int, int]]:
        """The data-parallel rank of each response, and the number of the response in the step."""
        for rank, rows in enumerate(self.rows_by_rank):
            yield from ((rank, self.responses.start + packed.number) for row in rows for packed in row)


@dataclass(frozen=True)
class UpdatePlan:
    """The responses of one update, and this rank's micro-batches."""

    responses: slice
    tokens: slice
    """The range of the update in the vectors over local tokens."""
    batches: list[MicroBatch]
    local_only = True

    @property
    def targets(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of the models for every local token; None if the recipe does not need them."""

    old_K: torch.Tensor | None
    """Old log-probs of the ratio: from the policy before the first update, or from the engine."""
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None
    trainer_K: torch.Tensor | None = None
    """Log-probs of the policy before the first update, if `old_K` has the engine's."""
    squares_K: torch.Tensor | None = None
    """Sum of squared probabilities over the vocabulary."""


def pack_minibatches(experience: Experience, models: Models, batch: Batch) -> list[UpdateRows]:
    """Splits the step into updates by prompts and packs each. A packed row holds a prompt once."""
    each = batch.prompts_per_update or batch.prompts
    runs = [experience.responses_to(first, first + each) for first in range(0, batch.prompts, each)]
    return [UpdateRows(run, models.pack(experience.outlines(run))) for run in runs if run.stop > run.start]


def plan_updates(experience: Experience, updates: Sequence[UpdateRows], models: Models) -> list[UpdatePlan]:
    """The micro-batches of this rank, which has their responses.

    Old and new log-probs come from the same micro-batches, so their ratio is exactly 1 before an update.
    """
    return [_plan(experience, update, models) for update in updates]


def _plan(experience: Experience, update: UpdateRows, models: Models) -> UpdatePlan:
    run, tokens = update.responses, experience.local_tokens(update.responses)
    starts = [0, *accumulate(experience.num_response_tokens_S[run].tolist())]
    index = {number: place for place, number in enumerate(experience.local_numbers) if run.start <= number < run.stop}
    places = dict(zip(index, [0, *accumulate(experience.num_response_tokens_S[list(index)].tolist())], strict=False))
    batches = []
    for row in update.rows_by_rank[models.world.dp_rank]:
        numbers = [run.start + packed.number for packed in row]
        batches.append(
            models.packing.batch(
                row,
                [experience.examples[index[number]] for number in numbers],
                starts=[starts[packed.number] for packed in row],
                places=[places[number] for number in numbers],
            )
        )
    return UpdatePlan(run, tokens, batches)


def compute_model_outputs(
    plans: Sequence[UpdatePlan], models: Models, recipe: Recipe, phases: PhaseTimer, rollout_logprobs_K: torch.Tensor
) -> ModelOutputs:
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
    outputs: ModelOutputs,
) -> dict[str, float]:
    """Compares the engine's log-probs of the step with the trainer's, before any update.

    Engine and trainer have the same weights. The trainer scores the responses here unless the recipe needed it earlier
    (`old_needed`). Without a limit nothing is compared.
    """
    if (limit := logprob_limit(recipe)) is None:
        return {}
    trainer_K = outputs.trainer_K if recipe.algorithm.rollout_correction.bypass else outputs.old_K
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
            code="logprobs-differ",
        )
    return {"training/rollout_logprob_diff_mean": mean}


# Every rank has the prompts, so responses are sent without them.
_NO_PROMPT = Prompt(Question("", [], "", Origin("", 0)), ())


def redistribute(experience: Experience, updates: Sequence[UpdateRows], world: World) -> Experience:
    """Sends every response from the rank that generated it to the ranks that train on it."""
    if world.size == 1:
        return experience
    owner = {number: dp_rank for update in updates for dp_rank, number in update.owners()}
    parcels: list[list[tuple[int, Rollout]]] = [[] for _ in range(world.size)]
    for number, rollout in zip(experience.local_numbers, experience.rollouts, strict=True):
        for rank in world.ranks_of(owner[number]):
            parcels[rank].append((number, replace(rollout, prompt=_NO_PROMPT)))
    arrived = [pair for parcel in world.exchange(parcels) for pair in parcel]
    return experience.with_local_rollouts(
        {number: replace(rollout, prompt=experience.prompts[rollout.prompt_index]) for number, rollout in arrived}
    )
