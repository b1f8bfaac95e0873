"""A training run: starts it, runs its steps with validation and checkpoints, and ends it."""

from __future__ import annotations

import _thread
import difflib
import re
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from shlex import quote
from types import FrameType

from lockstep.data.parallel import spare_processes
from lockstep.errors import Interrupted, Problem, Refusal, refuse_all
from lockstep.evaluate.validation import answer_metrics
from lockstep.kernels.fused import replaced
from lockstep.methods import METHODS
from lockstep.methods.base import Method
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.resolve import image_folder
from lockstep.parallel.world import World
from lockstep.preflight.batch_plan import prompt_limit
from lockstep.preflight.prepared import Prepared, PreparedOnline
from lockstep.recipe import Recipe
from lockstep.recipe.measure import Measure, measure_of
from lockstep.recipe.methods import ONLINE
from lockstep.rollout.collect import Examiner, encode_questions, prompt_format, validation_keys
from lockstep.rollout.engine import validation_sampling
from lockstep.rollout.generator import Generator
from lockstep.run.console import Console
from lockstep.run.folder import run_folder
from lockstep.run.runtime import Runtime, seed_generators
from lockstep.tape.tape_recorder import Recorder
from lockstep.train.callbacks import PLAIN_START, Callbacks, StartOptions, TrainState
from lockstep.train.checkpointing import Checkpointer, Position
from lockstep.train.models import Models, Packing, build_critic, build_learner, build_reference
from lockstep.train.monitor import EarlyStop, IdleUpdates
from lockstep.train.run_writer import Run, make_recorder
from lockstep.types import Prompt, Question, Rollout

# Number of validation answers that are stored in samples.jsonl.
STORED_ANSWERS = 20


