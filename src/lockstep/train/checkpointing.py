"""Checkpoints of a run: resumes from the newest checkpoint, saves checkpoints, and exports the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.data.encode.chat_template import is_named, template_text
from lockstep.methods import METHODS
from lockstep.model.export_check import Verification, probe_of
from lockstep.model.export_folder import export_checkpoint
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.resolve import folders_of
from lockstep.model.weights import held_weights, restore_weights
from lockstep.parallel.sharding import reshard
from lockstep.recipe import Recipe
from lockstep.recipe.loader import resolved
from lockstep.recipe.measure import best_measure
from lockstep.reward.model import STATS
from lockstep.run import checkpoint as checkpoints
from lockstep.run.checkpoint_writers import LocalWriter, ShardedWriter
from lockstep.run.folder import RunFolder
from lockstep.run.model_card import card_files
from lockstep.run.runtime import generator_states, restore_generators, seed_generators, seed_of
from lockstep.train.models import Models
from lockstep.train.optim import LossScale
from lockstep.train.resume import (
    Fingerprints,
    learning_rate_changes,
    model_fingerprints,
    model_paths,
    refuse_changed_data,
    refuse_changed_models,
    refuse_changed_recipe,
    refuse_unlike_machines,
    weight_decay_changes,
)
from lockstep.train.run_writer import Run


def model_kind(recipe: Recipe) -> str:
    """Returns the type of the trained model for `State.kind`, which is `policy` (a language model) or `value` (a reward
    model)."""
    method = METHODS.get(recipe.method)
    return "policy" if method is None else method.model


def export_files(recipe: Recipe, carried: Mapping[str, float], run: RunFolder) -> dict[str, str]:
    """Returns the text files that an exported model needs, such as the chat template, for `State.files`."""
    method = METHODS.get(recipe.method)
    files = {**(method.files(recipe) if method else {}), **_template(recipe, run)}
    if model_kind(recipe) == "value" and carried.get("score_std"):
        files[STATS] = json.dumps({"mean": carried["score_mean"], "std": carried["score_std"]})
    return files


def write_export(
    recipe: Recipe,
    found: checkpoints.Checkpoint,
    out: Path,
    run: RunFolder,
    *,
    adapter: bool = False,
    replace: bool = False,
) -> tuple[list[str], Verification]:
    """Exports a checkpoint with a model card. Returns messages for the user, and the result of the check of the
    exported model."""
    state, messages = found.state, [f"exported the model to {out}"]
    if not state.kind:  # the checkpoint is from an earlier lockstep version
        state.kind, state.files = model_kind(recipe), export_files(recipe, state.carried, run)
    card = card_files(run, state.step, adapter=adapter)
    verified = export_checkpoint(
        recipe.model, found, out, folders=folders_of(recipe.model), adapter=adapter, replace=replace, files=card
    )
    if state.kind == "value" and STATS not in state.files:
        messages.append(
            "the scores of the exported model are not normalised: there were no validation rows (data.val) to compute "
            "mean and std"
        )
    return messages, verified


def _template(recipe: Recipe, run: RunFolder) -> dict[str, str]:
    """Returns the chat template of the run, if the recipe does not use the template of the model."""
    if not is_named(recipe.data):
        return {}
    kept = run.template
    text = kept.read_text(encoding="utf-8") if kept.is_file() else template_text(recipe.data.template)
    return {kept.name: text}


@dataclass
class Position:
    """The number of finished steps, and the values that the training loop keeps between steps."""

    step: int = 0
    carried: dict[str, float] = field(default_factory=dict)


class Checkpointer:
    """Resumes a run, saves checkpoints and exports the model. `keeps` is False for a replay of a tape, which saves
    nothing. With `accept_changed`, a run resumes even if the files of a model have changed."""

    def __init__(self, run: Run, models: Models, *, keeps: bool = True, accept_changed: bool = False):
        self.run, self.models, self.accept_changed = run, models, accept_changed
        self.fingerprints: Fingerprints = self._fingerprints() if keeps else {}
        self.folder = run.folder.checkpoints
        self.measure = best_measure(run.recipe)
        self.saved_at: int | None = None
        self._writer: LocalWriter | ShardedWriter
        if run.world.size > 1:
            self._writer = ShardedWriter(self.folder, run.world, self._on_saved)
        else:
            memory, on_host = run.prepared.memory, models.device.type == "cpu"
            needed = max(phase.activations + phase.gradients for phase in memory.phases) if on_host else 0
            self._writer = LocalWriter(self.folder, models.device, self._on_saved, run.console.say, needed)
        self._messages: list[tuple[Callable[[str], None], str]] = []
        """Messages of the checkpoint writer thread, each with the console method that prints it."""

    def resume(self) -> Position:
        """Restores the newest complete checkpoint, if there is one."""
        run, world = self.run, self.run.world
        if world.main:
            checkpoints.sweep(self.folder)
            checkpoints.set_damaged_aside(self.folder, run.console.warn)
        world.barrier()
        found = checkpoints.newest(self.folder)
        if found is None:
            run.rewind(-1)
            self.saved_at = 0
            return Position()
        self._refuse_changes(found.state)
        self._restore(found)
        run.rewind(found.state.step)
        run.console.say(f"resuming {run.folder.path} after step {found.state.step}")
        self.saved_at = found.state.step
        return Position(found.state.step, dict(found.state.carried))

    def _fingerprints(self) -> Fingerprints:
        """Returns the fingerprints of the files of all models of the run. All ranks must call this function."""
        world, paths = self.run.world, model_paths(self.run.recipe)
        with world.stage("fingerprints of the models"):
            local = model_fingerprints(paths, world.progress) if world.local_rank == 0 else None
            every = world.gather(local)
        refuse_unlike_machines(every)
        return next(one for one in every if one is not None)

    def _refuse_changes(self, state: checkpoints.State) -> None:
        """Compares the run with the checkpoint. Raises `Refusal` for changes with which the run cannot resume, and
        warns about other changes."""
        run, console = self.run, self.run.console
        changed = refuse_changed_recipe(state, resolved(run.recipe), self.fingerprints)
        for change in changed:
            console.warn(f"resuming although {change}")
        for sentence in learning_rate_changes(state, run.prepared.batches.steps, run.recipe):
            console.warn(sentence)
        optimizers = [learner.optimizer for learner in self.models.learners]
        for sentence in weight_decay_changes(state, optimizers, run.recipe.optim):
            console.warn(sentence)
        # First the models: a changed tokenizer or image processor changes the tokens of the rows, too.
        accepted = refuse_changed_models(state.models, self.fingerprints, accepted=self.accept_changed)
        for sentence in refuse_changed_data(state.data, run.prepared.fingerprints):
            console.warn(sentence)
        for key, files in accepted.items():
            console.warn(f"resuming although the model of {key} has changed (--accept-changed): {', '.join(files)}")
        if not state.models:
            console.say(
                "the checkpoint was written by a version that stored no fingerprints of models, so the run cannot "
                "check whether the model files have changed since then"
            )
        run.resumed = {
            "after_step": state.step,
            "changed": {change.key: [change.before, change.now] for change in changed},
            "accepted_models": accepted,
        }

    def _restore(self, found: checkpoints.Checkpoint) -> None:
        learner, critic = self.models.trained, self.models.critic
        for one in self.models.learners:
            reshard(one.module)
        restore_weights(_stored(learner.module), found.weights, str(found.path))
        learner.optimizer.restore(found.optimizer)
        learner.skipped = found.state.skipped
        if critic is not None:
            restore_weights(critic.module, found.critic, str(found.path))
            critic.optimizer.restore(found.critic_optimizer)
        numbers = found.state.loss_scale
        for scale, value, quiet in zip(self._scales(), numbers[::2], numbers[1::2], strict=True):
            scale.value, scale.quiet = value, int(quiet)
        self._restore_generators(found)

    def _restore_generators(self, found: checkpoints.Checkpoint) -> None:
        world, state, now = self.run.world, found.state, self.run.recipe.parallel
        before = state.recipe.get("parallel", {})
        tensor, context = before.get("tensor_parallel", 1), before.get("context_parallel", 1)
        if not restore_generators(found.optimizer, state.world_size, tensor, world, self.run.device):
            # The seed depends on the step, because the run has already used the dropout masks of the initial seed.
            seed_generators(seed_of(self.run.recipe.run.seed, state.step, world.engine), self.run.device)
        if (state.world_size, tensor, context) != (world.size, now.tensor_parallel, now.context_parallel):
            layouts = [
                _layout(world.size, now.tensor_parallel, now.context_parallel),
                _layout(state.world_size, tensor, context),
            ]
            self.run.console.warn(
                f"resuming a run of {layouts[1]} on {layouts[0]}: "
                "the rows of each update stay the same, but dropout masks differ"
            )

    def _scales(self) -> list[LossScale]:
        return [learner.scale for learner in self.models.learners if learner.scale is not None]

    def reserve(self, step: int) -> None:
        """Allocates host memory for copies in the background, if a checkpoint after `step` will be copied. Call this
        function after the first step of the process: pinning memory delays the kernels of the device."""
        settings, steps = self.run.recipe.checkpoint, self.run.prepared.batches.steps
        every = settings.every
        # The last checkpoint is not copied.
        if every is None or not settings.asynchronous or (step // every + 1) * every >= steps:
            return
        if isinstance(self._writer, LocalWriter):
            self._writer.reserve([one.nbytes for part in self._tensors().values() for one in part.values()])

    def save(self, position: Position, rows_seen: int, metrics: Mapping[str, float], *, waits: bool) -> None:
        """Saves a checkpoint. With `waits`, the checkpoint is complete when the function returns, otherwise only after
        `settle`."""
        run, writer = self.run, self._writer
        waits = waits or not run.recipe.checkpoint.asynchronous
        with run.world.stage(f"checkpoint of step {position.step}"):
            state, tensors = self._state(position, rows_seen, metrics), self._tensors()
            if isinstance(writer, LocalWriter):
                with run.console.waiting(f"Writing the checkpoint of step {position.step}"):
                    writer.begin(state, tensors, copies=not waits)
            else:
                writer.begin(state, tensors)
            if waits:
                self.settle()
        self.print_messages()
        self.saved_at = position.step

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written. `settle` then raises the reason."""
        return self._writer.failed

    def settle(self) -> None:
        """Waits until the checkpoint that is being written is complete. Raises if it could not be written."""
        with self.run.world.stage("the checkpoint that is being written"):
            self._writer.settle()
        self.print_messages()

    def print_messages(self) -> None:
        """Prints the messages of the writer thread."""
        while self._messages:
            show, text = self._messages.pop(0)
            show(text)

    def close(self) -> None:
        self._writer.close()
        self.print_messages()

    def _state(self, position: Position, rows_seen: int, metrics: Mapping[str, float]) -> checkpoints.State:
        run = self.run
        return checkpoints.State(
            step=position.step,
            rows_seen=rows_seen,
            recipe=resolved(run.recipe),
            data=run.prepared.fingerprints,
            world_size=run.world.size,
            measured=self._measured(metrics),
            loss_scale=[number for scale in self._scales() for number in (scale.value, float(scale.quiet))],
            skipped=self.models.trained.skipped,
            end_tokens=run.prepared.end_tokens,
            planned=run.prepared.batches.steps,
            kind=model_kind(run.recipe),
            files=export_files(run.recipe, position.carried, run.folder),
            carried=dict(position.carried),
            decay_rule="role",
            probe=probe_of(_module(self.models), self.models.device),
            models=self.fingerprints,
        )

    def _measured(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the finite validation metrics, and the metric of `checkpoint.best`."""
        names = [name for name in metrics if name == self.measure.name or name.startswith("val")]
        return {name: metrics[name] for name in names if math.isfinite(metrics[name])}

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the tensors of this rank by file name. Each rank adds the states of its random generators."""
        learner, critic, rank = self.models.trained, self.models.critic, self.run.world.rank
        for one in self.models.learners:
            reshard(one.module)
        tensors = {
            checkpoints.MODEL: held_weights(_stored(learner.module)),
            checkpoints.OPTIMIZER: {**learner.optimizer.local_state(), **generator_states(self.run.device, rank)},
        }
        if critic is not None:
            tensors[checkpoints.CRITIC] = held_weights(critic.module)
            tensors[checkpoints.CRITIC_OPTIMIZER] = critic.optimizer.local_state()
        return tensors

    def _on_saved(self, path: Path) -> None:
        """Called when a checkpoint is complete. Deletes old checkpoints."""
        settings, console = self.run.recipe.checkpoint, self.run.console

        def warn(text: str) -> None:
            self._messages.append((console.warn, text))

        keep = {"keep_last": settings.keep_last, "keep_best": settings.keep_best}
        checkpoints.prune(self.folder, **keep, measure=self.measure, warn=warn)
        self._messages.append((console.say, f"saved {path}"))

    def export(self, step: int) -> None:
        """Exports the model of checkpoint `step` as a Hugging Face folder. If the recipe has `checkpoint.best`, exports
        the best checkpoint."""
        run = self.run
        if self.saved_at != step or not run.recipe.run.export:
            return
        if run.recipe.checkpoint.best is not None:
            best = checkpoints.best_step(self.folder, self.measure)
            if best is None:
                run.console.warn(f"no checkpoint has a finite {self.measure.name}: exporting the last checkpoint")
            else:
                step, value = best
                run.console.say(f"the best checkpoint is step {step}: {self.measure.name} {value:.6g}")
        found = checkpoints.read(checkpoints.folder_of(self.folder, step))
        checkpoints.require_disk(run.folder.path, run.prepared.memory.parameters * 4, "the exported model")
        with run.console.waiting("Exporting the model and comparing its outputs"):
            messages, verified = write_export(run.recipe, found, run.folder.export, run.folder, replace=True)
        for line in messages:
            run.console.say(line)
        (run.console.say if verified.done else run.console.warn)(f"{run.folder.export}: {verified.sentence}")


def _module(models: Models) -> Policy | ValueModel:
    """The trained module."""
    module = models.trained.module
    assert isinstance(module, Policy | ValueModel)
    return module


def _layout(size: int, tensor: int, context: int) -> str:
    groups = [
        f"parallel.{key}={value}"
        for key, value in (("tensor_parallel", tensor), ("context_parallel", context))
        if value > 1
    ]
    return f"{size} process{'es' if size > 1 else ''}" + (f" ({', '.join(groups)})" if groups else "")


def _stored(module: Any) -> torch.nn.Module:
    """Returns the submodule whose weights a checkpoint stores."""
    stored = module.stored
    assert isinstance(stored, torch.nn.Module)
    return stored
