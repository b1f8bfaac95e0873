"""Checklist items that run the models: trials on a few sequences of the recorded step.

Trials run on every rank. After a trial the models have the weights from before the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lockstep.data.updates import Update
from lockstep.errors import Refusal
from lockstep.parity.replay.replay_checks import root_mean_square, worst_difference
from lockstep.parity.replay.tolerances import Tolerance
from lockstep.recipe import Recipe
from lockstep.rollout.engine import training_sampling
from lockstep.tape.tape_format import StepRecord
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_recorder import answers_of, restore_learner
from lockstep.tape.tape_rows import step_examples
from lockstep.train.experience import Experience, build_experience
from lockstep.train.models import Models
from lockstep.train.step import Learner
from lockstep.train.training import Training
from lockstep.trajectory import Trajectory
from lockstep.types import Example, Failure, MicroBatch, Prompt, Question, Rollout, Score, Sums

# The maximum number of sequences, of prompts, and of samples per prompt in a trial.
SEQUENCES, PROMPTS, SAMPLES = 16, 4, 4
# Number of updates in the trial with learning rate 0.
STANDSTILL = 3
# To distinguish old weights from new ones, an update must change log-probs by this multiple of the tolerance.
VISIBLE = 10
# Number of learning rates that are tried until an update changes log-probs enough: first the recipe's rate, then rates
# that are each ten times larger than the previous one.
RATES = 5

OFFLINE = "an offline method generates nothing"


@dataclass(frozen=True)
class CheckItem:
    """The result of one checklist item. If the item does not apply or proves nothing, `passed` is None and `means` says
    why."""

    name: str
    passed: bool | None
    measured: str
    means: str


@dataclass(frozen=True)
class Bench:
    """A run that is set up to repeat the recorded step. `start` has the weights before the step. `rollouts` has the
    recorded responses of the step; it is empty for an offline method."""

    training: Training
    record: StepRecord
    rollouts: Sequence[Rollout]
    start: dict[str, torch.Tensor]
    tolerance: Tolerance
    files: TapeImages

    @property
    def models(self) -> Models:
        return self.training.models

    @property
    def recipe(self) -> Recipe:
        return self.training.run.recipe

    @cached_property
    def examples(self) -> Sequence[Example]:
        """Returns the first sequences of the step that have targets."""
        return [example for example in step_examples(self.record, self.files) if example.targets][:SEQUENCES]

    def restore(self) -> None:
        for learner in self.models.learners:
            restore_learner(learner, self.start, "the recorded weights")

    def arranged(self, examples: Sequence[Example]) -> Update[Example]:
        """Returns the micro-batches that the recipe would form from `examples`."""
        return self.models.arrange(examples)

    def _arranged(self, *, tokens: int | None, rows: int | None) -> Update[Example]:
        return replace(self.models.packing, tokens=tokens, rows=rows)(self.examples)

    def packed(self) -> Update[Example]:
        longest = max(len(example) for example in self.examples)
        return self._arranged(tokens=self.recipe.batch.tokens or 2 * longest, rows=None)

    def padded(self) -> Update[Example]:
        return self._arranged(tokens=None, rows=2)

    def answers(self, learner: Learner, update: Update[Example]) -> torch.Tensor:
        """Returns the model's output for each target token. For a policy the output is the log-prob."""
        return self.models.score_targets(learner.module, update, answers_of)

    def update(self, learner: Learner, rate: float) -> None:
        """Runs an update whose loss is minus the sum of the model's outputs, not the run's loss, so that the gradient
        is never 0."""
        learner.forward_backward(self.arranged(self.examples).batches, _raise_outputs)
        learner.optim_step(rate)


def _raise_outputs(output: Any, batch: MicroBatch) -> Sums:
    return Sums(-answers_of(output).sum())


@dataclass(frozen=True)
class EngineAndTrainer:
    """The rollout engine's responses to recorded prompts. `trainer_K` has the trainer's log-probs of the response
    tokens."""

    experience: Experience
    trainer_K: torch.Tensor

    @property
    def rollout_logprobs_K(self) -> torch.Tensor:
        return self.experience.rollout_logprobs_K

    @property
    def difference(self) -> float:
        return root_mean_square(self.rollout_logprobs_K, self.trainer_K)

    def later(self) -> EngineAndTrainer:
        """Returns a copy without the log-probs of the first token of each response."""
        first_K = torch.zeros(len(self.rollout_logprobs_K), dtype=torch.bool)
        first_K[[0, *(int(last) + 1 for last in self.experience.last_K[:-1])]] = True
        rest = replace(self.experience, rollout_logprobs_K=self.rollout_logprobs_K[~first_K])
        return EngineAndTrainer(rest, self.trainer_K[~first_K])


