"""The responses of a step as flat vectors, one entry for each token that the policy produced.

Shapes: S responses of the step, K tokens of those that are here, one response after another. What is known of every
response everywhere is small (`Summary`); its tokens, and all that is said of them, are on one rank: at first where they
were generated, then where they are trained (`moving.py`). What is counted over the step comes from sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from lockstep.algorithms.reduce import EVERYTHING, WholeStep
from lockstep.data.batching import Outline, common_prompt
from lockstep.errors import Problem, Refusal, shortened
from lockstep.parallel.world import World
from lockstep.types import Example, Prompt, Rollout, Score, Summary

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Experience:
    summaries: Sequence[Summary]
    """Of all responses of the step, by prompt and sample; a response's number is its place here."""
    prompts: Mapping[int, Prompt]
    """By their index in the step."""
    numbers: Sequence[int]
    """Of the responses that are here, in order."""
    rollouts: list[Rollout]
    examples: list[Example]
    sequence_K: torch.Tensor
    """The number of a token's response."""
    group_S: torch.Tensor
    engine_K: torch.Tensor
    """The engine's log-probabilities."""
    scores_S: torch.Tensor
    earned_K: torch.Tensor
    """The shares of the scores that belong to a token before the last."""
    baseline_S: torch.Tensor | None
    world: World
    """The ranks that the responses are spread over; one of its own where all of them are here."""

    @property
    def sequences(self) -> int:
        return len(self.summaries)

    @property
    def whole(self) -> WholeStep:
        """From sums over what is here to those over the step."""
        return EVERYTHING if self.world.size == 1 else WholeStep(self.world.sum_tensor, self.world.max_tensor)

    @cached_property
    def written_S(self) -> torch.Tensor:
        """Tokens that the policy wrote, of every response."""
        return torch.tensor([summary.written for summary in self.summaries], dtype=torch.long)

    @property
    def last_K(self) -> torch.Tensor:
        """Where each response that is here ends."""
        return self.written_S[list(self.numbers)].cumsum(0) - 1

    def of_prompts(self, first: int, last: int) -> slice:
        """Numbers of the responses to the prompts of index `first` up to `last`."""
        inside = [i for i, summary in enumerate(self.summaries) if first <= summary.prompt_index < last]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    def outlines(self, responses: slice) -> list[Outline]:
        return [Outline(one.prompt_index, one.length, one.shared) for one in self.summaries[responses]]

    def tokens_of(self, responses: slice) -> slice:
        """Tokens that are here of a run of responses."""
        before = [number for number in self.numbers if number < responses.start]
        inside = [number for number in self.numbers if responses.start <= number < responses.stop]
        start = int(self.written_S[before].sum())
        return slice(start, start + int(self.written_S[inside].sum()))

    def everywhere(self, vector_K: torch.Tensor, responses: slice | None = None) -> torch.Tensor:
        """Numbers for the tokens that are here as those for all tokens of the step, or of a run of responses; on every
        rank, so only for what cannot be had from sums."""
        every = responses or slice(0, self.sequences)
        if self.world.size == 1:
            return vector_K
        whole = vector_K.new_zeros(int(self.written_S[every].sum()))
        whole[self.places_of(every)] = vector_K
        return self.world.sum_tensor(whole)

    def places_of(self, responses: slice) -> torch.Tensor:
        """Where the tokens that are here of a run of responses stand among all tokens of the run."""
        ends_S = self.written_S[responses].cumsum(0)
        starts_S = ends_S - self.written_S[responses]
        inside = [n - responses.start for n in self.numbers if responses.start <= n < responses.stop]
        runs = [torch.arange(int(starts_S[n]), int(ends_S[n])) for n in inside]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)

    def everyone(self) -> list[Rollout]:
        """All responses of the step, on every rank: for a tape and for a replay."""
        return [rollout for rollout, _ in self.everything()]

    def everything(self) -> list[tuple[Rollout, Example]]:
        """All responses and what is trained of them, on every rank."""
        pairs = zip(self.rollouts, self.examples, strict=True)
        shares = self.world.gather(list(zip(self.numbers, pairs, strict=True)))
        return [pair for _, pair in sorted(dict(one for share in shares for one in share).items(), key=itemgetter(0))]

    def with_own(self, own: Mapping[int, Rollout]) -> Experience:
        """The same step where other responses are here, by their numbers."""
        return _experience(self.summaries, self.prompts, own, self.baseline_S, self.world)