class Validator:
    """Validates on the rows of `data.val` and on the questions of `val.questions`. `loss_on_rows` computes the metrics
    of the rows."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        questions: Sequence[Question] = (),
        generator: Generator | None = None,
        judge: Examiner | None = None,
        loss_on_rows: Callable[[], dict[str, float]] | None = None,
    ):
        self.recipe, self.world, self.generator, self.judge = recipe, world, generator, judge
        self.loss_on_rows = loss_on_rows
        self.prompts: list[Prompt] = []
        if generator is not None:
            data = prompt_format(recipe)
            folder = image_folder(recipe.model)
            self.prompts = encode_questions(generator.tokenizer, questions, recipe.data.system, data, folder)

    def validate(self, step: int) -> tuple[dict[str, float], list[Rollout]]:
        """Returns the validation metrics, and the answers to write to samples.jsonl."""
        with self.world.stage(f"validation after step {step}"):
            metrics: dict[str, float] = {}
            if self.loss_on_rows is not None:
                metrics |= {f"val/{name}": value for name, value in self.loss_on_rows().items()}
            if not self.prompts:
                return metrics, []
            answers = self._answers()
            assert self.judge is not None
            return metrics | answer_metrics(answers, self.judge.answer_of, self.recipe.val.n), answers[:STORED_ANSWERS]

    def _answers(self) -> list[Rollout]:
        assert self.generator is not None
        assert self.judge is not None
        sampling = validation_sampling(self.recipe, self.generator.stop_ids)
        keys = validation_keys(len(self.prompts))
        return self.generator.for_validation().generate(self.prompts, keys, self.recipe.val.n, sampling, self.judge)


# The names of metrics that validation computes from generated answers (`evaluate/validation.py`), for all questions or
# for one data source.
_ANSWERS = re.compile(r"val/(accuracy|reward|answered|failed|(pass|maj)@\d+)(/.+)?|val-core/.+")


def refuse_unmeasured(recipe: Recipe, metrics: Collection[str]) -> None:
    """Raises `Refusal` if a recipe key names a metric that the run does not compute. The check runs after the first
    step. `metrics` are the metric names of rank 0, so that all ranks come to the same result."""
    refuse_all(list(_unmeasured(recipe, metrics)))


def _unmeasured(recipe: Recipe, metrics: Collection[str]) -> Iterator[Problem]:
    named = {"checkpoint.best": recipe.checkpoint.best}
    if recipe.run.early_stopping is not None:
        named["run.early_stopping.metric"] = recipe.run.early_stopping.metric
    for key, words in named.items():
        measure = None if words is None else measure_of(words)
        if measure is None or _expected(measure, recipe, metrics):
            continue
        names = [name for name in sorted(metrics) if not name.startswith(("timing_s/", "perf/"))]
        names += [f"val/{name.removeprefix('train/')}" for name in names if name.startswith("train/")]
        names += ["val/accuracy", "val/reward"] if recipe.val.questions else []
        near = difflib.get_close_matches(measure.name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "use a name from metrics.jsonl"
        if not recipe.val.questions and _ANSWERS.fullmatch(measure.name):
            remedy = "set val.questions: this metric is computed from generated answers"
        yield Problem(key, f"the run does not compute the metric {measure.name}", remedy, code="unknown-metric")


def _expected(measure: Measure, recipe: Recipe, metrics: Collection[str]) -> bool:
    if not measure.validated:
        # `critic/vf_explained_var` is missing in a step whose returns are all equal.
        sometimes = measure.name == "critic/vf_explained_var" and "critic/values/mean" in metrics
        return sometimes or measure.name in metrics
    # Validation on rows computes the same metrics as an update.
    on_rows = bool(recipe.data.val) and f"train/{measure.name.removeprefix('val/')}" in metrics
    return on_rows or bool(recipe.val.questions and _ANSWERS.fullmatch(measure.name))


class Training:
    """A training run. `keeps` is False for a replay of a tape, which saves nothing and does not validate."""

    def __init__(
        self,
        run: Run,
        models: Models,
        generator: Generator | None,
        validator: Validator,
        checkpointer: Checkpointer,
        interrupt: list[int],
        callbacks: Callbacks,
        *,
        keeps: bool,
    ):
        self.callbacks = callbacks
        self.run, self.models, self.validator, self.checkpointer = run, models, validator, checkpointer
        self._generator, self._interrupt, self.keeps = generator, interrupt, keeps
        self.position: Position = checkpointer.resume()
        self._first = self.position.step + 1
        self.early = EarlyStop(run.recipe.run.early_stopping if keeps else None, run.world)
        self.early.recall(run.logged())
        self.idle = IdleUpdates(models.learners, run.recipe.run.max_idle_updates if keeps else None)
        self.tape: Recorder = make_recorder(run, models, self.position.step)

    @property
    def carried(self) -> dict[str, float]:
        """The values that the training loop keeps between steps. Checkpoints and tapes store `carried`."""
        return self.position.carried

    @property
    def generator(self) -> Generator:
        assert self._generator is not None
        return self._generator

    def steps(self) -> Iterator[int]:
        """Yields the remaining steps, counted from 0, until the last step, early stopping or a callback's stop."""
        self.callbacks.call("on_train_begin", self._state(self.position.step))
        while self.position.step < self.run.prepared.batches.steps and not self.early.reached:
            yield self.position.step
            if self.callbacks.stopped:
                break

    def _state(self, step: int, metrics: dict[str, float] | None = None) -> TrainState:
        folder = self.run.folder.path
        return TrainState(step, self.run.prepared.batches.steps, folder, {} if metrics is None else metrics)

    def validate_at_start(self) -> None:
        if self.position.step == 0 and self.run.recipe.val.at_start and self.keeps:
            metrics = self._validate(0)
            self.run.log(0, metrics)
            if self.early.validated:
                self.early.observe(0, metrics, validated=True)

    def _validate(self, step: int) -> dict[str, float]:
        self._set_progress(step)
        if self._generator is not None:
            self._generator.after(step)
        with self.run.console.waiting(f"Validation after step {step}"):
            metrics, answers = self.validator.validate(step)
        if self._generator is not None:
            self._generator.sleep()
        self.run.store(step, "val", answers)
        return metrics

    def _set_progress(self, step: int) -> None:
        """Tells the rewards how many steps are finished."""
        if self.validator.judge is not None:
            self.validator.judge.set_progress(step, self.run.prepared.batches.steps)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times step `step`, which counts from 1, and records it on the tape."""
        self.tape.begin(step, self.carried)
        self._set_progress(step - 1)
        if self._generator is not None:
            self._generator.after(step - 1)
        with self.run.timed(step):
            yield

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of a step, validates and saves a checkpoint if they are due, and stops if the user requested
        it."""
        with self.run.world.stage(f"the end of step {step}"):
            self._finish_step(step, metrics)

    def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        run, recipe, prepared = self.run, self.run.recipe, self.run.prepared
        metrics |= run.performance(metrics[prepared.tokens_metric])
        if step == 1 and not prepared.train.streamed:
            metrics |= prepared.train.counts.metrics()
        if step == self._first and self.keeps:
            refuse_unmeasured(recipe, run.world.gather(list(metrics))[0])
        last = step == prepared.batches.steps
        stopping, idle = self._should_stop()
        planned = last or _due(step, recipe.checkpoint.every)
        # There is no validation for a checkpoint after Ctrl-C, so that metrics.jsonl is the same as without the
        # interruption.
        measure = self.checkpointer.measure
        needed = planned and recipe.checkpoint.keep_best > 0 and measure.validated
        validated = self.keeps and (last or needed or _due(step, recipe.val.every))
        if validated:
            metrics |= self._validate(step)
        if validated and (warning := self.early.missed(metrics)):
            run.console.warn(warning)
        stop, save = self._called(step, metrics)
        planned |= save
        if (self.early.observe(step, metrics, validated=validated) or stop) and not last:
            last = planned = True
            if not validated:
                metrics |= self._validate(step)
        self.tape.finish(step, metrics)
        run.log(step, metrics)
        self.callbacks.call("on_log", self._state(step, metrics))
        self.position.step = step
        if "val/score_std" in metrics:
            # The mean and standard deviation of the scores of a reward model are stored in its checkpoints.
            self.carried.update(score_mean=metrics["val/score_mean"], score_std=metrics["val/score_std"])
        if self.keeps and (planned or stopping or idle):
            rows_seen = prepared.rows_seen(step, self.carried)
            self.tape.flush()
            self.checkpointer.save(self.position, rows_seen, metrics, waits=last or stopping or idle)
            if last or stopping or idle or self.callbacks.reads_checkpoints:
                self.checkpointer.settle()
                self.callbacks.call("on_save", self._state(step, metrics))
        elif self.keeps and step == self._first:
            self.checkpointer.reserve(step)
        self.checkpointer.print_messages()
        self.tape.leave(step)
        if idle and not last:
            raise self.idle.refusal(step)
        if stopping and not last:
            raise Interrupted(f"stopped after step {step} and saved a checkpoint; run the same command to resume")

    def _called(self, step: int, metrics: dict[str, float]) -> tuple[bool, bool]:
        """Calls the callbacks at the end of a step. Returns whether a callback of any rank requested a stop or a
        checkpoint."""
        if not self.callbacks:
            return False, False
        control = self.callbacks.step_end(self._state(step, metrics))
        ranks = self.run.world.gather((control.should_training_stop, control.should_save))
        self.callbacks.stopped = any(stop for stop, _ in ranks)
        return self.callbacks.stopped, any(save for _, save in ranks)

    def _should_stop(self) -> tuple[bool, bool]:
        """Returns whether the user requested a stop on any rank, and whether updates were idle for too many steps.
        Raises if the last checkpoint could not be written. All ranks must call this function."""
        if (warning := self.idle.observe()) and self.keeps:
            self.run.console.warn(warning)
        ranks = self.run.world.gather((len(self._interrupt), self.idle.count, self.checkpointer.failed))
        if any(failed for *_, failed in ranks):
            self.checkpointer.settle()
        return any(interrupts for interrupts, *_ in ranks), self.idle.reached(ranks[0][1])

    def finish(self) -> None:
        """Exports the model and prints a summary."""
        run, step = self.run, self.position.step
        self.tape.flush()
        run.console.end()
        if self.early.reached:
            run.console.say(self.early.sentence(step))
        if self.callbacks.stopped:
            run.console.say(f"a callback stopped the run after step {step}")
        if run.world.main and self.keeps:
            self.checkpointer.export(step)
            run.summarise(step, usage_hint(run.recipe.method, run.folder.path))
        self.callbacks.call("on_train_end", self._state(step))

    def close(self, *, ok: bool) -> None:
        if self._generator is not None:
            self._generator.close()
        self.checkpointer.close()
        # After a failure, errors of the tape are ignored, so that the first error is reported.
        with nullcontext() if ok else suppress(Refusal):
            self.tape.close()
        self.run.close(ok=ok)


