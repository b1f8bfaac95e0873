"""The responses of a step as flat token vectors, their distribution over ranks, and the outputs of the models."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch

from lockstep.algorithms.advantage import TrajectoryTurns
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
from lockstep.train.routing_replay import RoutingReplay
from lockstep.types import Example, MicroBatch, Origin, Prompt, Question, Rollout, RolloutMeta, Score

# Shape suffixes: S is the number of responses of the step. K is the number of policy tokens of the responses on this
# rank, concatenated. Every rank has the metadata of all responses (`RolloutMeta`). The tokens of a response are on one
# rank: first on the rank that generated the response, then on the rank that trains on it (`redistribute`). Sums over
# the step are all-reduced.

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Experience:
    """The responses of a step: the metadata of all responses, and the tokens of the responses on this rank."""

    metas: Sequence[RolloutMeta]
    """The metadata of all responses of the step, ordered by prompt and sample. The index of a response in this list is
    called its number."""
    prompts: Mapping[int, Prompt]
    """The prompts of the step, by prompt index."""
    local_numbers: Sequence[int]
    """The numbers (indices in `metas`) of the responses on this rank, in ascending order."""
    rollouts: list[Rollout]
    sequences_of: list[list[Example]]
    """The training sequences of each response: one, or one per row of its trajectory."""
    sequence_K: torch.Tensor
    """For each token, the index in `metas` of the response that contains the token."""
    group_S: torch.Tensor
    rollout_logprobs_K: torch.Tensor
    """The log-probs that the inference engine returned."""
    scores_S: torch.Tensor
    token_rewards_K: torch.Tensor
    """The parts of the scores that are assigned to tokens before the last token of a response."""
    baseline_S: torch.Tensor | None
    world: World
    """The ranks over which the responses are distributed. The world size is 1 if all responses are on this rank."""

    @property
    def sequences(self) -> int:
        return len(self.metas)

    @property
    def reduce(self) -> StepReduce:
        """Functions that reduce the values of this rank over all ranks."""
        return SINGLE_PROCESS if self.world.size == 1 else StepReduce(self.world.sum_tensor, self.world.max_tensor)

    @cached_property
    def num_response_tokens_S(self) -> torch.Tensor:
        """The number of policy tokens of every response of the step."""
        return torch.tensor([meta.num_response_tokens for meta in self.metas], dtype=torch.long)

    @property
    def last_K(self) -> torch.Tensor:
        """The index of the last token of each response on this rank."""
        return self.num_response_tokens_S[list(self.local_numbers)].cumsum(0) - 1

    def responses_to(self, first: int, last: int) -> slice:
        """Returns the range of the indices in `metas` of all responses to the prompts from `first` up to, but not
        including, `last`."""
        inside = [i for i, meta in enumerate(self.metas) if first <= meta.prompt_index < last]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    def outlines(self, responses: slice) -> list[Outline]:
        return [Outline(one.prompt_index, one.lengths[0], one.shared, one.lengths[1:]) for one in self.metas[responses]]

    def local_tokens(self, responses: slice) -> slice:
        """Returns the tokens of `responses` as a slice of the vectors over the tokens of this rank."""
        before = [number for number in self.local_numbers if number < responses.start]
        inside = [number for number in self.local_numbers if responses.start <= number < responses.stop]
        start = int(self.num_response_tokens_S[before].sum())
        return slice(start, start + int(self.num_response_tokens_S[inside].sum()))

    def all_gather(self, vector_K: torch.Tensor, responses: slice | None = None) -> torch.Tensor:
        """All-gathers a vector over the tokens of this rank. Returns a vector over all tokens of the step, or of a
        range of responses."""
        span = responses or slice(0, self.sequences)
        if self.world.size == 1:
            return vector_K
        gathered = vector_K.new_zeros(int(self.num_response_tokens_S[span].sum()))
        gathered[self.local_positions(span)] = vector_K
        return self.world.sum_tensor(gathered)

    def local_positions(self, responses: slice) -> torch.Tensor:
        """Returns the indices of this rank's tokens in a vector over all tokens of a range of responses."""
        ends_S = self.num_response_tokens_S[responses].cumsum(0)
        starts_S = ends_S - self.num_response_tokens_S[responses]
        inside = [n - responses.start for n in self.local_numbers if responses.start <= n < responses.stop]
        runs = [torch.arange(int(starts_S[n]), int(ends_S[n])) for n in inside]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)

    def all_rollouts(self) -> list[Rollout]:
        """Returns all responses of the step. All ranks must call this function."""
        return [rollout for rollout, _ in self.all_rollouts_and_examples()]

    @property
    def examples(self) -> list[Example]:
        """The training sequences of all responses on this rank. The concatenation of their targets has the order of the
        vectors over tokens."""
        return [example for sequences in self.sequences_of for example in sequences]

    def all_rollouts_and_examples(self) -> list[tuple[Rollout, list[Example]]]:
        """Returns all responses of the step with their training sequences. All ranks must call this function."""
        pairs = zip(self.rollouts, self.sequences_of, strict=True)
        shares = self.world.gather(list(zip(self.local_numbers, pairs, strict=True)))
        return [pair for _, pair in sorted(dict(one for share in shares for one in share).items(), key=itemgetter(0))]

    def turns(self, discount: float, weight: float) -> TrajectoryTurns:
        """Returns the turns of all trajectories of the step, and the turn of each token on this rank. Turns without an
        anchor have a state of their own."""
        counts_S = torch.tensor([len(meta.anchors) for meta in self.metas], dtype=torch.long)
        first_S = counts_S.cumsum(0) - counts_S
        turn_K = [
            torch.repeat_interleave(
                int(first_S[number]) + torch.arange(len(rollout.turn_tokens)), torch.tensor(rollout.turn_tokens)
            )
            for number, rollout in zip(self.local_numbers, self.rollouts, strict=True)
        ]
        states: dict[Hashable, int] = {}
        state_U = [
            states.setdefault(len(states) if anchor is None else (meta.prompt_index, anchor), len(states))
            for meta in self.metas
            for anchor in meta.anchors
        ]
        rewards_U = [reward for meta in self.metas for reward in meta.turn_rewards]
        return TrajectoryTurns(
            torch.cat(turn_K) if turn_K else torch.empty(0, dtype=torch.long),
            torch.repeat_interleave(torch.arange(len(self.metas)), counts_S),
            torch.tensor(state_U, dtype=torch.long),
            discount,
            weight,
            torch.tensor(rewards_U, dtype=torch.float64) if len(rewards_U) == len(state_U) else None,
        )

    def with_local_rollouts(self, local: Mapping[int, Rollout]) -> Experience:
        """Returns the experience of the same step, but with other responses on this rank. `local` maps the index of a
        response in `metas` to the response."""
        return _experience(self.metas, self.prompts, local, self.baseline_S, self.world)


