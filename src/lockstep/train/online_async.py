"""The asynchronous online loop: a worker process generates for later steps while the current step is trained.

The stages are the same as in `online.py`. Every rank has its own rollout worker. The worker gets the full weights and
generates the responses to the prompts of its rank. Unfinished prompts move from a busy or lost worker to an idle one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lockstep.device.process_setup import each_of
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.preflight.async_worker import collective_of, device_of_worker
from lockstep.preflight.batch_plan import prompt_limit
from lockstep.recipe import Recipe
from lockstep.rollout.collect import AskedAhead
from lockstep.rollout.engine import training_sampling
from lockstep.rollout.worker.prompt_exchange import PromptExchange
from lockstep.rollout.worker.worker_engine import WorkerEngine
from lockstep.run.console import Console
from lockstep.train.callbacks import PLAIN_START, StartOptions
from lockstep.train.online import Online, open_online, train_step
from lockstep.train.rollouts import Rollouts, take_rollouts
from lockstep.types import Request


def train_online_async(recipe: Recipe, console: Console, options: StartOptions = PLAIN_START) -> None:
    with open_online(recipe, console, options=options) as online, open_worker(online) as ahead:
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
    """Requests rollouts of later steps from the worker. The weights before step `step`, which counts from 0, have
    version `step`. The worker generates the responses of step k with weights of version k - `max_staleness` or
    later."""

    def __init__(self, online: Online, engine: WorkerEngine):
        self.online, self.engine, self.world = online, engine, online.training.run.world
        self._ahead = AskedAhead(self.world.engine, self.world.engines)
        self.generator = online.training.generator.answered_by(engine, self._ahead)
        self._requested = 0
        """The prompts before this position in the dataset have already been requested from the worker."""
        self._clock = _Clock(engine, self.world)

    def hand_over(self, step: int) -> None:
        """Sends the worker the current weights, and the prompts whose responses may be generated with these weights."""
        training, recipe = self.online.training, self.online.training.run.recipe
        position, steps = int(training.carried["position"]), training.run.prepared.batches.steps
        coming = min(step + (recipe.rollout.max_staleness or 0), steps - 1) - step
        first = max(self._requested, position)
        self._requested = max(first, position + (coming + 1) * recipe.batch.prompts)
        requests: list[Request] = []
        sampling = training_sampling(recipe, self.generator.stop_ids)
        # The prompts of each step are distributed over the ranks separately.
        for start in range(first, self._requested, recipe.batch.prompts):
            # The keys of the requests are the positions of the prompts in the dataset, as in `take_rollouts`.
            keys = range(start, min(start + recipe.batch.prompts, self._requested))
            prompts = self.online.loader.between(keys.start, keys.stop)
            expected = self.generator.lengths.of(prompts)
            requests += self._ahead.ask(prompts, keys, recipe.rollout.n, sampling, expected)
        with training.run.phases("hand_over"):
            self.engine.hand_over(step, requests, sampling)

    def take_rollouts(self, step: int) -> Rollouts:
        """Returns the scored rollouts of the step. The worker processes additional requests of this step (dynamic
        sampling, a greedy baseline) before requests of later steps."""
        online, run = self.online, self.online.training.run
        position = int(online.training.carried["position"])
        rollouts = take_rollouts(online.loader, position, self.generator, online.scorer, run.recipe, run.phases)
        return replace(rollouts, metrics={**rollouts.metrics, **staleness_metrics(rollouts, step, self.world)})

    def use(self) -> dict[str, float]:
        """Returns the utilisation of the worker and the trainer in the last step, and the waiting time of the trainer.
        All ranks must call this function."""
        return self._clock.lap()


@contextmanager
def open_worker(online: Online) -> Iterator[Ahead]:
    """Starts the rollout worker of this rank. The worker is stopped when the context ends."""
    training = online.training
    run, policy, device = training.run, training.models.module, training.models.device
    assert isinstance(policy, Policy)
    log = run.folder.path / "rollout" / ("worker.log" if run.world.size == 1 else f"worker_{run.world.rank}.log")
    collective, worker_device = (
        collective_of(run.recipe, run.device),
        device_of_worker(run.recipe, run.world.local_rank),
    )
    with _threads_divided(run.recipe, device):
        ends, limit = run.prepared.end_tokens, prompt_limit(run.recipe, run.prepared.config)
        engine = WorkerEngine(
            policy, device, run.recipe, ends, log, collective, worker_device, limit, _exchange(run.recipe, run.world)
        )
        try:
            yield Ahead(online, engine)
        finally:
            engine.close()


def _exchange(recipe: Recipe, world: World) -> PromptExchange | None:
    """Returns the exchange of prompts between the workers. Prompts that move change the batches and so the rounding, by
    timing. So they stay with a staleness of 0, which equals the synchronous loop, and in deterministic runs."""
    moves = world.engines > 1 and recipe.rollout.max_staleness and not recipe.run.deterministic
    return PromptExchange(world.engine) if moves else None


@contextmanager
def _threads_divided(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Divides the CPU threads between a rank and its worker, which run concurrently. With `max_staleness` 0, the rank
    and the worker run alternately, and each uses all threads. The number of threads changes the rounding of sums."""
    before = torch.get_num_threads()
    if device.type == "cpu" and recipe.rollout.max_staleness:
        torch.set_num_threads(each_of(2, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def staleness_metrics(rollouts: Rollouts, step: int, world: World) -> dict[str, float]:
    """Returns metrics of the staleness of the weights that generated the policy tokens, in steps. All ranks must call
    this function."""
    ages = [
        step - version
        for rollout in rollouts.experience.rollouts
        for version, mask in zip(rollout.versions, rollout.loss_mask, strict=True)
        if mask
    ]
    # The lists are gathered as sums and counts, because some ranks may have no response.
    sums, counts, most = zip(*world.gather((sum(ages), len(ages), max(ages, default=0))), strict=True)
    return {"async/staleness_mean": sum(sums) / sum(counts), "async/staleness_max": float(max(most))}


class _Clock:
    """Measures the utilisation of the worker and the trainer from the end of one step to the end of the next step."""

    def __init__(self, engine: WorkerEngine, world: World):
        self.engine, self.world = engine, world
        self._last = self._now()

    def _now(self) -> tuple[float, ...]:
        engine = self.engine
        return time.monotonic(), engine.busy(), engine.waited, engine.moved, engine.restarts

    def lap(self) -> dict[str, float]:
        now = self._now()
        passed, busy, waited, moved, restarts = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        # The clocks are not read at exactly the same time, so the utilisation could slightly exceed 1.
        shares = min(1.0, busy / passed), max(0.0, 1.0 - waited / passed), waited, moved, restarts
        workers, trainers, waits, moves, starts = zip(*self.world.gather(shares), strict=True)
        return {
            "async/worker_busy": sum(workers) / len(workers),
            # All ranks wait for a rank that waits for its worker, so the minimum is reported.
            "async/trainer_busy": min(trainers),
            "async/wait_s": max(waits),
            "async/moved_responses": float(sum(moves)),
            "async/worker_restarts": float(sum(starts)),
        }
