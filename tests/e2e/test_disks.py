"""Disks that are full or cannot be written to: a refusal that names the file, and a run that goes on afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import warm_python
from conftest import question_rows, run, write_jsonl
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import MetricsLog, append_text, read_metrics
from lockstep.train.offline import train_offline
from refusals import refuses
from runs import facts


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", folder)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 2**20
        while size >= 1:
            try:
                file.write(b"\0" * size)
            except OSError:
                size //= 2
    return filler


@pytest.mark.slow
def test_a_disk_that_fills_up_while_metrics_are_written(recipe_file: Path, small_disk: Path, tmp_path: Path) -> None:
    settings = ["optim.schedule=constant", "optim.warmup=0", "checkpoint.every=20", "run.export=false", "data.val=[]"]
    words = ["train", recipe_file, *settings, f"run.folder={small_disk}"]
    process = subprocess.Popen(
        [*warm_python(), "-m", "lockstep", *map(str, words), "run.steps=5000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = small_disk / "run"
    while not (folder / "checkpoints" / "step_20").exists():
        assert process.poll() is None
        time.sleep(0.01)
    filler = fill(small_disk)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    assert "metrics.jsonl" in output
    assert "No space left on device" in output
    assert "free some disk" in output
    # No half line is left, so that other readers see whole ones too.
    assert (folder / "metrics.jsonl").read_bytes().endswith(b"}\n")
    filler.unlink()
    last = read_metrics(folder / "metrics.jsonl")[-1][0]
    assert run(*words, f"run.steps={last + 2}") == 0
    assert run("train", recipe_file, *settings, f"run.steps={last + 2}") == 0
    assert facts(folder) == facts(tmp_path / "runs" / "run")


@pytest.mark.slow
def test_a_background_write_that_fails_stops_the_run_and_the_run_resumes(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, settings = os.pwrite, ["run.steps=8", "checkpoint.every=2", "run.export=false", "model.lora.rank=2"]

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if ".writing-step_4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        return written(descriptor, data, offset)

    def train(name: str) -> None:
        train_offline(load_recipe(str(recipe_file), [f"run.name={name}", *settings]), Console.silent())

    train("whole")
    folder = tmp_path / "runs" / "full"
    with monkeypatch.context() as change:
        change.setattr(os, "pwrite", full)
        with pytest.raises(Refusal) as refused:
            train("full")
    problem = refused.value.problems[0]
    assert (problem.code, Path(problem.where)) == ("disk-full", folder / "checkpoints" / "step_4")
    assert read_metrics(folder / "metrics.jsonl")[-1][0] <= 6
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_2"]
    train("full")
    assert facts(folder) == facts(tmp_path / "runs" / "whole")


def test_a_line_that_does_not_fit_is_taken_back(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(1, {"train/loss": 1.0})
    whole = path.read_bytes()
    fill(small_disk)
    with refuses("metrics.jsonl", "unwritable", "No space left"):
        log.append(2, {f"name {number}": 0.5 for number in range(500)})
    assert path.read_bytes() == whole


def test_samples_on_a_full_disk_are_taken_back(small_disk: Path) -> None:
    path = small_disk / "samples.jsonl"
    append_text(path, '{"step": 1}\n')
    fill(small_disk)
    with refuses("samples.jsonl", "unwritable"):
        append_text(path, '{"step": 2}\n' * 1000)
    assert path.read_text() == '{"step": 1}\n'


def test_a_half_line_is_mended_on_resume(recipe_file: Path, tmp_path: Path) -> None:
    """What a kill in the middle of the write leaves, also where it was the last step before the checkpoint."""
    settings = ["checkpoint.every=3", "checkpoint.keep_last=9", "run.export=false"]
    assert run("train", recipe_file, *settings) == 0
    folder = tmp_path / "runs" / "run"
    whole = facts(folder)
    shutil.rmtree(folder / "checkpoints" / "step_6")
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    assert run("train", recipe_file, *settings) == 0
    assert facts(folder) == whole


@pytest.fixture
def read_only_run(recipe_file: Path, tmp_path: Path) -> Iterator[Path]:
    """An existing run that cannot be written to: on a read-only mount for root, by its modes for anybody else."""
    assert run("train", recipe_file, "tape=true") == 0
    folder = tmp_path / "runs" / "run"
    if os.geteuid() == 0:
        mount("--bind", folder, folder)
        mount("-o", "remount,ro,bind", folder)
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    places = [folder, *(path for path in folder.rglob("*"))]
    modes = {path: path.stat().st_mode for path in places}
    for path in reversed(places):
        path.chmod(modes[path] & ~0o222)
    yield folder
    for path in places:
        path.chmod(modes[path])


@pytest.mark.slow
def test_a_run_that_cannot_be_written_to(
    read_only_run: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What writes is refused with the folder; what reads works."""
    capsys.readouterr()
    for words in (["train", recipe_file, "run.steps=9"], ["train", recipe_file], ["replay", read_only_run]):
        assert run(*words) == 2
        output = " ".join("".join(capsys.readouterr()).split())
        assert str(read_only_run) in output
        assert "Read-only file system" in output or "Permission denied" in output
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(2))
    assert run("generate", read_only_run, "hello", "--max-new-tokens", 2, "--device", "cpu") == 0
    assert run("eval", read_only_run, questions, "--max-new-tokens", 2, "--device", "cpu") == 0
    assert run("export", read_only_run, tmp_path / "exported") == 0
    assert run("compare", read_only_run, read_only_run) == 0
    assert run("export", read_only_run, read_only_run / "exported") == 2
    assert str(read_only_run / "exported") in " ".join("".join(capsys.readouterr()).split())


def test_a_result_that_cannot_be_written_is_refused_before_the_work(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(2))
    for out in (tmp_path / "nowhere" / "rows.jsonl", tmp_path):
        assert run("eval", tiny_folder, questions, "--out", out, "--device", "cpu") == 2
        said = capsys.readouterr()
        assert f"--out {out}" in " ".join(said.err.split())
        assert said.out == ""