@contextmanager
def open_training(
    prepared: Prepared | PreparedOnline,
    runtime: Runtime,
    judge: Examiner,
    *,
    keeps: bool = True,
    options: StartOptions = PLAIN_START,
    plays: bool = True,
) -> Iterator[Training]:
    """Starts or resumes a run, and closes it at the end. With `plays` False, the engine generates without
    environments."""
    folder, world, console = run_folder(prepared.recipe), runtime.world, runtime.console
    if world.main:
        folder.create()
    with (
        folder.lock() if world.main else nullcontext(),
        _graceful_interrupt(console) as interrupt,
        prepared.train.encoding_ahead(spare_processes()),
    ):
        run = Run(prepared, folder, runtime.device, world, console)
        try:
            with console.waiting("Preparing the first step"):
                models = load_models(run)
                checkpointer = Checkpointer(run, models, keeps=keeps, accept_changed=options.accept_changed)
                start = (interrupt, options.callbacks, runtime.switches)
                training = _start_training(run, checkpointer, judge, *start, keeps=keeps, plays=plays)
        except BaseException:
            run.close(ok=False)
            raise
        try:
            yield training
        except BaseException:
            training.close(ok=False)
            raise
        training.close(ok=True)


def _start_training(
    run: Run,
    checkpointer: Checkpointer,
    judge: Examiner,
    interrupt: list[int],
    callbacks: Callbacks,
    switches: dict[str, str],
    *,
    keeps: bool,
    plays: bool,
) -> Training:
    recipe, prepared, world, models = run.recipe, run.prepared, run.world, checkpointer.models
    # Ranks use different dropout masks, except the ranks of a tensor-parallel group, which process the same tokens.
    seed_generators(recipe.run.seed + world.engine, run.device)
    generator = None
    if isinstance(prepared, PreparedOnline) or prepared.questions:
        assert isinstance(models.module, Policy)
        generator = Generator(
            models.module,
            prepared.tokenizer,
            recipe.rollout if plays else recipe.rollout.without_environment(),
            run.device,
            world,
            recipe.model.path,
            prepared.end_tokens,
            run.folder.path / "rollout",
            prompt_limit(recipe, prepared.config) if recipe.method in ONLINE else None,
            recipe.val.environment if plays else None,
            recipe.val.agent if plays else None,
        )
        run.engine = generator.metadata()
    validator = Validator(recipe, world, prepared.questions, generator, judge)
    training = Training(run, models, generator, validator, checkpointer, interrupt, callbacks, keeps=keeps)
    trained = {"model": models.learner, "critic": models.critic}
    fused = {name: replaced(learner.module) for name, learner in trained.items() if learner is not None}
    run.begin(training.position.step, switches, fused)
    return training


