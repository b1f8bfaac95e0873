"""Generates and scores the rollouts of a step. Dynamic sampling replaces groups whose responses have equal scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lockstep.data.dataset import BatchSource
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.reward.row_rewards import shaped
from lockstep.reward.scorer import Scorer
from lockstep.rollout.collect import everyone
from lockstep.rollout.engine import training_sampling
from lockstep.rollout.generator import Generator
from lockstep.run.metrics import PhaseTimer
from lockstep.train import monitor as checks
from lockstep.train.experience import Experience, build_spread_experience, rollout_metas
from lockstep.types import FAILED, Failure, Prompt, Rollout, RolloutMeta, Sampling, Score


@dataclass(frozen=True)
class Rollouts:
    """The scored and the failed responses of a step, and the position in the dataset at which the next step starts."""

    experience: Experience
    failed: checks.Unscored
    position: int
    metrics: dict[str, float]
    generated: list[Rollout] | None = None
    """In a replay of a tape that trains on the recorded responses: the responses that this run generated."""
    rescored_S: torch.Tensor | None = None
    """Only in a replay of a tape: the scores that this run computed for the recorded responses."""


def take_rollouts(
    loader: BatchSource[Prompt], position: int, generator: Generator, scorer: Scorer, recipe: Recipe, phases: PhaseTimer
) -> Rollouts:
    """Generates and scores responses to the next prompts of the dataset, from index `position` on."""
    collector = _Collector(generator, scorer, recipe, phases)
    wanted, settings, used = recipe.batch.prompts, recipe.algorithm.dynamic_sampling, 0
    max_batches = settings.max_gen_batches
    kept: list[list[RolloutMeta]] = []
    uniform: list[list[RolloutMeta]] = []
    prompts: dict[int, Prompt] = {}
    while len(kept) < wanted and used < max_batches:
        missing = wanted - len(kept)
        taken = dict(enumerate(loader.between(position, position + missing), start=position))
        prompts |= taken
        position, used = position + missing, used + 1
        for group in _groups(collector.sample(taken)):
            (kept if max_batches == 1 or checks.has_signal(group, prompts, recipe.algorithm) else uniform).append(group)
    # If the limit of generation batches is reached, groups with equal scores fill the step to its full size.
    filled = kept + uniform[: wanted - len(kept)]
    # In `filled`, `prompt_index` is a position in the dataset. In `rollouts`, it is the prompt's index in the step.
    index = {group[0].prompt_index: number for number, group in enumerate(filled)}
    rollouts = [replace(one, prompt_index=index[one.prompt_index]) for group in filled for one in group]
    local = [replace(one, prompt_index=index[one.prompt_index]) for one in collector.local if one.prompt_index in index]
    collector.local.clear()
    step_prompts = {number: prompts[at] for at, number in index.items()}
    needs_baseline = estimator_row(recipe.algorithm.advantage).greedy_baseline
    baselines = collector.greedy_scores(step_prompts) if needs_baseline else None
    failed = collector.gather_failed()
    checks.refuse_failures(failed, len(collector.every), recipe.reward.max_failures)
    experience = build_spread_experience(rollouts, step_prompts, local, baselines, generator.world)
    checks.refuse_nothing_left(failed, len(collector.every), experience.sequences)
    metrics = checks.rollout_metrics(collector.every, rollouts, failed.count) | generator.take_sync_metrics()
    metrics |= checks.engine_metrics(generator.world.gather(generator.spent(collector.seconds, collector.taken)))
    if max_batches > 1:
        metrics |= {
            "train/num_gen_batches": float(used),
            "train/uniform_groups": float(len(uniform)),
            "train/filled_groups": float(len(filled) - min(len(kept), wanted)),
        }
    return Rollouts(experience, failed, position, metrics)


@dataclass
class _Collector:
    """Generates and scores the responses of a step. Stores all metadata, and the rollouts of this rank."""

    generator: Generator
    scorer: Scorer
    recipe: Recipe
    phases: PhaseTimer
    local: list[Rollout] = field(default_factory=list)
    every: list[RolloutMeta] = field(default_factory=list)
    seconds: float = 0.0
    taken: int = 0
    _failed: list[list[Rollout]] = field(default_factory=list)
    """The failed rollouts of this rank, for each call of `_generate`."""

    @property
    def sampling(self) -> Sampling:
        return training_sampling(self.recipe, self.generator.stop_ids)

    def sample(self, prompts: Mapping[int, Prompt]) -> list[RolloutMeta]:
        """Samples responses. The keys of `prompts` are positions in the dataset, which also seed the sampling noise."""
        local, metas = self._generate(prompts, self.recipe.rollout.n, self.sampling)
        self.local += local
        return metas

    def greedy_scores(self, prompts: Mapping[int, Prompt]) -> dict[int, float]:
        """Returns the score of the greedy response to each prompt of the step. Failed responses are omitted."""
        _, greedy = self._generate(prompts, 1, replace(self.sampling, temperature=0.0))
        return {one.prompt_index: one.score.total for one in greedy if isinstance(one.score, Score)}

    def gather_failed(self) -> checks.Unscored:
        """Returns the number of failed responses of all ranks, and the first failed responses."""
        count = sum(isinstance(one.score, Failure) for one in self.every)
        if not count:
            return checks.Unscored(0, [])
        most = max(self.recipe.log.samples, 1)
        calls = (everyone(local[:most], self.generator.world) for local in self._failed)
        return checks.Unscored(count, [one for call in calls for one in call][:most])

    def _generate(
        self, prompts: Mapping[int, Prompt], n: int, sampling: Sampling
    ) -> tuple[list[Rollout], list[RolloutMeta]]:
        indices = list(prompts)
        made = self.generator.generate_here(list(prompts.values()), indices, n, sampling, self.scorer, self.phases)
        self.seconds += made.seconds
        self.taken += made.taken
        local = [shaped(replace(one, prompt_index=indices[one.prompt_index]), self.recipe) for one in made.rollouts]
        with self.phases("reward"):  # all ranks wait for the slowest rank
            shares = self.generator.world.gather(rollout_metas(local))
        metas = sorted((one for share in shares for one in share), key=lambda one: (one.prompt_index, one.sample))
        for group in _groups([one for one in metas if one.stop != FAILED]):
            self.generator.lengths.learn(
                prompts[group[0].prompt_index], sum(one.response_length for one in group) / len(group)
            )
        self.every += metas
        self._failed.append([one for one in local if isinstance(one.score, Failure)])
        return local, metas


def _groups(rollouts: Sequence[RolloutMeta]) -> list[list[RolloutMeta]]:
    groups: dict[int, list[RolloutMeta]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_index, []).append(rollout)
    return list(groups.values())
