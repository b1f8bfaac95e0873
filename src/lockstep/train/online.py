"""The training loop of all online methods: generates responses, scores them and updates the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.data.dataset import BatchSource
from lockstep.preflight.batch_plan import make_loader
from lockstep.preflight.run_checks import prepare_online
from lockstep.preflight.user_trials import open_scorer
from lockstep.recipe import Recipe
from lockstep.reward.scorer import Scorer
from lockstep.run.console import Console
from lockstep.run.runtime import open_runtime
from lockstep.train.advantages import TrainBatch, estimate_advantages, next_coefficient
from lockstep.train.experience import (
    check_rollout_logprobs,
    compute_model_outputs,
    pack_minibatches,
    plan_updates,
    redistribute,
)
from lockstep.train.monitor import Warnings, failure_warning, find_idle_cause
from lockstep.train.rollouts import Rollouts, take_rollouts
from lockstep.train.run_writer import record_rollouts, store_samples
from lockstep.train.training import PLAIN_START, StartOptions, Training, open_training
from lockstep.train.update import update
from lockstep.types import Prompt


def train_online(recipe: Recipe, console: Console, options: StartOptions = PLAIN_START) -> None:
    with open_online(recipe, console, options=options) as online:
        training = online.training
        training.validate_at_start()
        for step in training.steps():
            with training.step(step + 1):
                rollouts = online.take_rollouts()
                metrics = train_step(rollouts, online, step)
            training.finish_step(step + 1, metrics)
        training.finish()


@dataclass(frozen=True)
class Online:
    """The objects that all steps of an online run use."""

    training: Training
    loader: BatchSource[Prompt]
    scorer: Scorer
    warnings: Warnings

    def take_rollouts(self) -> Rollouts:
        """Generates and scores responses to the next prompts."""
        training, run = self.training, self.training.run
        position = int(training.carried["position"])
        rollouts = take_rollouts(self.loader, position, training.generator, self.scorer, run.recipe, run.phases)
        training.generator.sleep()
        return rollouts


@contextmanager
def open_online(
    recipe: Recipe, console: Console, *, keeps: bool = True, options: StartOptions = PLAIN_START, plays: bool = True
) -> Iterator[Online]:
    """Loads data and models. A replay of a tape sets `keeps` to False, and `plays` too if it calls no environments."""
    with open_runtime(recipe, console) as runtime:
        prepared = prepare_online(recipe, runtime.device, runtime.world.size, runtime.console, plays=plays)
        with (
            open_scorer(prepared, runtime) as scorer,
            open_training(prepared, runtime, scorer, keeps=keeps, options=options, plays=plays) as training,
        ):
            start = {"position": 0.0, "kl_coefficient": recipe.algorithm.kl.coefficient}
            training.position.carried = start | training.carried
            yield Online(training, make_loader(recipe, prepared.train, training.carried), scorer, Warnings(recipe))


def train_step(rollouts: Rollouts, online: Online, step: int) -> dict[str, float]:
    """Trains on the rollouts of a step. Returns the metrics of the step."""
    training, run = online.training, online.training.run
    recipe, models, beta = run.recipe, training.models, training.carried["kl_coefficient"]
    updates = pack_minibatches(rollouts.experience, models, recipe.batch)
    experience = redistribute(rollouts.experience, updates, run.world)
    plans = plan_updates(experience, updates, models)
    outputs = compute_model_outputs(plans, models, recipe, run.phases, experience.rollout_logprobs_K)
    # A replay of a tape skips this check: it trains on the recorded log-probs and reports differences itself.
    checked = check_rollout_logprobs(plans, models, recipe, run.phases, experience, outputs) if training.keeps else {}
    with run.phases("adv"):
        advantages = estimate_advantages(experience, outputs, recipe, beta, (recipe.run.seed, step))
    record_rollouts(training.tape, rollouts, experience, outputs, advantages)
    batch = TrainBatch(experience, outputs, advantages)
    training.idle.signal = find_idle_cause(batch, recipe)
    metrics = {**rollouts.metrics, **checked, **advantages.metrics}
    metrics |= update(plans, batch, models, recipe, beta, step, run.prepared.batches.steps, run.phases)
    metrics |= online.loader.progress(rollouts.position, "training")
    next_beta = {"kl_coefficient": next_coefficient(recipe, beta, metrics, experience.sequences)}
    training.carried.update(online.loader.state(rollouts.position), position=float(rollouts.position), **next_beta)
    store_samples(run, step + 1, rollouts, experience, advantages)
    for warning in (*failure_warning(rollouts.failed), *online.warnings.read(metrics)):
        run.console.warn(warning)
    return metrics