def build_experience(rollouts: Sequence[Rollout], baselines: dict[int, float] | None = None) -> Experience:
    """Returns the experience of a run with one process, which has all responses."""
    prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
    return build_spread_experience(rollout_metas(rollouts), prompts, rollouts, baselines, World())


def build_spread_experience(
    metas: Sequence[RolloutMeta],
    prompts: Mapping[int, Prompt],
    local: Sequence[Rollout],
    baselines: dict[int, float] | None,
    world: World,
) -> Experience:
    """Returns the experience of responses that are distributed over the ranks. Responses without a score or a baseline
    are excluded. A response without policy tokens is an error, because its score cannot be assigned to a token."""
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
    """Returns the metadata of responses. `rollouts` must contain all responses to each of its prompts."""
    found: list[RolloutMeta] = []
    for _, members in groupby(rollouts, key=lambda rollout: rollout.prompt_index):
        group = list(members)
        scored = [one for rollout in group if isinstance(rollout.score, Score) for one in make_examples(rollout)]
        shared = common_prompt(scored) if scored else 0
        found += [_meta(rollout, shared) for rollout in group]
    return found


def _meta(rollout: Rollout, shared: int) -> RolloutMeta:
    score = replace(rollout.score, steps=(), tokens=()) if isinstance(rollout.score, Score) else rollout.score
    return RolloutMeta(
        rollout.prompt_index,
        rollout.sample,
        len(rollout.prompt.ids),
        len(rollout.ids),
        rollout.num_response_tokens,
        shared,
        rollout.stop,
        score,
        {} if rollout.trajectory is None else rollout.trajectory.named_metrics(),
        tuple(len(row.ids) for row in rollout.rows),
        _anchors(rollout),
        _turn_rewards(rollout),
    )


