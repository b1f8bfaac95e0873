"""Checkpoints of a run: go on from the newest, save, export. Gathering weights is a collective of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.model.weights import restore_weights, trained_weights
from lockstep.recipe.load import resolved
from lockstep.run import checkpoint as checkpoints
from lockstep.train.export import write_export
from lockstep.train.models import Models
from lockstep.train.optim import LossScale
from lockstep.train.resume import refuse_changed_data, refuse_changed_recipe
from lockstep.train.run import Run


@dataclass
class Position:
    """Where a run stands: steps made, and what its loop carries from one step to the next."""

    step: int = 0
    carried: dict[str, float] = field(default_factory=dict)


class Checkpointer:
    def __init__(self, run: Run, models: Models):
        self.run, self.models = run, models
        self.folder = run.folder.checkpoints
        self.saved_at: int | None = None

    def resume(self) -> Position:
        """The newest whole checkpoint brought back; without one, the start."""
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
        for change in refuse_changed_recipe(found.state.recipe, resolved(run.recipe)):
            run.console.warn(f"resuming although {change}")
        refuse_changed_data(found.state.data, run.prepared.fingerprints)
        self._restore(found)
        run.rewind(found.state.step)
        run.console.say(f"resuming {run.folder.path} after step {found.state.step}")
        self.saved_at = found.state.step
        return Position(found.state.step, dict(found.state.carried))

    def _restore(self, found: checkpoints.Checkpoint) -> None:
        learner, critic = self.models.trained, self.models.critic
        restore_weights(_stored(learner.module), found.weights, str(found.path))
        learner.optimizer.restore(found.optimizer)
        learner.skipped = found.state.skipped
        if critic is not None:
            restore_weights(critic.module, found.critic, str(found.path))
            critic.optimizer.restore(found.critic_optimizer)
        numbers = found.state.loss_scale
        for scale, value, quiet in zip(self._scales(), numbers[::2], numbers[1::2], strict=True):
            scale.value, scale.quiet = value, int(quiet)
        self._restore_random_states(found)

    def _restore_random_states(self, found: checkpoints.Checkpoint) -> None:
        world = self.run.world
        if found.state.world_size != world.size:
            self.run.console.warn(
                f"resuming on {world.size} processes what ran on {found.state.world_size}: "
                "rows and updates are the same, dropout draws anew"
            )
            return
        torch.set_rng_state(found.optimizer[f"rng/host/{world.rank}"])
        self.run.device.set_rng_state(found.optimizer[f"rng/device/{world.rank}"])

    def _scales(self) -> list[LossScale]:
        return [learner.scale for learner in self.models.learners if learner.scale is not None]

    def save(self, position: Position, rows_seen: int, val_loss: float | None) -> None:
        """A checkpoint of the step just finished."""
        with self.run.world.stage(f"checkpoint of step {position.step}"):
            self._save(position, rows_seen, val_loss)

    def _save(self, position: Position, rows_seen: int, val_loss: float | None) -> None:
        run, world = self.run, self.run.world
        learner, critic = self.models.trained, self.models.critic
        optimizer = learner.optimizer.tensors()
        tensors = {checkpoints.MODEL: trained_weights(_stored(learner.module)), checkpoints.OPTIMIZER: optimizer}
        if critic is not None:
            tensors[checkpoints.CRITIC] = trained_weights(critic.module)
            tensors[checkpoints.CRITIC_OPTIMIZER] = critic.optimizer.tensors()
        states = world.gather((torch.get_rng_state(), run.device.rng_state()))
        if world.main:
            for rank, (host, own) in enumerate(states):
                optimizer |= {f"rng/host/{rank}": host, f"rng/device/{rank}": own.cpu()}
            state = checkpoints.State(
                step=position.step,
                rows_seen=rows_seen,
                recipe=resolved(run.recipe),
                data=run.prepared.fingerprints,
                world_size=world.size,
                val_loss=val_loss,
                loss_scale=[number for scale in self._scales() for number in (scale.value, float(scale.quiet))],
                skipped=learner.skipped,
                end_tokens=run.prepared.end_tokens,
                carried=position.carried,
            )
            path = checkpoints.save(self.folder, state, tensors)
            settings = run.recipe.checkpoint
            checkpoints.prune(
                self.folder, keep_last=settings.keep_last, keep_best=settings.keep_best, warn=run.console.warn
            )
            run.console.say(f"saved {path}")
        self.saved_at = position.step
        world.barrier()

    def export(self, step: int) -> None:
        """The model of a step as a Hugging Face folder in the run folder, where that step was saved."""
        run = self.run
        if self.saved_at != step or not run.recipe.run.export:
            return
        found = checkpoints.read(checkpoints.folder_of(self.folder, step))
        checkpoints.require_disk(run.folder.path, run.prepared.memory.parameters * 4, "the exported model")
        for line in write_export(run.recipe, found, run.folder.export, replace=True):
            run.console.say(line)


def _stored(module: Any) -> torch.nn.Module:
    """The part of a learner's module that a checkpoint holds."""
    stored = module.stored
    assert isinstance(stored, torch.nn.Module)
    return stored
