"""`parallel.devices`: one command, several processes; how they end, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import cold_lockstep, lockstep, warm_python
from hang import HANG, wait_until
from kills import lines
from ranks import assert_none_left, ranks_of
from runs import facts

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="looks for processes in /proc"),
]
SAME = ["optim.eps=1e-4", "optim.schedule=constant"]
LONG = [*SAME, "run.steps=100000", "checkpoint.every=100000", "run.export=false", "parallel.devices=2"]


@contextmanager
def training(recipe_file: Path, runs: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that are past their first steps."""
    words = ["train", str(recipe_file), f"run.folder={runs}", *LONG]
    process = subprocess.Popen(
        # The launcher is warm; its ranks start cold.
        [*warm_python(), "-m", "lockstep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        past = lines(runs / "run" / "metrics.jsonl", 3)
        wait_until(lambda: past.has_come() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        assert ranks_of(runs).keys() == {0, 1}
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in ranks_of(runs).values():
            os.kill(pid, signal.SIGKILL)  # before the end of their output is waited for
        process.communicate()


@pytest.mark.slow
def test_a_refusal_is_told_once_and_keeps_its_exit_status(recipe_file: Path) -> None:
    """For every day test_torchrun.py has that ranks tell it once, and test_restarts.py the status."""
    refused = cold_lockstep("train", recipe_file, "data.train=nowhere.jsonl", "parallel.devices=2")
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("nowhere.jsonl [no-such-file]") == 1, refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_two_ranks_train_what_one_process_does_and_ctrl_c_saves(recipe_file: Path, tmp_path: Path) -> None:
    assert lockstep("train", recipe_file, *SAME, "run.steps=3", "run.export=false").returncode == 0
    with training(recipe_file, tmp_path / "stopped") as process:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=HANG)
    assert process.returncode == 130, said
    assert "on each of 2 device(s)" in said
    assert "the same command" in said
    # Each rank has a log file, and the files have all that was printed.
    logs = [(tmp_path / "stopped" / "run" / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert "on each of 2 device(s)" in logs[0]
    assert "on each of 2 device(s)" not in logs[1]
    assert sorted("".join(logs).splitlines()) == sorted(said.splitlines())
    assert_none_left(tmp_path / "stopped")
    assert len(list((tmp_path / "stopped" / "run" / "checkpoints").glob("step_*"))) == 1
    one, two = (facts(tmp_path / folder / "run") for folder in ("runs", "stopped"))
    for name in ("train/loss", "train/grad_norm"):
        wanted = [told[name] for _, told in one]
        assert [told[name] for _, told in two[:3]] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_a_killed_launcher_leaves_none(recipe_file: Path, tmp_path: Path) -> None:
    with training(recipe_file, tmp_path / "rank") as process:
        os.kill(ranks_of(tmp_path / "rank")[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=HANG)
        assert process.returncode == 128 + signal.SIGKILL, said
        assert "rank 1 was killed by SIGKILL" in said
        assert_none_left(tmp_path / "rank")
    with training(recipe_file, tmp_path / "launcher") as process:
        process.kill()
        process.wait()
        assert_none_left(tmp_path / "launcher")
