"""A run in progress: its folder, learner, logs and checkpoints, so that the loop itself stays a page.

Rank 0 alone writes. Collectives (gathering weights, validation) run on every rank, in the same order.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep.device.base import Device
from lockstep.errors import Interrupted, Refusal
from lockstep.kernels.fused import replaced
from lockstep.model.fingerprint import model_fingerprint
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.parallel.world import World
from lockstep.recipe.load import dump_recipe, resolved
from lockstep.recipe.methods import ONLINE
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import MetricsLog, Phases, append_text, missing_steps, read_metrics, rewind_lines
from lockstep.run.progress import Console
from lockstep.run.sinks import open_sinks
from lockstep.run.summary import before_and_after
from lockstep.train import checkpoint as checkpoints
from lockstep.train.answers import Examiner
from lockstep.train.build import build_critic, build_learner, build_reference
from lockstep.train.export_run import write_export
from lockstep.train.optim import LossScale
from lockstep.train.resume import refuse_changed_data, refuse_changed_recipe
from lockstep.train.samples import sample_line
from lockstep.train.setup import Prepared, PreparedOnline
from lockstep.train.speaker import Speaker
from lockstep.train.step import Learner
from lockstep.train.taping import recorder_of
from lockstep.types import Rollout

# Answers of a validation that are stored in samples.jsonl.
STORED_ANSWERS = 20
# The metric that counts a step's tokens, offline and online.
TOKENS = ("train/tokens", "perf/total_num_tokens")


@contextmanager
def opened(
    prepared: Prepared | PreparedOnline,
    device: Device,
    world: World,
    console: Console,
    switches: dict[str, str],
    judge: Examiner,
    *,
    keeps: bool = True,
) -> Iterator[Session]:
    """A session that is fresh or resumed, and closed whatever happens. One that `keeps` nothing leaves no model."""
    folder = RunFolder(Path(prepared.recipe.run.folder) / prepared.recipe.run.name)
    if world.main:
        _claim(folder, prepared, console)
    with folder.lock() if world.main else nullcontext(), _graceful_interrupt(console) as interrupt:
        session = Session(prepared, folder, device, world, console, switches, interrupt, judge, keeps=keeps)
        try:
            yield session
        except BaseException:
            session.close(ok=False)
            raise
        session.close(ok=True)


def _claim(folder: RunFolder, prepared: Prepared | PreparedOnline, console: Console) -> None:
    resume, used = prepared.recipe.run.resume, folder.path.exists() and bool(checkpoints.steps_in(folder.checkpoints))
    if resume == "never" and folder.path.exists():
        raise Refusal.at("run.resume", f"{folder.path} exists and resume is never", "choose another run.name")
    if resume == "required" and not used:
        raise Refusal.at("run.resume", f"{folder.path} has no checkpoint to continue from", "set run.resume=auto")
    folder.create()
    checkpoints.require_disk(folder.checkpoints, prepared.memory.checkpoint_bytes, "a checkpoint")


@contextmanager
def _graceful_interrupt(console: Console) -> Iterator[list[int]]:
    """The first Ctrl-C is remembered until the step is done; the second stops at once."""
    asked: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        console.warn("stopping after this step and a checkpoint; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    def __init__(
        self,
        prepared: Prepared | PreparedOnline,
        folder: RunFolder,
        device: Device,
        world: World,
        console: Console,
        switches: dict[str, str],
        interrupt: list[int],
        judge: Examiner,
        *,
        keeps: bool,
    ):
        self.prepared, self.folder, self.device, self.world, self.console = prepared, folder, device, world, console
        self.interrupt, self.keeps = interrupt, keeps
        self.recipe = prepared.recipe
        self.switches = switches
        self.torch_device = device.torch_device(world.local_rank)
        self.phases = Phases(device.synchronise, self._stage)
        self.metrics = MetricsLog(folder.metrics)
        self.sinks = (
            open_sinks(list(self.recipe.log.track), folder, self.recipe.log.project, console) if world.main else []
        )
        self.learner, self.critic, self.reference = self._models()
        self.speaker = self._speaker(judge) if self.online or prepared.questions else None
        self.held_out: Callable[[], dict[str, float]] | None = None
        """Loss and metrics of the validation rows; set by the loop that has some."""
        self.carried: dict[str, float] = {}
        self.fallbacks: dict[str, int] | None = None
        self.step = self._resume()
        self.saved_at = self.step
        self.fingerprint = self._fingerprint() if world.main else {}
        self.tape = recorder_of(self)
        self._show_plan()
        if world.main:
            self._write_evidence()
            for sink in self.sinks:
                sink.start(self.recipe.run.name, resolved(self.recipe), self.step)
        self.console.begin(prepared.batches.steps, self.step)

    # -- the way in

    @property
    def online(self) -> bool:
        return self.recipe.method in ONLINE

    @property
    def module(self) -> Policy | ValueModel:
        """What is trained."""
        module = self.learner.module
        assert isinstance(module, Policy | ValueModel)
        return module

    @property
    def speaking(self) -> Speaker:
        assert self.speaker is not None
        return self.speaker

    def _speaker(self, judge: Examiner) -> Speaker:
        assert isinstance(self.module, Policy)
        return Speaker(self.recipe, self.prepared, self.module, self.device, self.torch_device, self.world, judge)

    def _models(self) -> tuple[Learner, Learner | None, Policy | None]:
        recipe, where = self.recipe, (self.device, self.world, self.torch_device)
        with self.console.task(f"Loading {recipe.model.path}", None), self.world.stage("loading the model"):
            models = build_learner(recipe, *where), build_critic(recipe, *where), build_reference(recipe, *where)
        # Each rank draws its own dropout; nothing else in a step is random.
        self.device.seed(recipe.run.seed + self.world.rank)
        return models

    def _resume(self) -> int:
        if self.world.main:
            checkpoints.sweep(self.folder.checkpoints)
            checkpoints.set_damaged_aside(self.folder.checkpoints, self.console.warn)
        self.world.barrier()
        found = checkpoints.newest(self.folder.checkpoints)
        if found is None:
            if self.world.main:
                self.metrics.rewind(-1)
                rewind_lines(self.folder.samples, -1)
            return 0
        for change in refuse_changed_recipe(found.state.recipe, resolved(self.recipe)):
            self.console.warn(f"resuming although {change}")
        refuse_changed_data(found.state.data, self.prepared.fingerprints)
        restore_weights(self.module.stored, found.weights, str(found.path))
        self.learner.optimizer.restore(found.optimizer)
        self.learner.skipped = found.state.skipped
        if self.critic is not None:
            restore_weights(self.critic.module, found.critic, str(found.path))
            self.critic.optimizer.restore(found.critic_optimizer)
        self.carried = dict(found.state.carried)
        for scale, value, quiet in zip(
            self._scales(), found.state.loss_scale[::2], found.state.loss_scale[1::2], strict=True
        ):
            scale.value, scale.quiet = value, int(quiet)
        self._restore_random_states(found)
        if self.world.main:
            self.metrics.rewind(found.state.step)
            rewind_lines(self.folder.samples, found.state.step)
            self._say_lost_steps(found.state.step)
        self.console.say(f"resuming {self.folder.path} after step {found.state.step}")
        return found.state.step

    def _say_lost_steps(self, last: int) -> None:
        file = self.folder.metrics
        logged = [step for step, _ in read_metrics(file)] if file.exists() else []
        if lost := missing_steps(logged, last):
            state = "has a hole" if logged else "is empty" if file.exists() else "is missing"
            self.console.warn(f"{file} {state}: the metrics of steps {lost} of {last} are lost; the weights are whole")

    def _scales(self) -> list[LossScale]:
        learners = [self.learner, *([self.critic] if self.critic else [])]
        return [learner.scale for learner in learners if learner.scale is not None]

    def _restore_random_states(self, found: checkpoints.Checkpoint) -> None:
        if found.state.world_size != self.world.size:
            self.console.warn(
                f"resuming on {self.world.size} processes what ran on {found.state.world_size}: "
                "rows and updates are the same, dropout draws anew"
            )
            return
        torch.set_rng_state(found.optimizer[f"rng/host/{self.world.rank}"])
        self.device.set_rng_state(found.optimizer[f"rng/device/{self.world.rank}"])

    def _fingerprint(self) -> dict[str, Any]:
        """What is trained, by content, and what kind of model it is."""
        architectures = getattr(self.prepared.config, "architectures", None) or ["unknown"]
        return {
            **model_fingerprint(self.recipe.model.path, self.prepared.tokenizer),
            "architecture": architectures[0],
            "parameters": self.prepared.memory.parameters,
        }

    @property
    def over(self) -> bool:
        """Nothing is left to train."""
        return self.step >= self.prepared.batches.steps

    def _write_evidence(self) -> None:
        if self.over and self.folder.recipe.is_file():
            return  # what the run trained, and where, is told already
        self.folder.write_recipe(dump_recipe(self.recipe), self.step)
        self.folder.write_env(
            {
                "device": self.device.facts(),
                "world_size": self.world.size,
                "determinism": self.switches,
                "data": self.prepared.fingerprints,
                "model": self.fingerprint,
                "fused": self._fused(),
            }
        )

    def _fused(self) -> dict[str, list[str]]:
        """Operators of the device in the place of the trained models' own modules."""
        trained = {"model": self.learner, "critic": self.critic}
        return {name: replaced(learner.module) for name, learner in trained.items() if learner is not None}

    def _show_plan(self) -> None:
        counts, memory = self.prepared.train.counts, self.prepared.memory
        trained = f"{memory.trained:,} of {memory.parameters:,} parameters"
        rows = [
            ("model", f"{self.recipe.model.path} ({trained} trained, {self.recipe.model.dtype})"),
            *[("data", note) for note in self.prepared.train.notes],
            ("tokens", counts.sentence()),
            *self.prepared.batches.lines(),
            ("memory", f"about {memory.peak.total / 2**30:.2f} GiB at the peak ({memory.peak.name})"),
            *[("fused", f"in the {name}: {', '.join(parts)}") for name, parts in self._fused().items() if parts],
            ("run folder", str(self.folder.path)),
        ]
        self.console.banner(f"{self.recipe.method} run {self.recipe.run.name}", rows)
        for remark in self.prepared.remarks if isinstance(self.prepared, Prepared) else []:
            self.console.warn(remark)
        for number, what in ((counts.dropped, "dropped"), (counts.truncated, "truncated")):
            if number:
                self.console.warn(
                    f"{number:,} rows over the limit were {what} (data.overlong={self.recipe.data.overlong})"
                )

    # -- a step

    @contextmanager
    def step_phase(self) -> Iterator[None]:
        """A step, timed. The first one is also watched for operators that the device does not have."""
        with self.phases("step"):
            if self.fallbacks is not None:
                yield
                return
            with self.device.watched(allow_fallback=self.recipe.run.allow_fallback) as counts:
                yield
            self.fallbacks = dict(counts)

    def _stage(self, phase: str) -> AbstractContextManager[None]:
        return self.world.stage(f"step {self.step + 1}" if phase == "step" else phase)

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log, validate and save as the recipe asks; stop here if the user asked."""
        if isinstance(self.prepared, Prepared):
            metrics = {"train/epoch": self.prepared.batches.epoch(step), **metrics}
        metrics |= self._performance(metrics)
        if step == 1:
            metrics |= self.prepared.train.counts.metrics()
        last = step == self.prepared.batches.steps
        stopping = bool(sum(self.world.gather(len(self.interrupt))))
        planned = last or _due(step, self.recipe.checkpoint.every)
        save = self.keeps and (planned or stopping)
        # A checkpoint that only a Ctrl-C asks for is not validated: the log stays that of an undisturbed run.
        needs_loss = planned and self.recipe.checkpoint.keep_best > 0
        if self.keeps and (last or needs_loss or _due(step, self.recipe.val.every)):
            metrics |= self.validate(step)
        self.tape.finish(step, metrics)
        self._log(step, metrics)
        self.step = step
        if "val/score_std" in metrics:
            # What a reward model's scores are normalised by travels with its checkpoints.
            self.carried |= {"score_mean": metrics["val/score_mean"], "score_std": metrics["val/score_std"]}
        if save:
            self.save(metrics.get("val/loss"))
        if stopping and not last:
            raise Interrupted(f"stopped after step {step}, saved; the same command goes on from there")

    def _performance(self, metrics: dict[str, float]) -> dict[str, float]:
        timing = self.phases.take()
        memory = self.device.memory()
        return {
            "perf/throughput": metrics[TOKENS[self.online]] / (timing["timing_s/step"] * self.world.size),
            "perf/max_memory_gb": memory.peak / 1e9,
            **timing,
        }

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.world.main:
            self.metrics.append(step, metrics)
            for sink in self.sinks:
                sink.log(step, metrics)
        self.console.step(step, metrics)
        shown = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if shown:
            self.console.validation(step, shown)

    # -- validation

    def validate_at_start(self) -> None:
        if self.step == 0 and self.recipe.val.at_start and self.keeps:
            metrics = self.validate(0)
            if self.world.main and metrics:
                self.metrics.append(0, metrics)
                for sink in self.sinks:
                    sink.log(0, metrics)
            self.console.validation(0, {name: value for name, value in metrics.items() if name.startswith("val/")})

    def validate(self, step: int) -> dict[str, float]:
        with self.world.stage(f"validation after step {step}"):
            return self._validated(step)

    def _validated(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self.held_out is not None:
            metrics |= {f"val/{name}": value for name, value in self.held_out().items()}
        if self.speaker is not None and self.speaker.questions:
            found, given = self.speaker.examine()
            metrics |= found
            self.store(step, "val", given[:STORED_ANSWERS])
        return metrics

    def store(self, step: int, kind: str, given: Sequence[Rollout], advantages: Sequence[float] | None = None) -> None:
        """Responses into samples.jsonl, as evidence."""
        if not self.world.main or not given:
            return
        told = advantages if advantages is not None else [None] * len(given)
        lines = [sample_line(step, kind, rollout, own) for rollout, own in zip(given, told, strict=True)]
        append_text(self.folder.samples, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    # -- the way out

    def save(self, val_loss: float | None) -> None:
        """A checkpoint of the step just finished."""
        with self.world.stage(f"checkpoint of step {self.step}"):
            self._save(val_loss)

    def _save(self, val_loss: float | None) -> None:
        learner = self.learner
        optimizer = learner.optimizer.tensors()
        tensors = {checkpoints.MODEL: trained_weights(self.module.stored), checkpoints.OPTIMIZER: optimizer}
        if self.critic is not None:
            tensors[checkpoints.CRITIC] = trained_weights(self.critic.module)
            tensors[checkpoints.CRITIC_OPTIMIZER] = self.critic.optimizer.tensors()
        states = self.world.gather((torch.get_rng_state(), self.device.rng_state()))
        if self.world.main:
            for rank, (host, own) in enumerate(states):
                optimizer |= {f"rng/host/{rank}": host, f"rng/device/{rank}": own.cpu()}
            state = checkpoints.State(
                step=self.step,
                rows_seen=self._rows_seen(),
                recipe=resolved(self.recipe),
                data=self.prepared.fingerprints,
                world_size=self.world.size,
                val_loss=val_loss,
                loss_scale=[number for scale in self._scales() for number in (scale.value, float(scale.quiet))],
                skipped=learner.skipped,
                end_tokens=self.prepared.end_tokens,
                carried=self.carried,
            )
            path = checkpoints.save(self.folder.checkpoints, state, tensors)
            settings = self.recipe.checkpoint
            checkpoints.prune(
                self.folder.checkpoints,
                keep_last=settings.keep_last,
                keep_best=settings.keep_best,
                warn=self.console.warn,
            )
            self.console.say(f"saved {path}")
        self.saved_at = self.step
        self.world.barrier()

    def _rows_seen(self) -> int:
        if self.online:
            return int(self.carried["position"])
        assert isinstance(self.prepared, Prepared)
        return min(self.step * self.recipe.batch.rows_per_update, self.prepared.batches.total_rows)

    def finish(self) -> None:
        """Export, and say what came out of it."""
        self.console.end()
        if not self.world.main:
            return
        if not self.keeps:
            return
        if self.saved_at == self.step and self.recipe.run.export:
            self._export()
        # A file that is missing was told of when the run was resumed.
        changes = before_and_after(read_metrics(self.folder.metrics) if self.folder.metrics.exists() else [])
        counts = self.prepared.train.counts
        if counts.dropped or counts.truncated:
            changes.append(("left out", f"{counts.dropped:,} rows dropped, {counts.truncated:,} truncated"))
        if self.fallbacks:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.fallbacks.items()))
            changes.append(("ran on the CPU", f"in the first step, for want of a kernel: {named}"))
        self.console.banner(
            f"{self.recipe.run.name}: {self.step} steps done",
            [
                *changes,
                ("run folder", str(self.folder.path)),
                next_words(self.recipe.method, self.folder.path),
            ],
        )

    def _export(self) -> None:
        found = checkpoints.read(checkpoints.folder_of(self.folder.checkpoints, self.step))
        checkpoints.require_disk(self.folder.path, self.prepared.memory.parameters * 4, "the exported model")
        for line in write_export(self.recipe, found, self.folder.export, replace=True):
            self.console.say(line)

    def close(self, *, ok: bool) -> None:
        self.console.end()
        for sink in self.sinks:
            sink.close(ok)


def next_words(method: str, path: Path) -> tuple[str, str]:
    """What one does with the model that came out."""
    if method == "rm":
        return "use it", f"reward.model: {path / 'export'}"
    if method == "prm":
        return "judge with it", f"lockstep eval {path} STEPS"
    return "talk to it", f"lockstep generate {path} --chat"


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
