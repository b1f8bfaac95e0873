"""Callbacks: functions of the user that a training run calls, in the style of `TrainerCallback` of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import Refusal


@dataclass
class TrainState:
    """What a callback reads. Steps count from 1; before the first step, `step` is 0."""

    step: int
    steps: int
    """The number of steps that the run plans."""
    folder: Path
    """The run folder."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the step. `on_step_end` may add numbers, which are logged like lockstep's own metrics."""


@dataclass
class TrainControl:
    """What a callback requests. The names are those of `TrainerControl` of transformers."""

    should_training_stop: bool = False
    """Ends the run after this step, with validation, a checkpoint and the export."""
    should_save: bool = False
    """Saves a checkpoint after this step."""


class Callback:
    """The base class of callbacks. Override what you need. In a run of several processes, every process calls its
    callbacks, and a request of one process counts for all."""

    def on_train_begin(self, state: TrainState, control: TrainControl) -> None:
        """Before the first step, or before the first step after a resume."""

    def on_step_end(self, state: TrainState, control: TrainControl) -> None:
        """After a step and its validation, before its metrics are logged."""

    def on_log(self, state: TrainState, control: TrainControl) -> None:
        """After the metrics of a step were logged."""

    def on_save(self, state: TrainState, control: TrainControl) -> None:
        """After the checkpoint of a step was written."""

    def on_train_end(self, state: TrainState, control: TrainControl) -> None:
        """After the last step and the export."""


StepFunction = Callable[[TrainState, TrainControl], None]


class _StepEnd(Callback):
    """A plain function as a callback."""

    def __init__(self, function: StepFunction):
        self._function = function

    def on_step_end(self, state: TrainState, control: TrainControl) -> None:
        self._function(state, control)


class Callbacks:
    """The callbacks of a run, in the order in which they were given."""

    def __init__(self, given: Sequence[Callback | StepFunction] = ()):
        self._callbacks = [_callback(number, one) for number, one in enumerate(given)]
        self.stopped = False
        """Whether a callback has ended the run."""

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def reads_checkpoints(self) -> bool:
        return any(type(one).on_save is not Callback.on_save for one in self._callbacks)

    def call(self, event: str, state: TrainState) -> TrainControl:
        """Calls the method `event` of all callbacks. Returns what they requested together."""
        control = TrainControl()
        for one in self._callbacks:
            getattr(one, event)(state, control)
        return control

    def step_end(self, state: TrainState) -> TrainControl:
        """Calls `on_step_end`, and checks the metrics that the callbacks added."""
        before = dict(state.metrics)
        control = self.call("on_step_end", state)
        for name, value in state.metrics.items():
            if name in before and value is before[name]:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise Refusal.at(
                    "callbacks",
                    f"a callback set the metric {name} to {value!r} in step {state.step}",
                    "log finite numbers only; `.item()` turns a tensor into a number",
                    code="not-a-number",
                )
        return control


def _callback(number: int, given: Callback | StepFunction) -> Callback:
    if isinstance(given, Callback):
        return given
    if isinstance(given, type) or not callable(given):
        why = f"callback {number} is {given!r}"
        remedy = "give an instance of lockstep.Callback, or a function f(state, control) for the end of each step"
        raise Refusal.at("callbacks", why, remedy, code="wrong-type")
    return _StepEnd(given)


@dataclass(frozen=True)
class StartOptions:
    """What a run gets besides its recipe. With `accept_changed`, a run resumes even if the files of a model have
    changed."""

    accept_changed: bool = False
    callbacks: Callbacks = field(default_factory=Callbacks)


PLAIN_START = StartOptions()