def _anchors(rollout: Rollout) -> tuple[str | None, ...]:
    """Returns a digest of the state of each turn, because the text of a state may be long and every rank has it."""
    if rollout.trajectory is None or not rollout.trajectory.turns:
        return (None,) * len(rollout.turn_tokens)
    anchors = [turn.anchor for turn in rollout.trajectory.turns]
    return tuple(None if one is None else blake2b(one.encode(), digest_size=8).hexdigest() for one in anchors)


def _turn_rewards(rollout: Rollout) -> tuple[float, ...]:
    if rollout.trajectory is None or not rollout.trajectory.turns or not isinstance(rollout.score, Score):
        return ()
    ends, total = list(accumulate(rollout.turn_tokens)), rollout.score.total
    rewards = [0.0] * len(ends)
    for token, share in rollout.token_rewards:
        rewards[min(bisect_right(ends, _policy_token(rollout, token)), len(ends) - 1)] += share
    rest = total - math.fsum(share for _, share in rollout.token_rewards)
    # The total is a rounded sum. If nothing but rounding is left, the last turn gets nothing.
    if abs(rest) > 1e-12 * max(abs(total), *map(abs, rewards)):
        rewards[-1] += rest
    return tuple(rewards)


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Returns R_t = r_t + discount R_{t+1} for each turn."""
    return list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))[::-1]


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
        sequences_of=[make_examples(rollout) for rollout in rollouts],
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
    """Returns one of the separate rewards of a response. `key` is the recipe key that contains the name of the
    reward."""
    assert isinstance(meta.score, Score)
    if name not in meta.score.parts:
        raise Refusal.at(
            key,
            f"response {meta.sample} to {prompts[meta.prompt_index].question.origin} has no reward {name!r} in its "
            "score",
            f"its rewards are: {', '.join(meta.score.parts) or 'none'}; the last checkpoint is untouched",
            code="missing-reward-part",
        )
    return meta.score.parts[name]


def _refuse_empty(metas: Sequence[RolloutMeta], prompts: Mapping[int, Prompt]) -> None:
    problems = [
        Problem(
            f"response {meta.sample} to {prompts[meta.prompt_index].question.origin}",
            "the response has no token of the policy, so its score cannot be assigned to a token",
            "the engine must return at least the token that ended the response; the last checkpoint is untouched",
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
            token_rewards_K[start + _policy_token(rollout, token)] += share
        start += rollout.num_response_tokens
    return token_rewards_K


def _policy_token(rollout: Rollout, token: int) -> int:
    """Returns the index of a token among the policy tokens. A reward at a token of the environment is assigned to the
    last policy token before it."""
    return max(sum(rollout.loss_mask[: token + 1]) - 1, 0)


def _policy_logprobs(rollout: Rollout) -> np.ndarray:
    """Returns the log-probs that the engine returned for the policy tokens of a response."""
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    return logprobs[np.asarray(rollout.loss_mask, dtype=bool)]


def make_examples(rollout: Rollout) -> list[Example]:
    """Returns prompt and response as training sequences whose loss masks select only the policy tokens: one sequence,
    or one per row of a trajectory with several rows."""
    return rollout.sequences


# The code below splits a step into mini-batches, and computes log-probs and values before the first update.


@dataclass(frozen=True)
class UpdateRows:
    """The responses of one optimizer update, and how they are packed on each data-parallel rank."""

    responses: slice
    rows_by_rank: list[list[PackedRow]]
    """The packed rows of each data-parallel rank. A row refers to a response by its index within the update."""

    def owners(self) -> Iterator[tuple[int, int]]:
        """Yields for each response the data-parallel rank that trains on it, and the index of the response in the
        step."""
        for rank, rows in enumerate(self.rows_by_rank):
            yield from ((rank, self.responses.start + packed.number) for row in rows for packed in row)


@dataclass(frozen=True)
class UpdatePlan:
    """The responses of one optimizer update, and the micro-batches of this rank."""

    responses: slice
    tokens: slice
    """The slice of the update's tokens in the token vectors of this rank."""
    batches: list[MicroBatch]
    local_only = True

    @property
    def targets(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of the models for every token on this rank. A vector is None if the recipe does not need it."""

    old_K: torch.Tensor | None
    """The old log-probs of the importance ratio: those of the policy before the first update, or those of the
    engine."""
    reference_K: torch.Tensor | None
    values_K: torch.Tensor | None
    trainer_K: torch.Tensor | None = None
    """The log-probs of the policy before the first update, if `old_K` has the log-probs of the engine."""
    squares_K: torch.Tensor | None = None
    """For each token, the sum of the squared probabilities over the vocabulary."""


def pack_minibatches(experience: Experience, models: Models, batch: Batch) -> list[UpdateRows]:
    """Splits the prompts of a step into optimizer updates, and packs the responses of each update. Responses to the
    same prompt in a packed row share the tokens of the prompt."""
    each = batch.prompts_per_update or batch.prompts
    runs = [experience.responses_to(first, first + each) for first in range(0, batch.prompts, each)]
    return [UpdateRows(run, models.pack(experience.outlines(run))) for run in runs if run.stop > run.start]


def plan_updates(experience: Experience, updates: Sequence[UpdateRows], models: Models) -> list[UpdatePlan]:
    """Returns the micro-batches of this rank. The rank must already have the responses of its micro-batches. Old and
    new log-probs are computed in the same micro-batches, so their ratio is exactly 1 before an update."""
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
                [experience.sequences_of[index[number]] for number in numbers],
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
    replay = RoutingReplay(models.module, recipe, batches := [plan.batches for plan in plans])
    if old_needed(recipe, len(plans)):
        with phases("old_log_prob"), replay.old_pass():
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
    replay.into(batches)
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
    """Compares the log-probs that the engine returned with the log-probs of the trainer, before any update. The engine
    and the trainer have the same weights. If the log-probs of the trainer are not yet computed (`old_needed`), this
    function computes them. Nothing is compared if there is no limit for the difference."""
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
            "check for a proxy or load balancer that mixes up answers, and for settings that change how the server "
            "samples. Set a larger limit to accept the difference, or null to disable the check. The last checkpoint "
            "is untouched",
            code="logprobs-differ",
        )
    return {"training/rollout_logprob_diff_mean": mean}


# Responses are sent to other ranks without their prompts, because every rank has all prompts. A prompt that an
# environment wrote is sent.
_NO_PROMPT = Prompt(Question("", [], "", Origin("", 0)), ())


def redistribute(experience: Experience, updates: Sequence[UpdateRows], world: World) -> Experience:
    """Sends every response from the rank that generated it to the ranks that train on it."""
    if world.size == 1:
        return experience
    owner = {number: dp_rank for update in updates for dp_rank, number in update.owners()}
    parcels: list[list[tuple[int, Rollout]]] = [[] for _ in range(world.size)]
    for number, rollout in zip(experience.local_numbers, experience.rollouts, strict=True):
        for rank in world.ranks_of(owner[number]):
            sent = rollout if rollout.trajectory is not None else replace(rollout, prompt=_NO_PROMPT)
            parcels[rank].append((number, sent))
    arrived = [pair for parcel in world.exchange(parcels) for pair in parcel]
    return experience.with_local_rollouts(
        {
            number: replace(rollout, prompt=experience.prompts[rollout.prompt_index])
            if rollout.trajectory is None
            else rollout
            for number, rollout in arrived
        }
    )
