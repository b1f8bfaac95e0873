"""Repeats recorded steps: runs the training loop with the recorded rows, responses and weights.

A run that was resumed with a different recipe has several parts. Each step is replayed with the recipe with which it
was trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.resolve import image_folder
from lockstep.parallel.world import joined
from lockstep.parity.replay.diverged_module import DivergedModule, first_diverged
from lockstep.parity.replay.locate_operator import Located, locate
from lockstep.parity.replay.tolerances import tolerance_of
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import drawn_by
from lockstep.reward.row_rewards import rescored
from lockstep.rollout.engine import training_sampling
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_recorder import refuse_no_weights, restore_learner, weights_of
from lockstep.tape.tape_rows import items_of, rollouts_of
from lockstep.train.experience import build_spread_experience, rollout_metas
from lockstep.train.monitor import Unscored, rollout_metrics
from lockstep.train.offline import Offline, open_offline
from lockstep.train.offline import train_step as offline_step
from lockstep.train.online import Online, open_online
from lockstep.train.online import train_step as online_step
from lockstep.train.rollouts import Rollouts
from lockstep.train.run_writer import Run
from lockstep.train.training import Training
from lockstep.types import Failure, Rollout

Mode = Literal["forced", "chained", "free"]
MODES: tuple[Mode, ...] = ("forced", "chained", "free")
REPLAYS = "replays"


class Replay:
    """Repeats recorded steps in one of three modes. In the mode forced, each step with recorded weights starts from
    these weights. In the mode chained, the replay uses the recorded rows and responses, and trains its own weights from
    step to step. In the mode free, the replay uses only the recorded initial weights, and loads rows and generates
    responses itself."""

    def __init__(self, tape: TapeFolder, mode: Mode, only: Sequence[int] = ()):
        self.tape, self.mode, self.only = tape, mode, tuple(only)
        self.start: dict[str, torch.Tensor] = {}
        """The weights of the model folder, which are used if the recording has no weights."""
        self.located: Located | None = None
        self.diverged_step: int | None = None
        """The first step at which a module diverges."""

    def run(self, recipe: Recipe, console: Console) -> None:
        """Runs the replayed steps in a new run folder. The folder contains a recording of the replay, but no model."""
        self._refuse_async(recipe)
        self._refuse_other_noise(recipe)
        if recipe.method in ONLINE:
            # Only a free replay calls the environments. The other modes use the recorded observations.
            with open_online(recipe, console, keeps=False, plays=self.mode == "free") as online:
                self._loop(online.training, lambda step: online_step(self.rollouts(online, step), online, step))
        else:
            with open_offline(recipe, console, keeps=False) as offline:
                self._loop(offline.training, lambda step: offline_step(self.rows(offline, step), offline, step))

    def _refuse_async(self, recipe: Recipe) -> None:
        if recipe.method in ONLINE and recipe.rollout.max_staleness and self.mode != "chained":
            raise Refusal.at(
                f"tape {self.tape.path}",
                "its responses cannot be generated again, because they were generated with weights of several steps "
                "while training ran (rollout.max_staleness)",
                "use --mode chained, which trains on the recorded responses",
                code="not-replayable",
            )

    def _refuse_other_noise(self, recipe: Recipe) -> None:
        if self.mode == "free" and recipe.method in ONLINE and self._other_noise(recipe):
            raise Refusal.at(
                f"tape {self.tape.path}",
                f"engine {self._recorded_engine()} sampled its responses, and engine {recipe.rollout.engine} "
                "samples with other random numbers",
                "use --mode forced or chained, which train on the recorded responses",
                code="not-replayable",
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
        files = TapeImages(self.tape.path, image_folder(offline.training.run.recipe.model))
        return items_of(self.tape.read_table(self.tape.rows_file(step + 1)), files)

    def rollouts(self, online: Online, step: int) -> Rollouts:
        return online.take_rollouts() if self.mode == "free" else self._recorded_rollouts(online, step)

    def _recorded_rollouts(self, online: Online, step: int) -> Rollouts:
        """Returns the recorded responses of a step, with rewards that are computed again."""
        training, recipe = online.training, online.training.run.recipe
        files = TapeImages(self.tape.path, image_folder(recipe.model))
        rollouts = rollouts_of(self.tape.read_table(self.tape.rollouts_file(step + 1)), files)
        # In the mode forced, the replay also generates responses, to test the rollout engine. The generated responses
        # should equal the recorded responses, because the step starts from the recorded weights.
        generates = self.mode == "forced" and not self._other_noise(recipe)
        generated = self._generated(online, rollouts) if generates else rollouts
        judged_S = torch.tensor([_total(score) for score in rescored(rollouts, online.scorer, recipe)])
        baseline = self.tape.read_step(step + 1).tensors.get("step/baseline")
        indices = [rollout.prompt_index for rollout in rollouts]
        baselines = None if baseline is None else dict(zip(indices, baseline.tolist(), strict=True))
        position = int(training.carried["position"]) + recipe.batch.prompts
        summaries, world = rollout_metas(rollouts), training.run.world
        # Selects the responses of this rank: all samples of a prompt belong to one rank.
        here = [rollout for rollout in rollouts if rollout.prompt_index % world.size == world.rank]
        prompts = {rollout.prompt_index: rollout.prompt for rollout in rollouts}
        experience = build_spread_experience(summaries, prompts, here, baselines, world)
        metrics = rollout_metrics(summaries, summaries, 0)
        return Rollouts(experience, Unscored(0, []), position, metrics, generated, judged_S)

    def _generated(self, online: Online, rollouts: list[Rollout]) -> list[Rollout]:
        """Generates the responses of a step again. In conversations with an environment, each turn of the model is
        generated after the recorded observations."""
        if not any(rollout.trajectory is not None for rollout in rollouts):
            return online.take_rollouts().experience.all_rollouts()
        training, generator = online.training, online.training.generator
        assert generator is not None
        sampling = training_sampling(training.run.recipe, generator.stop_ids)
        return generator.repeat_turns(rollouts, sampling)

    def after(self, training: Training, step: int) -> None:
        """Locates the wrong operator at the first step at which a module diverges, while the models are still
        loaded."""
        if self.mode != "forced" or self.diverged_step is not None:
            return
        found: list[DivergedModule | None] = [None]
        run = training.run
        if run.world.main:
            replayed = TapeFolder(run.folder.tape).read_step(step + 1)
            tolerance = tolerance_of(self.tape.manifest()["recipe"]["model"]["dtype"], run.recipe.model.dtype)
            found = [first_diverged(self.tape.read_step(step + 1), replayed, tolerance)]
        diverged = run.world.gather(found)[0][0]
        if diverged is not None:
            self.diverged_step = step + 1
            self.restore(training, step)  # the step has updated the weights
            self.located = locate(run, training.models, self.tape, step + 1, diverged)

    def steps(self) -> Iterable[int]:
        """Returns the steps to replay, counted from 0."""
        # If the recording has no weights, the mode forced runs only the first step, which starts from the model folder.
        complete = self.tape.steps()
        recorded = (self.tape.weighed() or [1]) if self.mode == "forced" else _from_the_start(complete)
        wanted = [step for step in recorded if step in set(complete) and (not self.only or step in self.only)]
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
        """Returns the recorded weights of a step. If the step has no recorded weights, the mode forced returns a copy
        of the weights from the model folder, and other modes return an empty dictionary."""
        kept = number in self.tape.weighed()
        if not kept or training.run.recipe.model.lora is not None:
            refuse_other_weights(self.tape, training.run)
        if kept:
            return self.tape.read_weights(number)
        if self.mode == "forced" and not self.start:
            self.start = {name: value.clone() for name, value in weights_of(training.models.learners).items()}
        return self.start


def refuse_other_weights(tape: TapeFolder, run: Run) -> None:
    """Refuses a recording that lacks weights if the model folder contains other weights than the recorded run started
    from."""
    recorded, here = (model.get("weights") for model in (tape.manifest()["model"], run.fingerprint))
    if run.world.main and recorded and here and recorded != here:
        raise Refusal.at(
            f"model.path {run.recipe.model.path}",
            "contains other weights than those that the recorded run started from, and the recording lacks some of "
            "these weights",
            "restore the original model folder, or record again with tape.weights=true",
            code="other-weights",
        )


def _total(score: Any) -> float:
    return float("nan") if isinstance(score, Failure) else score.total


def _from_the_start(steps: Sequence[int]) -> list[int]:
    """Returns the recorded steps up to the first gap."""
    return [step for number, step in enumerate(steps, start=1) if step == number]


# -- the replay's run folder


def run_replay(replay: Replay, recipe: Recipe, console: Console) -> Path | None:
    """Runs the replay. Returns the run folder of the replay, or None on ranks other than 0."""
    replay.run(recipe, console)
    return None if int(os.environ.get("RANK", "0")) else Path(recipe.run.folder) / recipe.run.name


def replayed_recipe(source: RunFolder, name: str, overrides: Sequence[str], recorded: Path) -> Recipe:
    """Returns the recorded recipe with the settings of a replay: it writes a recording to a new folder, and saves no
    checkpoints, exports or validation results."""
    settled = [
        f"run.folder={source.path / REPLAYS}",
        f"run.name={name}",
        "run.resume=never",
        "run.export=false",
        "log.track=[]",
        "log.prometheus=null",
        "val.questions=null",
        "val.every=null",
        "val.at_start=false",
        "val.environment=null",
        "val.agent=null",
        "data.val=[]",
        "checkpoint.best=null",
        "checkpoint.keep_best=0",
        "run.early_stopping=null",
        "tape.record=true",
    ]
    if any(word.startswith("model.dtype=") for word in overrides):
        settled.append("model.master_weights=null")  # the default of this key depends on the dtype
    return load_recipe(str(recorded), [*settled, *overrides], stored=True)


@contextmanager
def reserved_name(source: RunFolder, kind: str) -> Iterator[str]:
    """Yields a free folder name for a replay, which is `kind-N` with the first free number N. Replays that start at the
    same time get different names. All ranks of one replay get the same name."""
    name = _reserve(source, kind) if int(os.environ.get("RANK", "0")) == 0 else ""
    try:
        with joined(Cpu()) as world:
            agreed = world.gather(name)[0]
        yield agreed
    finally:
        if name:
            _reservation(source, name).rmdir()


def _reserve(source: RunFolder, kind: str) -> str:
    """Reserves a free name by creating a marker folder atomically. `reserved_name` removes the marker folder when the
    replay ends."""
    for number in count(1):
        name = f"{kind}-{number}"
        folder, mark = source.path / REPLAYS / name, _reservation(source, name)
        try:
            mark.parent.mkdir(exist_ok=True)
            mark.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            remedy = "a replay writes into the run's folder: make it writable, or copy the run"
            raise Refusal.at(
                str(mark.parent), f"cannot be written to: {error.strerror}", remedy, code="unwritable"
            ) from error
        if not folder.exists():
            return name
        mark.rmdir()
    raise AssertionError("this line is unreachable")


def _reservation(source: RunFolder, name: str) -> Path:
    return source.path / REPLAYS / f".reserved-{name}"


# -- runs that were resumed with a different recipe


@dataclass(frozen=True)
class RunPart:
    """A part of a run that was trained with one recipe: the steps after `before` up to `last`. If `last` is None, the
    part goes to the end of the run."""

    recipe: Path
    before: int
    last: int | None

    def holds(self, step: int) -> bool:
        return self.before < step and (self.last is None or step <= self.last)


def parts_of(source: RunFolder) -> list[RunPart]:
    if not source.recipe.is_file():
        raise Refusal.at(
            str(source.path),
            "is not a run folder",
            "give the folder of a run that was recorded with tape.record=true",
            code="not-a-run",
        )
    found, before = [], 0
    for last, file in source.earlier_recipes().items():
        found.append(RunPart(file, before, last))
        before = last
    return [*found, RunPart(source.recipe, before, None)]


def steps_by_part(
    source: RunFolder, tape: TapeFolder, only: Sequence[int], *, forced: bool
) -> list[tuple[RunPart, list[int]]]:
    """Returns the parts of the run to replay, each with its steps. An empty list of steps means all recorded steps.

    In the mode forced, each step starts from recorded weights. The modes chained and free continue with the replay's
    weights, so they stop at the first change of the recipe.
    """
    parts = parts_of(source)
    if len(parts) == 1:
        return [(parts[0], list(only))]
    steps = [step for step in ((tape.weighed() or [1]) if forced else tape.steps()) if not only or step in only]
    found = [(part, mine) for part in parts if (mine := [step for step in steps if part.holds(step)])]
    if not forced:
        found = [each for each in found if each[0] is parts[0]]
    if not found and only and not forced:
        raise Refusal.at(
            f"--step {only[0]}",
            f"{source.path} was resumed with another recipe after step {parts[0].last}, and this mode replays only "
            "the steps before this change",
            "use --mode forced, which starts each step from the recorded weights",
            code="not-replayable",
        )
    return found or [(parts[0], list(only))]  # the replay reports that no step was recorded


def skipped_steps(source: RunFolder, tape: TapeFolder, only: Sequence[int], *, forced: bool) -> list[str]:
    """Returns a remark about the recorded steps that this mode does not replay: those without recorded weights, or
    those after the first change of the recipe."""
    if forced:
        rest = len(set(tape.steps()) - set(tape.weighed() or [1])) if not only else 0
        return [f"{rest} more recorded steps have no weights; --mode chained replays them too."] if rest else []
    first, *later = parts_of(source)
    missing = [step for step in tape.steps() if not first.holds(step)]
    if not later or not missing:
        return []
    return [
        f"The run was resumed with another recipe after step {first.last}: {len(missing)} recorded steps from "
        f"{missing[0]} on are not replayed in this mode. --mode forced replays each step with its own recipe."
    ]
