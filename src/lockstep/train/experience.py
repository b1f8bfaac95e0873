"""The responses of a step as flat vectors, one entry for each token that the policy produced.

Shapes: K tokens of all responses, one response after another; S responses. Every rank holds all of them, so what is
computed from them is global by itself; only forward passes are divided over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.errors import Problem, Refusal, shortened
from lockstep.types import Example, Failure, Rollout, Score

_NONE = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Experience:
    rollouts: list[Rollout]
    examples: list[Example]
    sequence_K: torch.Tensor
    group_S: torch.Tensor
    engine_K: torch.Tensor
    """The engine's log-probabilities."""
    scores_S: torch.Tensor
    earned_K: torch.Tensor
    """The shares of the scores that belong to a token before the last."""
    baseline_S: torch.Tensor | None

    @property
    def sequences(self) -> int:
        return len(self.examples)

    @property
    def last_K(self) -> torch.Tensor:
        """Where each response ends."""
        lengths = torch.tensor([rollout.written for rollout in self.rollouts])
        return lengths.cumsum(0) - 1

    def of_prompts(self, first: int, last: int) -> slice:
        """Responses to the prompts of index `first` up to `last`."""
        indices = [rollout.prompt_index for rollout in self.rollouts]
        inside = [i for i, index in enumerate(indices) if first <= index < last]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    def groups(self, responses: slice) -> list[list[Example]]:
        """A run of responses, those to one prompt together."""
        groups: list[list[Example]] = []
        before: int | None = None
        for rollout, example in zip(self.rollouts[responses], self.examples[responses], strict=True):
            if rollout.prompt_index != before:
                groups.append([])
            groups[-1].append(example)
            before = rollout.prompt_index
        return groups

    def tokens_of(self, responses: slice) -> slice:
        """Tokens of a run of responses."""
        lengths = [rollout.written for rollout in self.rollouts]
        return slice(sum(lengths[: responses.start]), sum(lengths[: responses.stop]))


def experience_of(rollouts: Sequence[Rollout], baselines: dict[int, float] | None = None) -> Experience:
    """What can be learned from: responses without a score, or without their baseline, are left out.

    A response without a token is refused: nothing could carry its score, which would fall on its neighbour.
    """
    scored = [
        rollout
        for rollout in rollouts
        if not isinstance(rollout.score, Failure) and (baselines is None or rollout.prompt_index in baselines)
    ]
    _refuse_empty(scored)
    lengths = torch.tensor([rollout.written for rollout in scored], dtype=torch.long)
    return Experience(
        rollouts=scored,
        examples=[_example(rollout) for rollout in scored],
        sequence_K=torch.repeat_interleave(torch.arange(len(scored)), lengths),
        group_S=torch.tensor([rollout.prompt_index for rollout in scored], dtype=torch.long),
        engine_K=torch.from_numpy(np.concatenate([_written(rollout) for rollout in scored] or [_NONE])),
        scores_S=torch.tensor([r.score.total for r in scored if isinstance(r.score, Score)], dtype=torch.float32),
        earned_K=_earned(scored, int(lengths.sum())),
        baseline_S=None if baselines is None else torch.tensor([baselines[rollout.prompt_index] for rollout in scored]),
    )


def part_of(rollout: Rollout, name: str, key: str) -> float:
    """One part of what a response earned. `key` is where the recipe names it."""
    assert isinstance(rollout.score, Score)
    if name not in rollout.score.parts:
        raise Refusal.at(
            key,
            f"response {rollout.sample} to {rollout.prompt.question.origin} has no part {name!r} in its score",
            f"it has {', '.join(rollout.score.parts) or 'none'}; the last checkpoint is untouched",
        )
    return rollout.score.parts[name]


def _refuse_empty(rollouts: Sequence[Rollout]) -> None:
    problems = [
        Problem(
            f"response {rollout.sample} to {rollout.prompt.question.origin}",
            "has no token of the policy's, so there is none to carry its score",
            "an engine returns at least the token that ended the response; the last checkpoint is untouched",
        )
        for rollout in rollouts
        if not rollout.written
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


def _example(rollout: Rollout) -> Example:
    prompt = list(rollout.prompt.ids)
    return Example(prompt + rollout.ids, [0] * len(prompt) + list(rollout.trained), rollout.prompt.question.origin)
