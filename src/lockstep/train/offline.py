"""The training loop of offline methods (SFT, DPO, ...), and the check of the initial loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.data.dataset import BatchSource
from lockstep.data.updates import Update
from lockstep.errors import Problem
from lockstep.evaluate.validation import measure
from lockstep.methods import METHODS
from lockstep.methods.base import Objective
from lockstep.model.check import CHECK_TOLERANCE
from lockstep.model.load_folder import DTYPES
from lockstep.model.resolve import model_folder
from lockstep.model.trials import INITIAL_LOSS, refuse_unless_replayed, run_trial
from lockstep.preflight.batch_plan import BatchPlan, make_loader
from lockstep.preflight.run_checks import prepare_offline
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.reward.row_rewards import judged_by
from lockstep.run.console import Console
from lockstep.run.runtime import open_runtime
from lockstep.train.models import Models
from lockstep.train.optim import learning_rate
from lockstep.train.reference_logprobs import add_cache
from lockstep.train.run_writer import record_rows
from lockstep.train.training import PLAIN_START, StartOptions, Training, open_training
from lockstep.types import Item

# Before the first update, the policy and the reference are the same model, so the initial loss is known. If the loss
# differs, the two models have different dtypes or files, the adapter is not initialised to zero, or the log-prob cache
# belongs to another model.

# The maximum difference between log-probs of the same weights in the same micro-batches. Libraries may sum in a
# different order, so in half precision the tolerance allows rounding errors.
SAME_BATCHES = {**CHECK_TOLERANCE, torch.float32: 1e-4}
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}

CAUSES = {
    "adapter": "the adapter does not start at zero, but an untrained adapter must not change the output of the model",
    "model": "policy and reference were loaded differently: check the dtype, and whether model files have changed",
    "disk": "the log-prob cache in the folder `tables` of run.folder was computed by another model; remove it",
}


def assert_identity(
    items: Sequence[Item], objective: Objective, models: Models, recipe: Recipe, console: Console
) -> None:
    """Raises `Refusal` if the policy and the reference differ before the first update. A replay of a tape continues
    after a difference, because it finds the cause."""
    kind, wanted = reference_kind(recipe), objective.initial_loss()
    if kind == "none":
        return
    lora = recipe.model.lora
    if lora is not None and lora.adapter is not None and lora.reference == "base":
        console.say(f"training starts from an adapter ({lora.adapter}): the first loss is not checked")
        return
    other = Path(model_folder(reference_folder(recipe))) != Path(model_folder(recipe.model.path))
    if other:
        console.say(f"the reference is another model ({reference_folder(recipe)}): the first loss is not checked")
        return
    update = models.arrange(items)
    policy, reference = models.logprobs(update), models.reference_logprobs(update)
    dtype = DTYPES[recipe.model.dtype]
    # The log-prob cache was computed in other micro-batches, so its tolerance is larger.
    tolerance = (CHECK_TOLERANCE if kind == "disk" else SAME_BATCHES)[dtype]
    if not _agree(update, policy, reference, tolerance, kind):
        return
    if wanted is None or (kind == "disk" and dtype != torch.float32):
        return  # in half precision, rounding errors of a cache can change the loss by more than the tolerance
    found = measure(items, objective, models)
    loss = found["loss"] - recipe.preference.nll * found.get("nll", 0.0)
    # The tolerance is proportional to the loss, because a large loss, such as that of IPO, also has a large gradient.
    if abs(loss - wanted) > (tolerance if kind == "disk" else LOSS_TOLERANCE[dtype]) * max(1.0, abs(wanted)):
        refuse_unless_replayed(
            Problem(
                "step 0",
                f"the loss is {loss:.6f} instead of {wanted:.6f}, although policy and reference agree",
                "an operator of the loss is wrong on this device: record the first step on another device (tape=true), "
                "and replay it on this device to find the first value that differs",
                code="wrong-initial-loss",
            )
        )
        return
    console.say(f"before the first step policy and reference agree: loss {loss:.6f}")


def _agree(update: Update[Any], policy: torch.Tensor, reference: torch.Tensor, most: float, kind: str) -> bool:
    """Returns whether all log-probs agree. If some log-probs differ, raises `Refusal`, or returns False in a replay of
    a tape."""
    difference = (policy - reference).abs()
    worst = int(difference.argmax())
    if float(difference[worst]) <= most:
        return True
    example = update.examples[int(update.sequence_K[worst])]
    differing = int((~(difference <= most)).sum())
    refuse_unless_replayed(
        Problem(
            f"step 0, {example.origin}",
            f"policy and reference must be the same model before the first update, and {differing:,} of "
            f"{len(difference):,} log-probabilities differ; the worst pair is {float(policy[worst]):.6f} and "
            f"{float(reference[worst]):.6f}",
            CAUSES[kind],
            code="wrong-initial-loss",
        )
    )
    return False


def train_offline(recipe: Recipe, console: Console, options: StartOptions = PLAIN_START) -> None:
    with open_offline(recipe, console, options=options) as offline:
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
    """The objects that all steps of an offline run use."""

    training: Training
    loader: BatchSource[Any]
    objective: Objective
    batches: BatchPlan


@contextmanager
def open_offline(
    recipe: Recipe, console: Console, *, keeps: bool = True, options: StartOptions = PLAIN_START
) -> Iterator[Offline]:
    """Checks the recipe, and loads data and models. A replay of a tape sets `keeps` to False."""
    with open_runtime(recipe, console) as runtime:
        device, console = runtime.device, runtime.console
        prepared = prepare_offline(recipe, device, runtime.world.size, console)
        sources = {question.data_source for question in prepared.questions}
        torch_device = device.torch_device(runtime.world.local_rank)
        with (
            judged_by(recipe.val.rules, sources, torch_device) as judge,
            open_training(prepared, runtime, judge, keeps=keeps, options=options) as training,
        ):
            loader, models = make_loader(recipe, prepared.train, training.carried), training.models
            objective = METHODS[recipe.method].objective(recipe)
            models.longest = prepared.limit
            add_cache(models, recipe, prepared, device, console)
            if prepared.val is not None:
                rows = prepared.val.items
                training.validator.loss_on_rows = lambda: measure(rows, objective, models)
            if training.position.step == 0:
                run_trial(INITIAL_LOSS, lambda: assert_identity(loader.take(0), objective, models, recipe, console))
            yield Offline(training, loader, objective, prepared.batches)


def train_step(rows: Sequence[Any], offline: Offline, step: int) -> dict[str, float]:
    """Performs one optimizer update and returns its metrics."""
    training, objective = offline.training, offline.objective
    models, run = training.models, training.run
    learner, batches = models.trained, offline.batches
    models.reference_outputs = []
    task = objective.task(models.arrange(rows), models)
    record_rows(training.tape, rows, models.reference_outputs)
    outcome = learner.forward_backward(task.batches, task.loss, task.divisor)
    reported = objective.report(outcome.sums, task.divisor)
    training.carried.update(offline.loader.state((step + 1) * batches.rows_per_update))
    return {
        **offline.loader.progress((step + 1) * batches.rows_per_update, "train"),
        "train/loss": outcome.loss,
        **{f"train/{name}": value for name, value in reported.items()},
        "train/tokens": outcome.tokens,
        "train/trained_tokens": outcome.targets // task.targets_per_token,
        **learner.optim_step(learning_rate(step, batches.steps, run.recipe.optim)),
    }