def experience_of(rollouts: Sequence[Rollout], baselines: dict[int, float] | None = None) -> Experience:
    """What can be learned from, where all responses are here."""
    prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
    return spread_experience(summarised(rollouts), prompts, rollouts, baselines, World())


def spread_experience(
    summaries: Sequence[Summary],
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


def summarised(rollouts: Sequence[Rollout]) -> list[Summary]:
    """What is known everywhere of these responses, among which are all to a prompt or none."""
    found: list[Summary] = []
    for _, members in groupby(rollouts, key=lambda rollout: rollout.prompt_index):
        group = list(members)
        scored = [example_of(rollout) for rollout in group if isinstance(rollout.score, Score)]
        shared = common_prompt(scored) if scored else 0
        found += [_summary(rollout, shared) for rollout in group]
    return found


def _summary(rollout: Rollout, shared: int) -> Summary:
    score = replace(rollout.score, steps=()) if isinstance(rollout.score, Score) else rollout.score
    return Summary(
        rollout.prompt_index,
        rollout.sample,
        len(rollout.prompt.ids),
        len(rollout.ids),
        rollout.written,
        shared,
        rollout.stop,
        score,
    )


def _experience(
    summaries: Sequence[Summary],
    prompts: Mapping[int, Prompt],
    own: Mapping[int, Rollout],
    baseline_S: torch.Tensor | None,
    world: World,
) -> Experience:
    numbers = sorted(own)
    here = [own[number] for number in numbers]
    lengths = torch.tensor([rollout.written for rollout in here], dtype=torch.long)
    return Experience(
        summaries=summaries,
        prompts=prompts,
        numbers=numbers,
        rollouts=here,
        examples=[example_of(rollout) for rollout in here],
        sequence_K=torch.repeat_interleave(torch.tensor(numbers, dtype=torch.long), lengths),
        group_S=torch.tensor([summary.prompt_index for summary in summaries], dtype=torch.long),
        engine_K=torch.from_numpy(np.concatenate([_written(rollout) for rollout in here] or [_NONE])),
        scores_S=torch.tensor([s.score.total for s in summaries if isinstance(s.score, Score)], dtype=torch.float32),
        earned_K=_earned(here, int(lengths.sum())),
        baseline_S=baseline_S,
        world=world,
    )


def part_of(summary: Summary, prompts: Mapping[int, Prompt], name: str, key: str) -> float:
    """One part of what a response earned. `key` is where the recipe names it."""
    assert isinstance(summary.score, Score)
    if name not in summary.score.parts:
        raise Refusal.at(
            key,
            f"response {summary.sample} to {prompts[summary.prompt_index].question.origin} has no part {name!r} in its "
            "score",
            f"it has {', '.join(summary.score.parts) or 'none'}; the last checkpoint is untouched",
            code="missing-reward-part",
        )
    return summary.score.parts[name]


def _refuse_empty(summaries: Sequence[Summary], prompts: Mapping[int, Prompt]) -> None:
    problems = [
        Problem(
            f"response {summary.sample} to {prompts[summary.prompt_index].question.origin}",
            "has no token of the policy's, so there is none to carry its score",
            "an engine returns at least the token that ended the response; the last checkpoint is untouched",
            code="empty-response",
        )
        for summary in summaries
        if not summary.written
    ]
    if problems:
        raise Refusal(shortened(problems, "responses"))


def _earned(rollouts: Sequence[Rollout], tokens: int) -> torch.Tensor:
    earned_K, start = torch.zeros(tokens), 0
    for rollout in rollouts:
        for token, share in rollout.earned:
            # What is earned while an environment writes belongs to the policy's last token before it.
            earned_K[start + max(sum(rollout.trained[: token + 1]) - 1, 0)] += share
        start += rollout.written
    return earned_K


def _written(rollout: Rollout) -> np.ndarray:
    """The engine's log-probabilities of the policy's own tokens."""
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    return logprobs[np.asarray(rollout.trained, dtype=bool)]


def example_of(rollout: Rollout) -> Example:
    """The whole sequence, of which the policy's own tokens are trained."""
    prompt = list(rollout.prompt.ids)
    return Example(prompt + rollout.ids, [0] * len(prompt) + list(rollout.trained), rollout.prompt.question.origin)
