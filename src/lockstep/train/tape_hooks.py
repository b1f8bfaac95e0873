"""The tape of a run: what is recorded, and the room it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.errors import refuse_all
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.weights import biases_and_norms
from lockstep.recipe.loader import resolved
from lockstep.run.checkpoint import require_disk
from lockstep.run.folder import describe_environment
from lockstep.tape.module_trace import unmatched_patterns
from lockstep.tape.tape_recorder import Recorder, Taped, TapeRecorder
from lockstep.train.advantages import Advantages
from lockstep.train.experience import Experience
from lockstep.train.logprobs import ModelOutputs
from lockstep.train.models import Models
from lockstep.train.rollouts import Rollouts
from lockstep.train.run_writer import Run
from lockstep.train.step import Learner

# Trained parameters up to which a tape keeps weights and optimizer state by default.
SMALL = 16_000_000
# Weights, two moments and, in half precision, masters, as fp32.
BYTES_A_PARAMETER = 16


def make_recorder(run: Run, models: Models, step: int) -> Recorder:
    """The recorder that the recipe asks for, after `step` steps. The tape of a finished run stays as it is."""
    recipe, steps = run.recipe, run.prepared.batches.steps
    if not recipe.tape.record or step >= steps:
        return Recorder()
    settings, trained = recipe.tape, run.prepared.memory.trained
    keeps = settings.weights if settings.weights is not None else trained <= SMALL
    learners: list[Taped] = [*models.learners]
    refuse_all(unmatched_patterns([one.module for one in models.learners], settings.modules, settings.tensors))
    aside = run.phases.aside
    recorder = TapeRecorder(run.folder.tape, settings, learners, run.world, keeps_weights=keeps, aside=aside)
    if run.world.main and keeps:
        snapshots = -(-min(settings.steps, steps) // settings.every)
        less = "raise tape.every, lower tape.steps, set tape.weights=false"
        require_disk(run.folder.path, trained * BYTES_A_PARAMETER * snapshots, "the tape with weights", less)
    recorder.open(_manifest(run, models), step)
    return recorder


def _manifest(run: Run, models: Models) -> dict[str, object]:
    return {
        "recipe": resolved(run.recipe),
        "device": run.device.facts(),
        "world_size": run.world.size,
        "model": run.fingerprint,
        "engine": run.engine,
        "data": run.prepared.fingerprints,
        "vocabulary": run.prepared.config.vocab_size,
        "parameters": {
            learner.name: {name: list(p.shape) for name, p in learner.optimizer.parameters.items()}
            for learner in models.learners
        },
        "spared": {learner.name: sorted(_spared(learner)) for learner in models.learners},
        "environment": describe_environment(),
    }


def _spared(learner: Learner) -> frozenset[str]:
    """What weight decay skips, as the model says; the optimizer is judged by it."""
    assert isinstance(learner.module, Policy | ValueModel)
    return biases_and_norms(learner.module.stored) & learner.optimizer.parameters.keys()


def record_rollouts(
    tape: Recorder, rollouts: Rollouts, experience: Experience, known: ModelOutputs, advantages: Advantages
) -> None:
    """Online: what a step learns from, before its first update. A step that is recorded is whole on every rank."""
    if not tape.on:
        return
    every = experience.all_rollouts_and_examples()
    judged_S = experience.scores_S if rollouts.rescored_S is None else rollouts.rescored_S
    generated = [rollout for rollout, _ in every] if rollouts.generated is None else rollouts.generated
    tape.rollouts(generated, judged_S, experience.baseline_S)
    tape.examples([example for _, example in every])
    # The names are part of the tape format.
    vectors = {
        "old": known.old_K,
        "reference": known.reference_K,
        "values": known.values_K,
        "trainer": known.trainer_K,
        "squares": known.squares_K,
        "rewards": advantages.rewards_K,
        "advantages": advantages.advantages_K,
        "returns": advantages.returns_K,
        "keep": advantages.keep_K,
        "importance": advantages.is_weights_K,
    }
    tape.vectors({name: None if value is None else experience.all_gather(value) for name, value in vectors.items()})


def record_rows(tape: Recorder, rows: Sequence[Any], references: Sequence[torch.Tensor]) -> None:
    """Offline: the rows of an update, and what the reference says of them."""
    tape.rows(rows)
    tape.vectors({f"reference{number or ''}": said for number, said in enumerate(references)})