class _Unjudged:
    """A scorer that gives every response the same score."""

    def submit(self, question: Question, text: str, trajectory: Trajectory | None = None) -> Future[Score | Failure]:
        future: Future[Score | Failure] = Future()
        future.set_result(Score(0.0))
        return future

    def flush(self) -> None:
        """Does nothing."""


def generate_and_score(bench: Bench, max_tokens: int | None = None) -> EngineAndTrainer:
    """Generates responses to the first recorded prompts with the sampling noise of the recorded run. The trainer then
    computes the log-probs of these responses."""
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
    experience = build_experience(rollouts)
    return EngineAndTrainer(experience, bench.answers(bench.models.trained, bench.arranged(experience.examples)))


# -- the items


def engine_items(bench: Bench) -> list[CheckItem]:
    """Returns the checklist items that need a rollout engine."""
    if not bench.rollouts:
        return [_none("weight sync", OFFLINE), rate_zero(bench, None), _none("prefill and decode", OFFLINE)]
    bench.restore()
    before = generate_and_score(bench)
    items: dict[str, Callable[[Bench, EngineAndTrainer], CheckItem]] = {
        "weight sync": weight_sync,
        "learning rate 0": rate_zero,
        "prefill and decode": prefill_and_decode,
    }
    return [_tried(name, bench, before, item) for name, item in items.items()]


def _tried(
    name: str, bench: Bench, before: EngineAndTrainer, item: Callable[[Bench, EngineAndTrainer], CheckItem]
) -> CheckItem:
    """Runs a checklist item. If an inference server fails its weight sync check, the item fails, but the run does
    not."""
    try:
        return item(bench, before)
    except Refusal as refusal:
        if not bench.training.generator.served:
            raise
        bench.restore()
        means = "the engine does not generate with the weights that were sent to it"
        return CheckItem(name, False, "; ".join(f"{each.where}: {each.why}" for each in refusal.problems), means)


def _none(name: str, why: str) -> CheckItem:
    return CheckItem(name, None, "", why)


def weight_sync(bench: Bench, before: EngineAndTrainer) -> CheckItem:
    """Checks that after an update the engine's log-probs match the trainer's new weights, and not the old weights."""
    name, learner = "weight sync", bench.models.trained
    # A difference between engine and trainer that existed before the update is allowed here, because
    # `prefill_and_decode` reports it.
    allowed = max(bench.tolerance.logprob, 2 * before.difference)
    rate = _visible_rate(bench, VISIBLE * allowed)
    if rate is None:
        bench.restore()
        why = f"no update changed log-probabilities by {VISIBLE} times the tolerance ({allowed:.2g})"
        return CheckItem(name, None, f"rates up to {_rates(bench)[-1]:.2g} tried", f"proves nothing: {why}")
    after = generate_and_score(bench)
    bench.restore()
    old_K = bench.answers(learner, bench.arranged(after.experience.examples))
    moved, stale = root_mean_square(after.trainer_K, old_K), root_mean_square(after.rollout_logprobs_K, old_K)
    measured = (
        f"after an update at rate {rate:.2g} the engine is {after.difference:.2g} nats from the log-probabilities of "
        f"the trainer's new weights (at most {allowed:.2g} is allowed) and {stale:.2g} nats from those of the old ones"
    )
    measured += bench.training.generator.proof()
    if after.difference <= allowed:
        if moved <= 2 * allowed:
            return CheckItem(
                name,
                None,
                measured,
                "proves nothing: old and new weights give these responses the same log-probabilities",
            )
        return CheckItem(name, True, measured, "the engine generates with the weights of the last update")
    if stale <= allowed:
        means = "the engine still generates with the weights from before the update: check the weight sync"
    else:
        means = (
            "the engine generates neither with the new weights nor with the old ones: a part of the weights (a layer, "
            "an adapter, tied embeddings) is not sent, or arrives changed"
        )
    return CheckItem(name, False, measured, means)


def _rates(bench: Bench) -> list[float]:
    return [bench.recipe.optim.lr * 10**power for power in range(RATES)]


def _visible_rate(bench: Bench, least: float) -> float | None:
    """Returns the first learning rate whose update changes the trainer's log-probs by more than `least`, or None. Keeps
    the updated weights."""
    learner, update = bench.models.trained, bench.arranged(bench.examples)
    bench.restore()
    old_K = bench.answers(learner, update)
    for rate in _rates(bench):
        bench.restore()
        bench.update(learner, rate)
        if root_mean_square(old_K, bench.answers(learner, update)) > least:
            return rate
    return None


