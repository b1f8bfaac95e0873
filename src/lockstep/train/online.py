"""The online loop: the policy answers prompts, rewards judge the answers, updates follow. Every online method is this
loop with other keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.algorithms.kl import adapted
from lockstep.data.dataset import Loader
from lockstep.device.select import explain
from lockstep.parallel.world import joined
from lockstep.recipe import Recipe
from lockstep.reward.scorer import Scorer
from lockstep.run.progress import Console
from lockstep.train.advantages import Advantages, estimate_advantages
from lockstep.train.annotate import annotate, plan_updates
from lockstep.train.experience import Experience
from lockstep.train.prepare import PreparedOnline, prepare_online
from lockstep.train.rollouts import Rollouts, failure_warning, take_rollouts
from lockstep.train.run import Run, folder_of
from lockstep.train.taping import record_rollouts
from lockstep.train.training import Training, opened
from lockstep.train.update import Learned, update
from lockstep.train.warnings import Warnings
from lockstep.types import Prompt


def train_online(recipe: Recipe, console: Console) -> None:
    with open_online(recipe, console) as online:
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
    """What the steps of an online run share."""

    training: Training
    loader: Loader[Prompt]
    scorer: Scorer
    warnings: Warnings

    def take_rollouts(self) -> Rollouts:
        """The next prompts, answered and scored."""
        training, run = self.training, self.training.run
        position = int(training.carried["position"])
        return take_rollouts(self.loader, position, training.generator, self.scorer, run.recipe, run.phases)


@contextmanager
def open_online(recipe: Recipe, console: Console, *, keeps: bool = True) -> Iterator[Online]:
    """Everything that the loop needs, checked and loaded. A replay `keeps` nothing."""
    device, sentence = explain(recipe.device)
    # Before the first tensor and the first collective: libraries read these switches once.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    with joined(device) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        prepared = prepare_online(recipe, device, world.size, console)
        sources = {*prepared.train.data_sources, *(question.data_source for question in prepared.questions)}
        output = folder_of(prepared).reward_output(world.rank)
        torch_device = device.torch_device(world.local_rank)
        with Scorer.open(recipe.reward, sorted(sources), torch_device, output=output) as scorer:
            _try_rewards(scorer, prepared, console)
            with opened(prepared, device, world, console, switches, scorer, keeps=keeps) as training:
                start = {"position": 0.0, "kl_coefficient": recipe.algorithm.kl.coefficient}
                training.position.carried = {**start, **training.carried}
                yield Online(training, _loader(prepared), scorer, Warnings(recipe))


def _try_rewards(scorer: Scorer, prepared: PreparedOnline, console: Console) -> None:
    with console.task("Trying the rewards on real rows", None):
        tried = scorer.dry_run([*prepared.train.questions, *prepared.questions])
    for line in tried.lines:
        console.say(line)
    for warning in tried.warnings:
        console.warn(warning)


def _loader(prepared: PreparedOnline) -> Loader[Prompt]:
    recipe = prepared.recipe
    return Loader(
        prepared.train.sources,
        prepared.train.weights,
        rows_per_update=recipe.batch.prompts,
        seed=recipe.run.seed,
        shuffle=recipe.data.shuffle,
        total_rows=None,
    )


def train_step(rollouts: Rollouts, online: Online, step: int) -> dict[str, float]:
    """What a step learns from its rollouts; returns its metrics."""
    training, experience = online.training, rollouts.experience
    run, models, beta = training.run, training.models, training.carried["kl_coefficient"]
    recipe, batches = run.recipe, run.prepared.batches
    plans = plan_updates(experience, models, recipe.batch)
    known = annotate(plans, models, recipe, run.phases)
    with run.phases("adv"):
        advantages = estimate_advantages(experience, known, recipe, beta)
    record_rollouts(training.tape, rollouts, known, advantages)
    learned = Learned(experience, known, advantages)
    metrics = {**rollouts.metrics, **advantages.metrics}
    metrics |= update(plans, learned, models, recipe, beta, step, batches.steps, run.phases)
    metrics["training/epoch"] = rollouts.position / batches.rows
    next_beta = _next_coefficient(recipe, beta, metrics, experience)
    training.carried.update(position=float(rollouts.position), kl_coefficient=next_beta)
    _store(run, step + 1, rollouts, advantages)
    for warning in (*failure_warning(rollouts.failed), *online.warnings.read(metrics)):
        run.console.warn(warning)
    return metrics


def _next_coefficient(recipe: Recipe, beta: float, metrics: dict[str, float], experience: Experience) -> float:
    kl = recipe.algorithm.kl
    if kl.where == "none":
        return beta
    metrics["actor/kl_coef"] = beta
    measured = metrics.get("actor/kl" if kl.where == "loss" else "actor/reward_kl_penalty")
    if kl.target is None or measured is None:  # a critic's warm-up does not look at the policy
        return beta
    return adapted(beta, measured, kl.target, kl.horizon, experience.sequences)


def _store(run: Run, step: int, rollouts: Rollouts, advantages: Advantages) -> None:
    """Some responses of the step, and of those that could not be scored the first."""
    experience, count = rollouts.experience, run.recipe.log.samples
    first_tokens = [0, *(int(last) + 1 for last in experience.last_K[:-1])]
    chosen = experience.rollouts[:count]
    told = [float(advantages.advantages_K[first_tokens[i]]) for i in range(len(chosen))]
    run.store(step, "train", chosen, told)
    run.store(step, "failed", rollouts.failed[: max(count, 1)])
