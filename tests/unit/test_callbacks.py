"""Callbacks of `lockstep.train`: what they read, what they log, and that they can save and stop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from hang import HANG
from lockstep.errors import Refusal
from lockstep.run.metrics import read_metrics
from lockstep.train.callbacks import Callback, Callbacks, TrainControl, TrainState

SHORT = {"run.steps": 4, "run.export": False, "device": "cpu"}


class Notes(Callback):
    """Notes every call: the event, the step, and what the run folder holds then."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logged: list[int] = []
        self.saved: list[list[str]] = []
        self.state: TrainState | None = None

    def on_train_begin(self, state: TrainState, control: TrainControl) -> None:
        self.calls.append(("begin", state.step))

    def on_step_end(self, state: TrainState, control: TrainControl) -> None:
        self.calls.append(("step", state.step))
        state.metrics["own/twice"] = 2 * state.metrics["train/loss"]

    def on_log(self, state: TrainState, control: TrainControl) -> None:
        self.logged.append(len(read_metrics(state.folder / "metrics.jsonl")))

    def on_save(self, state: TrainState, control: TrainControl) -> None:
        self.saved.append(sorted(path.name for path in (state.folder / "checkpoints").iterdir()))

    def on_train_end(self, state: TrainState, control: TrainControl) -> None:
        self.calls.append(("end", state.step))


def train(recipe: Path, callbacks: list[Any], **more: Any) -> Path:
    return lockstep.train(recipe, callbacks=callbacks, **{**SHORT, "checkpoint.every": None, **more})


def test_every_event_is_called_and_added_numbers_are_logged(recipe_file: Path) -> None:
    notes = Notes()
    folder = train(recipe_file, [notes], **{"checkpoint.every": 2})
    steps = [("step", step) for step in (1, 2, 3, 4)]
    assert notes.calls == [("begin", 0), *steps, ("end", 4)]
    assert notes.logged == [1, 2, 3, 4]
    assert [names[-1] for names in notes.saved] == ["step_2", "step_4"]
    for _, metrics in read_metrics(folder / "metrics.jsonl"):
        assert metrics["own/twice"] == 2 * metrics["train/loss"]


@pytest.mark.slow
def test_a_function_can_save_and_stop_and_the_run_can_be_continued(recipe_file: Path) -> None:
    def second(state: TrainState, control: TrainControl) -> None:
        assert state.steps == 4
        control.should_save = state.step == 1
        control.should_training_stop = state.step == 2

    folder = train(recipe_file, [second], **{"checkpoint.keep_last": 9})
    assert [step for step, _ in read_metrics(folder / "metrics.jsonl") if step] == [1, 2]
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step_1", "step_2"}
    notes = Notes()
    train(recipe_file, [notes], **{"checkpoint.keep_last": 9})
    assert notes.calls == [("begin", 2), ("step", 3), ("step", 4), ("end", 4)]


def test_callbacks_change_no_number_of_the_run(recipe_file: Path) -> None:
    def losses(folder: Path) -> list[float]:
        return [metrics["train/loss"] for step, metrics in read_metrics(folder / "metrics.jsonl") if step]

    plain = lockstep.train(recipe_file, **{**SHORT, "run.name": "plain"})
    watched = train(recipe_file, [Notes()], **{"run.name": "watched", "checkpoint.every": 1})
    assert losses(plain) == losses(watched)


@pytest.mark.slow
def test_an_online_run_calls_them_too(online_file: Path) -> None:
    seen = []

    def first(state: TrainState, control: TrainControl) -> None:
        seen.append(state.metrics["critic/score/mean"])
        control.should_training_stop = True

    train(online_file, [first])
    assert len(seen) == 1


SCRIPT = """
import os, sys, lockstep

def stop_by_the_last_rank(state, control):
    state.metrics["own/rank"] = int(os.environ["RANK"])
    control.should_training_stop = os.environ["RANK"] == "1" and state.step == 2

lockstep.train(sys.argv[1], callbacks=[stop_by_the_last_rank], run={"steps": 4, "export": False}, device="cpu")
"""


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_stop_of_one_rank_counts_for_all(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(recipe_file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert [(step, logged["own/rank"]) for step, logged in read_metrics(metrics)] == [(1, 0.0), (2, 0.0)]


def set_metric(value: Any) -> Callable[[TrainState, TrainControl], None]:
    def function(state: TrainState, control: TrainControl) -> None:
        state.metrics["own/number"] = value

    return function


@pytest.mark.parametrize("value", [float("nan"), "much", None, True])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(Refusal) as refused:
        Callbacks([set_metric(value)]).step_end(TrainState(3, 4, Path(), {"train/loss": float("nan")}))
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == ("callbacks", "not-a-number")
    assert "own/number" in problem.why


@pytest.mark.parametrize("given", [Notes, "notes.py:Notes"])
def test_what_is_neither_a_callback_nor_a_function_is_refused(given: Any) -> None:
    with pytest.raises(Refusal) as refused:
        Callbacks([lambda state, control: None, given])
    assert refused.value.problems[0].code == "wrong-type"
