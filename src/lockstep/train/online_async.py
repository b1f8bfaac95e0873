"""The online loop with generation beside it: a worker answers the prompts of coming steps while this step is trained.

The stages are those of `online.py`; only who generates, and when, is another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lockstep.device.threads import each_of
from lockstep.model.policy import Policy
from lockstep.recipe import Recipe
from lockstep.rollout.sampling import training_sampling
from lockstep.rollout.worker.engine import WorkerEngine
from lockstep.run.progress import Console
from lockstep.train.beside import collective_of
from lockstep.train.online import Online, open_online, train_step
from lockstep.train.rollouts import Rollouts, take_rollouts
from lockstep.types import Request


def train_online_async(recipe: Recipe, console: Console) -> None:
    with open_online(recipe, console) as online, open_worker(online) as ahead:
        training = online.training
        training.validate_at_start()
        for step in training.steps():
            with training.step(step + 1):
                ahead.hand_over(step)
                rollouts = ahead.take_rollouts(step)
                metrics = train_step(rollouts, online, step)
            training.finish_step(step + 1, metrics | ahead.use())
        training.finish()


class Ahead:
    """The rollouts of coming steps. Weights are of version `step` before step `step`, counted from 0, is trained: they
    have seen so many steps. What the worker generates of step k is begun with version k - `max_staleness` or later."""

    def __init__(self, online: Online, engine: WorkerEngine):
        self.online, self.engine = online, engine
        self.generator = online.training.generator.answered_by(engine)
        self._asked = 0
        """Prompts before this position in the data have been asked."""
        self._clock = _Clock(engine)

    def hand_over(self, step: int) -> None:
        """The weights as they are now, and the prompts that may be answered with them."""
        training, recipe = self.online.training, self.online.training.run.recipe
        position, steps = int(training.carried["position"]), training.run.prepared.batches.steps
        coming = min(step + (recipe.rollout.max_staleness or 0), steps - 1) - step
        first = max(self._asked, position)
        self._asked = max(first, position + (coming + 1) * recipe.batch.prompts)
        prompts = self.online.loader.between(first, self._asked)
        # As `take_rollouts` asks for them when their step has come: its position in the data is a prompt's key.
        requests = [Request(prompt.ids, first + i, recipe.rollout.n) for i, prompt in enumerate(prompts)]
        with training.run.phases("hand_over"):
            self.engine.hand_over(step, requests, training_sampling(recipe, self.generator.stop_ids))

    def take_rollouts(self, step: int) -> Rollouts:
        """The next prompts, answered and scored. A step that needs more than was asked ahead (dynamic sampling,
        a greedy baseline) has them answered before all others."""
        online, run = self.online, self.online.training.run
        position = int(online.training.carried["position"])
        rollouts = take_rollouts(online.loader, position, self.generator, online.scorer, run.recipe, run.phases)
        return replace(rollouts, metrics={**rollouts.metrics, **staleness(rollouts, step)})

    def use(self) -> dict[str, float]:
        """Of the step just trained: how much of its time each side was at work, and how long the trainer waited."""
        return self._clock.lap()


@contextmanager
def open_worker(online: Online) -> Iterator[Ahead]:
    """The rollout worker, which ends with this process, however that ends."""
    training = online.training
    run, policy = training.run, training.models.module
    assert isinstance(policy, Policy)
    log = run.folder.path / "rollout" / "worker.log"
    collective = collective_of(run.recipe, run.device)
    with _threads_divided(run.recipe, training.models.device):
        engine = WorkerEngine(policy, training.models.device, run.recipe, run.prepared.end_tokens, log, collective)
        try:
            yield Ahead(online, engine)
        finally:
            engine.close()


@contextmanager
def _threads_divided(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Two processes that compute at the same time on one CPU have half of its threads each. A worker that waits for
    each step's weights takes turns with the run, and has them all: their number decides the last digits of a sum."""
    before = torch.get_num_threads()
    if device.type == "cpu" and recipe.rollout.max_staleness:
        torch.set_num_threads(each_of(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def staleness(rollouts: Rollouts, step: int) -> dict[str, float]:
    """By how many steps the weights that drew a token are older than those that it trains, over the policy's tokens."""
    ages = [
        step - version
        for rollout in rollouts.experience.rollouts
        for version, trained in zip(rollout.versions, rollout.trained, strict=True)
        if trained
    ]
    return {"async/staleness_mean": sum(ages) / len(ages), "async/staleness_max": float(max(ages))}


class _Clock:
    """Both sides' use of the time between two steps' ends."""

    def __init__(self, engine: WorkerEngine):
        self.engine = engine
        self._last = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), self.engine.busy(), self.engine.waited

    def lap(self) -> dict[str, float]:
        now = self._now()
        passed, busy, waited = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return {
            # The clocks are read one after the other: a share may come out a little over all of it.
            "async/worker_busy": min(1.0, busy / passed),
            "async/trainer_busy": max(0.0, 1.0 - waited / passed),
            "async/wait_s": waited,
        }
