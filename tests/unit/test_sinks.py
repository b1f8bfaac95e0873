import json
import math
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Refusal
from lockstep.recipe.registry import TRACKERS
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import MetricsLog
from lockstep.run.trackers import tracker as sinks_module
from lockstep.run.trackers.tracker import GuardedSink, Sink, check_sinks, open_sinks
from refusals import refuses

RECIPE = {"method": "sft", "optim": {"lr": 1e-4, "betas": [0.9, 0.95]}, "lora": {}, "note": None}


class RecordingConsole(Console):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


@pytest.fixture
def console() -> RecordingConsole:
    return RecordingConsole()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    # No key and no setting of whoever runs the tests may reach a tracker.
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_", "SWANLAB_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def run_twice(name: str, folder: RunFolder, console: Console) -> None:
    """Three steps and a kill, then a resume after step 2 up to step 4."""
    log = MetricsLog(folder.metrics)
    for resumed_at, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log.rewind(resumed_at)
        [sink] = open_sinks([name], folder, "lockstep-test", console)
        sink.start("first", RECIPE, resumed_at)
        for step in steps:
            metrics = {"train/loss": 1 / step, "val/acc/mean@32": float(step)}
            log.append(step, metrics)
            sink.log(step, metrics)
        sink.note(f"resumed at {resumed_at}")
        sink.close(ok=True)
        time.sleep(1.1)  # trackers name the files of one id by the second


