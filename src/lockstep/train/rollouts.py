"""The rollouts of a step: prompts taken, answered, judged, and, with dynamic sampling, replaced where all agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.advantage import informative
from lockstep.data.dataset import Loader
from lockstep.recipe import Recipe
from lockstep.recipe.online import DynamicSampling
from lockstep.recipe.rows import estimator_row
from lockstep.reward.scorer import Scorer
from lockstep.reward.shaping import shaped
from lockstep.rollout.generator import Generator
from lockstep.rollout.sampling import training_sampling
from lockstep.run.metrics import PhaseTimer
from lockstep.train.experience import Experience, experience_of, part_of
from lockstep.train.failures import refuse_failures, refuse_nothing_left
from lockstep.train.rollout_metrics import rollout_metrics
from lockstep.types import Failure, Prompt, Rollout, Sampling, Score


@dataclass(frozen=True)
class Rollouts:
    """The responses to learn from, those that could not be scored, and where the next step begins in the data."""

    experience: Experience
    failed: list[Rollout]
    position: int
    metrics: dict[str, float]
    generated: list[Rollout]
    """What the engine answered. A replay learns from recorded responses instead."""
    judged_S: torch.Tensor
    """What the rewards say of the responses that are learned from."""

    @classmethod
    def of(cls, experience: Experience, failed: list[Rollout], position: int, metrics: dict[str, float]) -> Rollouts:
        """For a run that learns from what it generated."""
        return cls(experience, failed, position, metrics, experience.rollouts, experience.scores_S)


def take_rollouts(
    loader: Loader[Prompt], position: int, generator: Generator, scorer: Scorer, recipe: Recipe, phases: PhaseTimer
) -> Rollouts:
    """The next prompts, from `position` in the data on, answered and scored."""
    answers = _Answers(generator, scorer, recipe, phases)
    wanted, settings = recipe.batch.prompts, recipe.algorithm.dynamic_sampling
    rounds = settings.rounds
    kept: list[list[Rollout]] = []
    uniform: list[list[Rollout]] = []
    every: list[Rollout] = []
    used = 0
    while len(kept) < wanted and used < rounds:
        missing = wanted - len(kept)
        answered = answers.sampled(loader.between(position, position + missing), position)
        position += missing
        used += 1
        every += answered
        for group in _groups(answered):
            (kept if rounds == 1 or _teaches(group, settings) else uniform).append(group)
    # The rounds are used up: groups that teach nothing fill the step, so that its size stays what it is.
    filled = kept + uniform[: wanted - len(kept)]
    rollouts = [replace(rollout, prompt_index=index) for index, group in enumerate(filled) for rollout in group]
    greedy = answers.greedy(rollouts) if estimator_row(recipe.algorithm.advantage).greedy_baseline else None
    every += greedy or []
    failed = [rollout for rollout in every if isinstance(rollout.score, Failure)]
    refuse_failures(failed, len(every), recipe.reward.max_failures)
    experience = experience_of(rollouts, None if greedy is None else _baselines(greedy))
    refuse_nothing_left(failed, len(every), experience.sequences)
    metrics = rollout_metrics(every, rollouts, failed)
    if rounds > 1:
        metrics |= {
            "train/num_gen_batches": float(used),
            "train/uniform_groups": float(len(uniform)),
            "train/filled_groups": float(len(filled) - min(len(kept), wanted)),
        }
    return Rollouts.of(experience, failed, position, metrics)


@dataclass(frozen=True)
class _Answers:
    """Responses with the score that they are trained on."""

    generator: Generator
    scorer: Scorer
    recipe: Recipe
    phases: PhaseTimer

    @property
    def sampling(self) -> Sampling:
        return training_sampling(self.recipe, self.generator.stop_ids)

    def sampled(self, prompts: Sequence[Prompt], first_key: int) -> list[Rollout]:
        keys = [first_key + index for index in range(len(prompts))]
        return self._generate(prompts, keys, self.recipe.rollout.n, self.sampling)

    def greedy(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The likeliest response to each prompt of the step, at the prompt's index."""
        prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
        indices = sorted(prompts)
        greedy = self._generate([prompts[i] for i in indices], indices, 1, replace(self.sampling, temperature=0.0))
        return [replace(rollout, prompt_index=indices[rollout.prompt_index]) for rollout in greedy]

    def _generate(self, prompts: Sequence[Prompt], keys: Sequence[int], n: int, sampling: Sampling) -> list[Rollout]:
        rollouts = self.generator.generate(prompts, keys, n, sampling, self.scorer, self.phases)
        return [shaped(rollout, self.recipe) for rollout in rollouts]


def _baselines(greedy: Sequence[Rollout]) -> dict[int, float]:
    """The greedy response's score by the prompt's index; where it could not be scored there is none."""
    return {rollout.prompt_index: rollout.score.total for rollout in greedy if isinstance(rollout.score, Score)}


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_index, []).append(rollout)
    return list(groups.values())


def _teaches(group: Sequence[Rollout], settings: DynamicSampling) -> bool:
    """Scores that are not all equal, or whose mean is between two bounds."""
    scores = torch.tensor([_compared(r, r.score, settings.metric) for r in group if isinstance(r.score, Score)])
    if settings.between is not None:
        low, high = settings.between
        return len(scores) > 0 and low < float(scores.double().mean()) < high
    return bool(informative(scores, torch.zeros(len(scores), dtype=torch.long)).any())


def _compared(rollout: Rollout, score: Score, metric: str | None) -> float:
    return score.total if metric is None else part_of(rollout, metric, "algorithm.dynamic_sampling.metric")
