"""A run that repeats another one: the same loop, with recorded rows, responses and weights in the place of new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from lockstep.errors import Refusal
from lockstep.parity.replay.locate import Located, locate
from lockstep.parity.replay.modules import Blamed, blame
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.tolerance import tolerance_of
from lockstep.reward.scorer import Scorer
from lockstep.tape.format import TapeFolder
from lockstep.tape.record import refuse_no_weights, weights_of
from lockstep.tape.rows import items_of, rollouts_of
from lockstep.train.experience import experience_of
from lockstep.train.script import Script
from lockstep.train.session import Session
from lockstep.train.step import Learner
from lockstep.train.take import Taken, counted, rescored
from lockstep.types import Failure, Rollout

Mode = Literal["forced", "chained", "free"]
MODES: tuple[Mode, ...] = ("forced", "chained", "free")


class Replay(Script):
    """forced: each snapshot step starts from the recorded weights. chained: own weights, recorded rows and responses.
    free: only the start is recorded."""

    keeps = False

    def __init__(self, tape: TapeFolder, mode: Mode, only: Sequence[int] = ()):
        self.tape, self.mode, self.only = tape, mode, tuple(only)
        self.start: dict[str, torch.Tensor] = {}
        """What the model folder holds, where the tape has no weights."""
        self.located: Located | None = None
        self.parted: int | None = None
        """The first step at which a module parts."""

    def after(self, session: Session, step: int) -> None:
        """Where a module parts for the first time, look into it while the models are here."""
        if self.mode != "forced" or self.parted is not None:
            return
        found: list[Blamed | None] = [None]
        if session.world.main:
            own = TapeFolder(session.folder.tape).read_step(step + 1)
            tolerance = tolerance_of(self.tape.manifest()["recipe"]["model"]["dtype"], session.recipe.model.dtype)
            found = [blame(self.tape.read_step(step + 1), own, tolerance)]
        blamed = session.world.gather(found)[0][0]
        self.parted = None if blamed is None else step + 1
        if blamed is not None:
            self.restore(session, step)  # the step has moved the weights on
            self.located = locate(session, self.tape, step + 1, blamed)

    def steps(self, first: int, total: int) -> Iterable[int]:
        # Without weights on the tape the model folder holds those of the first step.
        recorded = (self.tape.weighed() or [1]) if self.mode == "forced" else _from_the_start(self.tape.steps())
        whole = set(self.tape.steps())
        wanted = [step for step in recorded if step in whole and (not self.only or step in self.only)]
        if not wanted:
            refuse_no_weights(self.tape, self.only[0] if self.only else 1)
        return [step - 1 for step in wanted]

    def restore(self, session: Session, step: int) -> None:
        number = step + 1
        if self.mode == "forced" or number == 1:
            weights = self._weights(session, number)
            for learner in _learners(session) if weights else []:
                restore_learner(learner, weights, str(self.tape.path))
        if self.mode != "free":
            session.carried |= self.tape.read_step(number).info["carried"]

    def _weights(self, session: Session, number: int) -> dict[str, torch.Tensor]:
        """Those of the tape. Where it has none the model has just been loaded, and a forced replay remembers it."""
        kept = number in self.tape.weighed()
        if not kept or session.recipe.model.lora is not None:
            refuse_other_weights(self.tape, session)
        if kept:
            return self.tape.read_weights(number)
        if self.mode == "forced" and not self.start:
            self.start = {name: value.clone() for name, value in weights_of(_learners(session)).items()}
        return self.start

    def items(self, step: int, live: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        if self.mode == "free":
            return live()
        return items_of(self.tape.read_table(self.tape.rows_file(step + 1)))

    def taken(self, step: int, session: Session, scorer: Scorer, live: Callable[[], Taken]) -> Taken:
        if self.mode == "free":
            return super().taken(step, session, scorer, live)
        record = self.tape.read_step(step + 1)
        rollouts = rollouts_of(self.tape.read_table(self.tape.rollouts_file(step + 1)))
        # Own responses tell of the engine; only from the recorded weights must they be the recorded ones.
        generated = live().experience.rollouts if self.mode == "forced" else rollouts
        scores = [_total(score) for score in rescored(rollouts, scorer, session.recipe)]
        baseline = record.tensors.get("step/baseline")
        session.tape.rollouts(generated, torch.tensor(scores), baseline)
        places = [rollout.place for rollout in rollouts]
        baselines = None if baseline is None else dict(zip(places, baseline.tolist(), strict=True))
        experience = experience_of(rollouts, baselines)
        position = int(session.carried["position"]) + session.recipe.batch.prompts
        return Taken(experience, [], position, counted(rollouts, rollouts, [], session.recipe))


def _learners(session: Session) -> list[Learner]:
    return [session.learner, *([session.critic] if session.critic else [])]


def refuse_other_weights(tape: TapeFolder, session: Session) -> None:
    """A tape without all weights is only worth something beside the model that it was recorded from."""
    recorded, here = (model.get("weights") for model in (tape.manifest()["model"], session.fingerprint))
    if session.world.main and recorded and here and recorded != here:
        raise Refusal.at(
            f"model.path {session.recipe.model.path}",
            "holds other weights than those the recorded run began with, and the tape has not all of them",
            "bring that model back, or record again with tape.weights=true",
        )


def _total(score: Any) -> float:
    return float("nan") if isinstance(score, Failure) else score.total


def _from_the_start(steps: Sequence[int]) -> list[int]:
    """The recorded steps up to the first gap."""
    return [step for number, step in enumerate(steps, start=1) if step == number]


def by_place(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], Rollout]:
    return {(rollout.place, rollout.sample): rollout for rollout in rollouts}
