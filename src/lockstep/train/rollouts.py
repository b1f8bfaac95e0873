"""The rollouts of a step: prompts taken, answered, judged, and, with dynamic sampling, replaced where all agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lockstep.data.dataset import Loader
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.reward.row_rewards import shaped
from lockstep.reward.scorer import Scorer
from lockstep.rollout.collect import everyone
from lockstep.rollout.engine import training_sampling
from lockstep.rollout.generator import Generator
from lockstep.run.metrics import PhaseTimer
from lockstep.train import rollout_checks as checks
from lockstep.train.experience import Experience, spread_experience, summarised
from lockstep.types import FAILED, Failure, Prompt, Rollout, Sampling, Score, Summary


@dataclass(frozen=True)
class Rollouts:
    """The responses to learn from, those that could not be scored, and where the next step begins in the data."""

    experience: Experience
    failed: checks.Unscored
    position: int
    metrics: dict[str, float]
    generated: list[Rollout] | None = None
    """What the engine answered, where a replay learns from recorded responses instead."""
    judged_S: torch.Tensor | None = None
    """What this run's rewards say of recorded responses that are learned from."""


def take_rollouts(
    loader: Loader[Prompt], position: int, generator: Generator, scorer: Scorer, recipe: Recipe, phases: PhaseTimer
) -> Rollouts:
    """The next prompts, from `position` in the data on, answered and scored."""
    answers = _Answers(generator, scorer, recipe, phases)
    wanted, settings = recipe.batch.prompts, recipe.algorithm.dynamic_sampling
    max_batches = settings.max_gen_batches
    kept: list[list[Summary]] = []
    uniform: list[list[Summary]] = []
    prompts: dict[int, Prompt] = {}
    used = 0
    while len(kept) < wanted and used < max_batches:
        missing = wanted - len(kept)
        taken = dict(enumerate(loader.between(position, position + missing), start=position))
        prompts |= taken
        position += missing
        used += 1
        for group in _groups(answers.sampled(taken)):
            (kept if max_batches == 1 or checks.teaches(group, prompts, settings) else uniform).append(group)
    # The limit of batches is reached: groups that teach nothing fill the step, so that its size stays what it is.
    filled = kept + uniform[: wanted - len(kept)]
    # A prompt was known by its position in the data; from here on by its index in the step.
    index = {group[0].prompt_index: number for number, group in enumerate(filled)}
    rollouts = [replace(one, prompt_index=index[one.prompt_index]) for group in filled for one in group]
    here = [replace(one, prompt_index=index[one.prompt_index]) for one in answers.here if one.prompt_index in index]
    answers.here.clear()
    asked = {number: prompts[at] for at, number in index.items()}
    baselines = answers.baselines(asked) if estimator_row(recipe.algorithm.advantage).greedy_baseline else None
    failed = answers.failed()
    checks.refuse_failures(failed, len(answers.every), recipe.reward.max_failures)
    experience = spread_experience(rollouts, asked, here, baselines, generator.world)
    checks.refuse_nothing_left(failed, len(answers.every), experience.sequences)
    metrics = checks.rollout_metrics(answers.every, rollouts, failed.count)
    metrics |= checks.straggler_metrics(generator.world.gather((answers.seconds, answers.taken)))
    if max_batches > 1:
        metrics |= {
            "train/num_gen_batches": float(used),
            "train/uniform_groups": float(len(uniform)),
            "train/filled_groups": float(len(filled) - min(len(kept), wanted)),
        }
    return Rollouts(experience, failed, position, metrics)


@dataclass
class _Answers:
    """Responses with the score that they are trained on: what is known of all, and those that this rank generated."""

    generator: Generator
    scorer: Scorer
    recipe: Recipe
    phases: PhaseTimer
    here: list[Rollout] = field(default_factory=list)
    every: list[Summary] = field(default_factory=list)
    seconds: float = 0.0
    taken: int = 0
    _failed: list[list[Rollout]] = field(default_factory=list)
    """Of those here, by call."""

    @property
    def sampling(self) -> Sampling:
        return training_sampling(self.recipe, self.generator.stop_ids)

    def sampled(self, prompts: Mapping[int, Prompt]) -> list[Summary]:
        """Of prompts by their position in the data, which is their key too."""
        own, summaries = self._generate(prompts, self.recipe.rollout.n, self.sampling)
        self.here += own
        return summaries

    def baselines(self, prompts: Mapping[int, Prompt]) -> dict[int, float]:
        """The score of the likeliest response to each prompt of the step; none where it could not be scored."""
        _, greedy = self._generate(prompts, 1, replace(self.sampling, temperature=0.0))
        return {one.prompt_index: one.score.total for one in greedy if isinstance(one.score, Score)}

    def failed(self) -> checks.Unscored:
        """Those that could not be scored, the first of them whole on every rank."""
        count = sum(isinstance(one.score, Failure) for one in self.every)
        if not count:
            return checks.Unscored(0, [])
        most = max(self.recipe.log.samples, 1)
        calls = (everyone(own[:most], self.generator.world) for own in self._failed)
        return checks.Unscored(count, [one for call in calls for one in call][:most])

    def _generate(
        self, prompts: Mapping[int, Prompt], n: int, sampling: Sampling
    ) -> tuple[list[Rollout], list[Summary]]:
        indices = list(prompts)
        made = self.generator.generate_here(list(prompts.values()), indices, n, sampling, self.scorer, self.phases)
        self.seconds += made.seconds
        self.taken += made.taken
        own = [shaped(replace(one, prompt_index=indices[one.prompt_index]), self.recipe) for one in made.rollouts]
        with self.phases("reward"):  # where the ranks wait for the last of them
            shares = self.generator.world.gather(summarised(own))
        summaries = sorted((one for share in shares for one in share), key=lambda one: (one.prompt_index, one.sample))
        for group in _groups([one for one in summaries if one.stop != FAILED]):
            self.generator.lengths.learn(prompts[group[0].prompt_index], sum(one.tokens for one in group) / len(group))
        self.every += summaries
        self._failed.append([one for one in own if isinstance(one.score, Failure)])
        return own, summaries


def _groups(rollouts: Sequence[Summary]) -> list[list[Summary]]:
    groups: dict[int, list[Summary]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_index, []).append(rollout)
    return list(groups.values())
