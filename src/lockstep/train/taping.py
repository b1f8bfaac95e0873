"""The tape of a session: what is recorded, and the room it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.recipe.load import resolved
from lockstep.run.environment import describe_environment
from lockstep.tape.record import Recorder, Taped, TapeRecorder
from lockstep.train.checkpoint import require_disk

if TYPE_CHECKING:
    from lockstep.train.session import Session

# Trained parameters up to which a tape keeps weights and optimizer state by default.
SMALL = 16_000_000
# Weights, two moments and, in half precision, masters, as fp32.
BYTES_A_PARAMETER = 16


def recorder_of(session: Session) -> Recorder:
    """The recorder that the recipe asks for, at the step where the session stands. A tape that is full stays so."""
    recipe = session.recipe
    if not recipe.tape.record or session.over:
        return Recorder()
    settings, trained = recipe.tape, session.prepared.memory.trained
    keeps = settings.weights if settings.weights is not None else trained <= SMALL
    learners: list[Taped] = [session.learner, *([session.critic] if session.critic else [])]
    recorder = TapeRecorder(
        session.folder.tape,
        settings,
        learners,
        session.world,
        keeps_weights=keeps,
        aside=session.phases.aside,
    )
    if session.world.main and keeps:
        snapshots = -(-min(settings.steps, session.prepared.batches.steps) // settings.every)
        less = "raise tape.every, lower tape.steps, set tape.weights=false"
        require_disk(session.folder.path, trained * BYTES_A_PARAMETER * snapshots, "the tape with weights", less)
    recorder.open(_manifest(session), session.step)
    return recorder


def _manifest(session: Session) -> dict[str, object]:
    return {
        "recipe": resolved(session.recipe),
        "device": session.device.facts(),
        "world_size": session.world.size,
        "model": session.fingerprint,
        "data": session.prepared.fingerprints,
        "vocabulary": session.prepared.config.vocab_size,
        "parameters": {
            learner.name: {name: list(p.shape) for name, p in learner.optimizer.parameters.items()}
            for learner in (session.learner, session.critic)
            if learner is not None
        },
        "environment": describe_environment(),
    }