def test_unknown_names_and_missing_packages_are_refused_together(
    folder: RunFolder, console: RecordingConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(Refusal) as caught:
        open_sinks(["tensorbord", "swanlab", "tensorboard"], folder, "p", console)
    unknown, missing = caught.value.problems
    assert unknown.where == "sink tensorbord"
    assert unknown.code == "unknown-name"
    assert unknown.remedy.startswith("did you mean tensorboard?")
    assert "tensorboard, wandb, mlflow, swanlab" in unknown.remedy
    assert missing.where == "package swanlab"
    assert "[track]" in missing.remedy


def test_opening_no_sinks_imports_no_tracker(folder: RunFolder, console: RecordingConsole) -> None:
    assert open_sinks([], folder, "p", console) == []
    assert list(TRACKERS) == ["tensorboard", "wandb", "mlflow", "swanlab"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(sinks_module, "time", fake)
    return fake


class Flaky:
    """Fails at odd steps, after 3 seconds."""

    def __init__(self, clock: Clock) -> None:
        self.logged: list[int] = []
        self.clock = clock
        self.closed: bool | None = None

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        random.random()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        random.random()
        if step % 2:
            self.clock.now += 3.0
            raise ConnectionError(f"no route at {step}\nand a long story")
        self.logged.append(step)

    def note(self, text: str) -> None:
        raise ConnectionError("no note")

    def close(self, ok: bool) -> None:
        self.closed = ok


def guarded(sink: Sink, console: Console) -> GuardedSink:
    return GuardedSink("flaky", sink, console)


def test_a_failing_sink_is_told_once_and_counted_and_the_run_goes_on(console: RecordingConsole, clock: Clock) -> None:
    flaky = Flaky(clock)
    sink = guarded(flaky, console)
    sink.start("n", {}, 0)
    for step in range(1, 7):
        sink.log(step, {})
        clock.now += 31.0
    sink.note("hello")
    sink.close(ok=False)
    assert flaky.logged == [2, 4, 6]
    assert flaky.closed is False
    failed, missed = console.warned
    assert failed.startswith("flaky failed at step 1")
    assert "ConnectionError: no route at 1" in failed
    assert missed.startswith("flaky missed 3 steps")


def test_a_sink_that_fails_slowly_is_left_alone_for_a_while(console: RecordingConsole, clock: Clock) -> None:
    flaky = Flaky(clock)
    sink = guarded(flaky, console)
    for step in (1, 2, 4):
        sink.log(step, {})
    assert flaky.logged == []
    clock.now += 30.0  # ten times what the failure took
    sink.log(6, {})
    assert flaky.logged == [6]
    sink.close(ok=True)
    assert console.warned[-1].startswith("flaky missed 3 steps")


def test_watching_a_run_draws_no_random_number_of_it(console: RecordingConsole, clock: Clock) -> None:
    state = random.getstate()
    sink = guarded(Flaky(clock), console)
    sink.start("n", {}, 0)
    for step in (1, 2):
        sink.log(step, {})
    assert random.getstate() == state


def test_a_sink_that_cannot_start_stops_the_run(console: RecordingConsole, clock: Clock) -> None:
    class Absent(Flaky):
        def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
            raise ConnectionError("no route to host")

    with refuses("sink flaky", "tracker-failed", "ConnectionError: no route to host"):
        guarded(Absent(clock), console).start("n", {}, 0)


def test_tensorboard_events_read_back_and_a_resume_replaces_the_later_ones(
    folder: RunFolder, console: RecordingConsole
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> EventAccumulator:
        events = EventAccumulator(str(folder.path / "tensorboard"))
        events.Reload()
        return events

    [sink] = open_sinks(["tensorboard"], folder, "p", console)
    sink.start("first", RECIPE, 0)
    for step in (0, 1, 2, 3):
        sink.log(step, {"train/loss": 10.0 + step, "nan": math.nan})
    sink.note("stopped")
    sink.close(ok=False)
    first = read()
    assert [(event.step, event.value) for event in first.Scalars("train/loss")] == [
        (0, 10.0),
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
    ]
    assert math.isnan(first.Scalars("nan")[0].value)
    assert first.Tensors("note")[0].tensor_proto.string_val[0] == b"stopped"
    assert json.loads(first.Tensors("recipe")[0].tensor_proto.string_val[0]) == RECIPE

    time.sleep(1.1)  # event files are read in the order of their names, which count seconds
    [sink] = open_sinks(["tensorboard"], folder, "p", console)
    sink.start("first", RECIPE, 1)
    sink.log(2, {"train/loss": 22.0})
    sink.close(ok=True)
    assert [(event.step, event.value) for event in read().Scalars("train/loss")] == [(0, 10.0), (1, 11.0), (2, 22.0)]
    assert console.warned == []


def leveldb_log(file: Path) -> Iterator[bytes]:
    """The records of an offline run of wandb or swanlab: both write a LevelDB log after a header of 7 bytes."""
    data = file.read_bytes()
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_history(file: Path) -> list[dict[str, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(record) for record in leveldb_log(file)]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def swanlab_losses(file: Path) -> list[tuple[int, float]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    scalars = [record.scalar for record in map(Record.FromString, leveldb_log(file)) if record.HasField("scalar")]
    return [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == "train/loss"]


@pytest.fixture
def fresh_wandb(folder: RunFolder) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield wandb
    wandb.teardown()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_without_a_key_goes_offline_and_says_so(folder: RunFolder, console: RecordingConsole) -> None:
    run_twice("wandb", folder, console)
    runs = sorted((folder.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({run.name for run in runs}) == 1  # one id
    histories = [
        [(row["_step"], row["train/loss"], row["val/acc/mean@32"]) for row in wandb_history(run)] for run in runs
    ]
    assert histories == [
        [(1, 1.0, 1), (2, 0.5, 2), (3, 1 / 3, 3)],
        [(1, 1.0, 1), (2, 0.5, 2), (3, 1 / 3, 3), (4, 0.25, 4)],  # the kill may have lost some, so all come again
    ]
    assert "no API key and no WANDB_MODE" in console.said[0]
    assert console.warned == []


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_online_without_a_key_is_refused_not_asked_for(
    folder: RunFolder, console: RecordingConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    [sink] = open_sinks(["wandb"], folder, "p", console)
    for refused in (lambda: check_sinks([sink]), lambda: sink.start("first", RECIPE, 0)):
        with pytest.raises(Refusal, match="there is no API key"):
            refused()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_disabled_writes_nothing(
    folder: RunFolder, console: RecordingConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_twice("wandb", folder, console)
    assert not (folder.path / "wandb").exists()
    assert console.said == console.warned == []


def test_mlflow_keeps_files_and_goes_on_in_the_same_run(folder: RunFolder, console: RecordingConsole) -> None:
    mlflow = pytest.importorskip("mlflow")
    run_twice("mlflow", folder, console)
    client = mlflow.MlflowClient(tracking_uri=(folder.path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("lockstep-test")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert run.data.metrics["val/acc/mean_at_32"] == 4.0
    assert run.data.params["optim.lr"] == "0.0001"
    assert run.data.tags["mlflow.note.content"] == "resumed at 0\n\nresumed at 2"
    assert "mlflow ui" in console.said[0]
    assert console.warned == []


def test_swanlab_without_a_key_stays_on_this_disk(folder: RunFolder, console: RecordingConsole) -> None:
    pytest.importorskip("swanlab")
    state = random.getstate()
    run_twice("swanlab", folder, console)
    assert random.getstate() == state
    runs = sorted((folder.path / "swanlab").glob("run-*/run-*.swanlab"))
    assert len(runs) == 2
    assert len({run.name for run in runs}) == 1  # one id
    assert [swanlab_losses(run) for run in runs] == [
        [(1, 1.0), (2, 0.5), (3, 1 / 3)],
        [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)],
    ]
    assert "no API key and no SWANLAB_MODE" in console.said[0]
    assert console.warned == []


def test_swanlab_online_without_a_key_is_refused_not_asked_for(
    folder: RunFolder, console: RecordingConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "online")
    [sink] = open_sinks(["swanlab"], folder, "p", console)
    for refused in (lambda: check_sinks([sink]), lambda: sink.start("first", RECIPE, 0)):
        with pytest.raises(Refusal, match="no API key"):
            refused()
