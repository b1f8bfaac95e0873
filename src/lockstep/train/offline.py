"""The offline loop: rows in, updates out. Every offline method is this loop with another row of `methods/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.data.dataset import Loader
from lockstep.evaluate.validation import measure
from lockstep.methods import METHODS
from lockstep.methods.base import Objective
from lockstep.recipe import Recipe
from lockstep.reward.rule_judge import judged_by
from lockstep.run.console import Console
from lockstep.train.caching import add_cache
from lockstep.train.identity import assert_identity
from lockstep.train.optim import learning_rate
from lockstep.train.plan import BatchPlan, make_loader
from lockstep.train.prepare import prepare
from lockstep.train.runtime import open_runtime
from lockstep.train.taping import record_rows
from lockstep.train.training import Training, open_training


def train_offline(recipe: Recipe, console: Console, *, accept_changed: bool = False) -> None:
    with open_offline(recipe, console, accept_changed=accept_changed) as offline:
        training = offline.training
        training.validate_at_start()
        for step in training.steps():
            with training.step(step + 1):
                rows = offline.loader.take(step)
                metrics = train_step(rows, offline, step)
            training.finish_step(step + 1, metrics)
        training.finish()


@dataclass(frozen=True)
class Offline:
    """What the steps of an offline run share."""

    training: Training
    loader: Loader[Any]
    objective: Objective
    batches: BatchPlan


@contextmanager
def open_offline(
    recipe: Recipe, console: Console, *, keeps: bool = True, accept_changed: bool = False
) -> Iterator[Offline]:
    """Everything that the loop needs, checked and loaded. A replay `keeps` nothing."""
    with open_runtime(recipe, console) as runtime:
        device, console = runtime.device, runtime.console
        prepared = prepare(recipe, device, runtime.world.size, console)
        sources = {question.data_source for question in prepared.questions}
        torch_device = device.torch_device(runtime.world.local_rank)
        with (
            judged_by(recipe.val.rules, sources, torch_device) as judge,
            open_training(prepared, runtime, judge, keeps=keeps, accept_changed=accept_changed) as training,
        ):
            loader, models = make_loader(recipe, prepared.train), training.models
            objective = METHODS[recipe.method].objective(recipe)
            models.longest = prepared.limit
            add_cache(models, recipe, prepared, device, console)
            if prepared.val is not None:
                rows = prepared.val.items
                training.validator.loss_on_rows = lambda: measure(rows, objective, models)
            if training.position.step == 0:
                assert_identity(loader.take(0), objective, models, recipe, console)
            yield Offline(training, loader, objective, prepared.batches)


def train_step(rows: Sequence[Any], offline: Offline, step: int) -> dict[str, float]:
    """One update on some rows; returns its metrics."""
    training, objective = offline.training, offline.objective
    models, run = training.models, training.run
    learner, batches = models.trained, offline.batches
    models.heard = []
    task = objective.task(models.arrange(rows), models)
    record_rows(training.tape, rows, models.heard)
    outcome = learner.forward_backward(task.batches, task.loss, task.divisor)
    reported = objective.report(outcome.sums, task.divisor)
    return {
        "train/epoch": batches.epoch(step + 1),
        "train/loss": outcome.loss,
        **{f"train/{name}": value for name, value in reported.items()},
        "train/tokens": outcome.tokens,
        "train/trained_tokens": outcome.targets // task.answers,
        **learner.optim_step(learning_rate(step, batches.steps, run.recipe.optim)),
    }