def load_models(run: Run) -> Models:
    recipe, world = run.recipe, run.world
    device = run.device.torch_device(world.local_rank)
    where = (run.device, world, device)
    with run.console.task(f"Loading {recipe.model.path}", None), world.stage("loading the model"):
        learner, critic = build_learner(recipe, *where), build_critic(recipe, *where)
        reference = build_reference(recipe, *where, learner.routing)
    for one in filter(None, (learner, critic)):
        assert isinstance(one.module, Policy | ValueModel)
        if recipe.model.master_weights and one.module.digits.lost:
            run.console.warn(
                f"the master weights start from values rounded to {recipe.model.dtype}, because the files of "
                f"{recipe.model.path} cannot be read tensor by tensor"
            )
    packing = Packing.of(recipe, world, run.prepared.pad_id)
    return Models(learner.module, packing, device, learner, critic, reference)


@contextmanager
def _graceful_interrupt(console: Console) -> Iterator[list[int]]:
    """Handles Ctrl-C. The first Ctrl-C ends the run after the current step. The second Ctrl-C stops it immediately."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        # The signal may arrive while this thread writes to the same stream, which does not allow a nested write. For
        # this reason another thread prints the message. `threading.Thread` is not used, because it needs locks that
        # this thread may hold.
        text = "stopping after this step; a checkpoint will be saved; press Ctrl-C again to stop immediately"
        _thread.start_new_thread(console.warn, (text,))

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def usage_hint(method: str, run: Path) -> tuple[str, str]:
    """Returns a table row that says how to use the trained model."""
    what, how = METHODS[method].usage if method in METHODS else Method.usage
    return what, how.format(run=quote(str(run)))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
