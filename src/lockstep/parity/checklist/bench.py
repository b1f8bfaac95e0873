"""What the trials of the checklist work with: a run at the recorded step, its models and its generator.

Trials run on every rank, and on a few sequences of the step, so that they stay cheap beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lockstep.data.updates import Update
from lockstep.parity.replay.checks import root_mean_square
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.recipe import Recipe
from lockstep.rollout.engine import training_sampling
from lockstep.tape.format import StepRecord
from lockstep.tape.observer import answers_of
from lockstep.tape.rows import fed_examples
from lockstep.train.experience import Experience, experience_of
from lockstep.train.models import Models
from lockstep.train.step import Learner
from lockstep.train.training import Training
from lockstep.types import Example, Failure, MicroBatch, Prompt, Question, Rollout, Score, Sums

# What a trial takes of the recorded step.
SEQUENCES, PROMPTS, SAMPLES = 16, 4, 4

OFFLINE = "an offline method generates nothing"


@dataclass(frozen=True)
class CheckItem:
    """`passed` is None where the item does not apply or proves nothing; `means` then gives the reason."""

    name: str
    passed: bool | None
    measured: str
    means: str


@dataclass(frozen=True)
class Bench:
    """A run at the recorded step: `start` are the weights before it, `rollouts` its responses (none offline)."""

    training: Training
    record: StepRecord
    rollouts: Sequence[Rollout]
    start: dict[str, torch.Tensor]
    tolerance: Tolerance

    @property
    def models(self) -> Models:
        return self.training.models

    @property
    def recipe(self) -> Recipe:
        return self.training.run.recipe

    @cached_property
    def examples(self) -> Sequence[Example]:
        """The first sequences of the step that have something to answer."""
        return [example for example in fed_examples(self.record.tensors) if example.targets][:SEQUENCES]

    def restore(self) -> None:
        for learner in self.models.learners:
            restore_learner(learner, self.start, "the recorded weights")

    def arranged(self, examples: Sequence[Example]) -> Update[Example]:
        """As the recipe makes micro-batches."""
        return self.models.arrange(examples)

    def _arranged(self, *, tokens: int | None, rows: int | None) -> Update[Example]:
        return replace(self.models.packing, tokens=tokens, rows=rows)(self.examples)

    def packed(self) -> Update[Example]:
        longest = max(len(example) for example in self.examples)
        return self._arranged(tokens=self.recipe.batch.tokens or 2 * longest, rows=None)

    def padded(self) -> Update[Example]:
        return self._arranged(tokens=None, rows=2)

    def answers(self, learner: Learner, update: Update[Example]) -> torch.Tensor:
        """The learner's number for each target: of a policy the log-probability."""
        return self.models.over_targets(learner.module, update, answers_of)

    def update(self, learner: Learner, rate: float) -> None:
        """A real update whose gradient is never 0: towards what was answered, whatever the run's own loss says."""
        learner.forward_backward(self.arranged(self.examples).batches, _towards)
        learner.optim_step(rate)


def _towards(output: Any, batch: MicroBatch) -> Sums:
    return Sums(-answers_of(output).sum())


@dataclass(frozen=True)
class EngineAndTrainer:
    """Responses of the engine to recorded prompts; `trainer_K` is what the learner says of the same tokens."""

    experience: Experience
    trainer_K: torch.Tensor

    @property
    def engine_K(self) -> torch.Tensor:
        return self.experience.engine_K

    @property
    def difference(self) -> float:
        return root_mean_square(self.engine_K, self.trainer_K)

    def later(self) -> EngineAndTrainer:
        """Without the first token of each response."""
        first_K = torch.zeros(len(self.engine_K), dtype=torch.bool)
        first_K[[0, *(int(last) + 1 for last in self.experience.last_K[:-1])]] = True
        rest = replace(self.experience, engine_K=self.engine_K[~first_K])
        return EngineAndTrainer(rest, self.trainer_K[~first_K])


class _Unjudged:
    """A judge to whom every response is worth the same."""

    def submit(self, question: Question, text: str) -> Future[Score | Failure]:
        future: Future[Score | Failure] = Future()
        future.set_result(Score(0.0))
        return future

    def flush(self) -> None:
        """Nothing waits."""


def generate_and_score(bench: Bench, max_tokens: int | None = None) -> EngineAndTrainer:
    """What the engine answers to the first recorded prompts, with the noise that the recorded run drew."""
    generator, recipe = bench.training.generator, bench.recipe
    prompts: dict[int, Prompt] = {rollout.prompt_index: rollout.prompt for rollout in bench.rollouts}
    chosen = sorted(prompts)[:PROMPTS]
    first_key = int(bench.record.info["carried"]["position"])
    sampling = training_sampling(recipe, generator.stop_ids)
    sampling = replace(sampling, max_tokens=max_tokens or sampling.max_tokens)
    rollouts = generator.generate(
        [prompts[index] for index in chosen],
        [first_key + index for index in chosen],
        min(recipe.rollout.n, SAMPLES),
        sampling,
        _Unjudged(),
        bench.training.run.phases,
    )
    experience = experience_of(rollouts)
    return EngineAndTrainer(experience, bench.answers(bench.models.trained, bench.arranged(experience.examples)))
