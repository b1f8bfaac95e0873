"""The loop of a replay: the steps of another run again, with its recorded rows, responses and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from lockstep.errors import Refusal
from lockstep.parity.replay.locate import Located, locate
from lockstep.parity.replay.modules import Blamed, blame
from lockstep.parity.replay.restore import restore_learner
from lockstep.parity.replay.tolerance import tolerance_of
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import drawn_by
from lockstep.reward.row_rewards import rescored
from lockstep.run.console import Console
from lockstep.tape.format import TapeFolder
from lockstep.tape.record import refuse_no_weights, weights_of
from lockstep.tape.rows import items_of, rollouts_of
from lockstep.train.experience import spread_experience, summarised
from lockstep.train.offline import Offline, open_offline
from lockstep.train.offline import train_step as offline_step
from lockstep.train.online import Online, open_online
from lockstep.train.online import train_step as online_step
from lockstep.train.rollout_checks import Unscored, rollout_metrics
from lockstep.train.rollouts import Rollouts
from lockstep.train.run_writer import Run
from lockstep.train.training import Training
from lockstep.types import Failure, Rollout

Mode = Literal["forced", "chained", "free"]
MODES: tuple[Mode, ...] = ("forced", "chained", "free")


class Replay:
    """forced: each snapshot step starts from the recorded weights. chained: own weights, recorded rows and responses.
    free: only the start is recorded."""

    def __init__(self, tape: TapeFolder, mode: Mode, only: Sequence[int] = ()):
        self.tape, self.mode, self.only = tape, mode, tuple(only)
        self.start: dict[str, torch.Tensor] = {}
        """What the model folder holds, where the tape has no weights."""
        self.located: Located | None = None
        self.parted: int | None = None
        """The first step at which a module parts."""

    def run(self, recipe: Recipe, console: Console) -> None:
        """Make the steps in a run folder of their own, which keeps a tape and no model."""
        self._refuse_other_versions(recipe)
        self._refuse_other_noise(recipe)
        if recipe.method in ONLINE:
            with open_online(recipe, console, keeps=False) as online:
                self._loop(online.training, lambda step: online_step(self.rollouts(online, step), online, step))
        else:
            with open_offline(recipe, console, keeps=False) as offline:
                self._loop(offline.training, lambda step: offline_step(self.rows(offline, step), offline, step))

    def _refuse_other_versions(self, recipe: Recipe) -> None:
        if recipe.method in ONLINE and recipe.rollout.max_staleness and self.mode != "chained":
            raise Refusal.at(
                f"tape {self.tape.path}",
                "its responses were generated while it trained (rollout.max_staleness), by weights of several steps: "
                "no engine draws them again",
                "use --mode chained, which learns from the recorded responses",
            )

    def _refuse_other_noise(self, recipe: Recipe) -> None:
        if self.mode == "free" and recipe.method in ONLINE and self._other_noise(recipe):
            raise Refusal.at(
                f"tape {self.tape.path}",
                f"engine {self._recorded_engine()} drew its responses, and engine {recipe.rollout.engine} draws others",
                "use --mode forced or chained, which learn from the recorded responses",
            )

    def _recorded_engine(self) -> str:
        return str(self.tape.manifest()["recipe"]["rollout"].get("engine", "native"))

    def _other_noise(self, recipe: Recipe) -> bool:
        return drawn_by(self._recorded_engine()) != drawn_by(recipe.rollout.engine)

    def _loop(self, training: Training, train: Callable[[int], dict[str, float]]) -> None:
        for step in self.steps():
            self.restore(training, step)
            with training.step(step + 1):
                metrics = train(step)
            training.finish_step(step + 1, metrics)
            self.after(training, step)
        training.finish()

    def rows(self, offline: Offline, step: int) -> Sequence[Any]:
        if self.mode == "free":
            return offline.loader.take(step)
        return items_of(self.tape.read_table(self.tape.rows_file(step + 1)))

    def rollouts(self, online: Online, step: int) -> Rollouts:
        return online.take_rollouts() if self.mode == "free" else self._recorded_rollouts(online, step)

    def _recorded_rollouts(self, online: Online, step: int) -> Rollouts:
        """The recorded responses, judged again."""
        training, recipe = online.training, online.training.run.recipe
        rollouts = rollouts_of(self.tape.read_table(self.tape.rollouts_file(step + 1)))
        # Own responses tell of the engine; only from the recorded weights must they be the recorded ones.
        own = self.mode == "forced" and not self._other_noise(recipe)
        generated = online.take_rollouts().experience.everyone() if own else rollouts
        judged_S = torch.tensor([_total(score) for score in rescored(rollouts, online.scorer, recipe)])
        baseline = self.tape.read_step(step + 1).tensors.get("step/baseline")
        indices = [rollout.prompt_index for rollout in rollouts]
        baselines = None if baseline is None else dict(zip(indices, baseline.tolist(), strict=True))
        position = int(training.carried["position"]) + recipe.batch.prompts
        summaries, world = summarised(rollouts), training.run.world
        # Whole groups, as a rank generates them.
        here = [rollout for rollout in rollouts if rollout.prompt_index % world.size == world.rank]
        prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
        experience = spread_experience(summaries, prompts, here, baselines, world)
        metrics = rollout_metrics(summaries, summaries, 0)
        return Rollouts(experience, Unscored(0, []), position, metrics, generated, judged_S)

    def after(self, training: Training, step: int) -> None:
        """Where a module parts for the first time, look into it while the models are here."""
        if self.mode != "forced" or self.parted is not None:
            return
        found: list[Blamed | None] = [None]
        run = training.run
        if run.world.main:
            own = TapeFolder(run.folder.tape).read_step(step + 1)
            tolerance = tolerance_of(self.tape.manifest()["recipe"]["model"]["dtype"], run.recipe.model.dtype)
            found = [blame(self.tape.read_step(step + 1), own, tolerance)]
        blamed = run.world.gather(found)[0][0]
        self.parted = None if blamed is None else step + 1
        if blamed is not None:
            self.restore(training, step)  # the step has moved the weights on
            self.located = locate(run, training.models, self.tape, step + 1, blamed)

    def steps(self) -> Iterable[int]:
        """The steps to make, counted from 0."""
        # Without weights on the tape the model folder holds those of the first step.
        recorded = (self.tape.weighed() or [1]) if self.mode == "forced" else _from_the_start(self.tape.steps())
        whole = set(self.tape.steps())
        wanted = [step for step in recorded if step in whole and (not self.only or step in self.only)]
        if not wanted:
            refuse_no_weights(self.tape, self.only[0] if self.only else 1)
        return [step - 1 for step in wanted]

    def restore(self, training: Training, step: int) -> None:
        number = step + 1
        if self.mode == "forced" or number == 1:
            weights = self._weights(training, number)
            for learner in training.models.learners if weights else []:
                restore_learner(learner, weights, str(self.tape.path))
        if self.mode != "free":
            training.carried.update(self.tape.read_step(number).info["carried"])

    def _weights(self, training: Training, number: int) -> dict[str, torch.Tensor]:
        """Those of the tape. Where it has none the model has just been loaded, and a forced replay remembers it."""
        kept = number in self.tape.weighed()
        if not kept or training.run.recipe.model.lora is not None:
            refuse_other_weights(self.tape, training.run)
        if kept:
            return self.tape.read_weights(number)
        if self.mode == "forced" and not self.start:
            self.start = {name: value.clone() for name, value in weights_of(training.models.learners).items()}
        return self.start


def refuse_other_weights(tape: TapeFolder, run: Run) -> None:
    """A tape without all weights is only worth something beside the model that it was recorded from."""
    recorded, here = (model.get("weights") for model in (tape.manifest()["model"], run.fingerprint))
    if run.world.main and recorded and here and recorded != here:
        raise Refusal.at(
            f"model.path {run.recipe.model.path}",
            "holds other weights than those the recorded run began with, and the tape has not all of them",
            "bring that model back, or record again with tape.weights=true",
        )


def _total(score: Any) -> float:
    return float("nan") if isinstance(score, Failure) else score.total


def _from_the_start(steps: Sequence[int]) -> list[int]:
    """The recorded steps up to the first gap."""
    return [step for number, step in enumerate(steps, start=1) if step == number]


def by_prompt_and_sample(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], Rollout]:
    return {(rollout.prompt_index, rollout.sample): rollout for rollout in rollouts}