def rate_zero(bench: Bench, before: EngineAndTrainer | None) -> CheckItem:
    """Checks that updates with learning rate 0 change neither the trainer's outputs nor the difference between engine
    and trainer."""
    bench.restore()
    update, allowed = bench.arranged(bench.examples), bench.tolerance.logprob
    old = {learner.name: bench.answers(learner, update) for learner in bench.models.learners}
    for learner in bench.models.learners:
        for _ in range(STANDSTILL):
            bench.update(learner, 0.0)
    drifts = {
        learner.name: root_mean_square(old[learner.name], bench.answers(learner, update))
        for learner in bench.models.learners
    }
    drift = max(drifts.values())
    measured = (
        f"{STANDSTILL} updates at rate 0 changed the model's outputs by {drift:.2g} (at most {allowed:.2g} is allowed)"
    )
    means = "weights do not change at learning rate 0"
    failed = []
    if not drift <= allowed:
        whose = max(drifts, key=lambda name: drifts[name])
        failed.append(
            f"weights of `{whose}` change at learning rate 0: master weights that differ from the weights, decay or "
            "momentum that ignores the rate, a counter in a buffer, or dropout left on may be the cause"
        )
    if before is not None:
        after = generate_and_score(bench)
        grown = abs(after.difference - before.difference)
        measured += f"; engine and trainer differed by {before.difference:.2g} and now by {after.difference:.2g}"
        means += ", and engine and trainer differ by no more than before"
        if not grown <= allowed:
            failed.append(
                "engine and trainer drift apart (their difference changed): the engine keeps state from call to call"
            )
    bench.restore()
    return CheckItem("learning rate 0", not failed, measured, "; ".join(failed) or means)


def prefill_and_decode(bench: Bench, complete: EngineAndTrainer) -> CheckItem:
    """Checks prefill on the first token of each response. Checks decode, which uses the KV cache, on the later tokens.

    `complete` has complete responses that the engine generated with the recorded weights.
    """
    bench.restore()
    name, allowed = "prefill and decode", bench.tolerance.logprob
    first, later = generate_and_score(bench, max_tokens=1), complete.later()
    measured = f"engine against trainer: first token {first.difference:.2g} nats, "
    measured += f"later tokens {later.difference:.2g} nats (at most {allowed:.2g} is allowed)"
    if not first.difference <= allowed:
        where = worst_difference(first.rollout_logprobs_K, first.trainer_K, "response")
        means = (
            f"prefill differs, or the pass that samples the first token differs ({where}): check how the engine runs a "
            "prompt (positions, mask, cache, temperature); differences of later tokens may have the same cause"
        )
    elif not later.difference <= allowed:
        where = worst_difference(later.rollout_logprobs_K, later.trainer_K, "later token")
        means = f"decode differs and prefill does not ({where}): check the KV cache, its blocks and the positions"
    elif len(later.rollout_logprobs_K):
        means = "the engine's log-probabilities match the trainer's, in prefill and in decode"
    else:
        means = "prefill is correct; no response has a second token to test decode"
    return CheckItem(name, first.difference <= allowed and later.difference <= allowed, measured, means)


def padding(bench: Bench) -> CheckItem:
    """Compares the model's outputs for the same sequences in packed rows and in padded micro-batches of two rows."""
    bench.restore()
    allowed, learner = bench.tolerance.logprob, bench.models.trained
    packed_K = bench.answers(learner, bench.packed())
    # A value head of zeros outputs 0 for every token. So a value head is trained until its outputs change, before it is
    # tested.
    if bool((packed_K == packed_K[0]).all()) and _visible_rate(bench, least=1.0) is None:
        bench.restore()
        return CheckItem(
            "padding and packing", None, "", "proves nothing: the model's output is the same for every token"
        )
    packed_K, padded_K = (bench.answers(learner, update) for update in (bench.packed(), bench.padded()))
    bench.restore()
    difference = root_mean_square(packed_K, padded_K)
    measured = (
        f"packed against padded, {len(bench.examples)} sequences: {difference:.2g} (at most {allowed:.2g} is allowed)"
    )
    if difference <= allowed:
        return CheckItem("padding and packing", True, measured, "micro-batches do not change the model's outputs")
    where = worst_difference(packed_K, padded_K, "target")
    means = (
        f"sequences attend to each other or to padding, or have wrong positions ({where}): try the reference kernel, "
        "model.attention=sdpa"
    )
    return CheckItem("padding and packing", False, measured, means)
