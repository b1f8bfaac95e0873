"""A rank that the others wait for is named, with the place; when it comes, the run goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import cold_lockstep
from runs import facts

pytestmark = pytest.mark.torchrun
LIMIT = 240  # against hanging


@contextmanager
def started(output: Path, *words: object, after: str) -> Iterator[subprocess.Popen[bytes]]:
    """Two processes of the command, whose streams go to a file; none of them is left at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "LOCKSTEP_MISSED_AFTER": after}
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [*command, "-m", "lockstep", *map(str, words)], stdout=file, stderr=file, env=environment
        )
        try:
            yield launcher
        finally:
            for child in children(launcher.pid):
                os.kill(child, signal.SIGCONT)
            launcher.terminate()  # which ends its ranks; nothing is left of a run that is done
            launcher.wait(timeout=LIMIT)


def children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def rank_of(launcher: subprocess.Popen[bytes], rank: int) -> int:
    found = [pid for pid in children(launcher.pid) if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
    assert len(found) == 1
    return found[0]


def wait_for(moment: Callable[[], bool], launcher: subprocess.Popen[bytes], output: Path) -> None:
    while not moment():
        assert launcher.poll() is None, output.read_text()
        time.sleep(0.01)


def test_a_stopped_rank_is_named_and_the_run_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    common = ["train", recipe_file, "run.steps=30", "run.export=false"]
    output, run = tmp_path / "output", tmp_path / "runs" / "stopped"
    with started(output, *common, "run.name=stopped", after="2") as launcher:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, launcher, output)
        stopped = rank_of(launcher, 1)
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: "rank 1 gives no sign of life" in output.read_text(), launcher, output)
        said = output.read_text()
        os.kill(stopped, signal.SIGCONT)
        assert launcher.wait(timeout=LIMIT) == 0, output.read_text()
    assert "rank 0 has" in said
    assert "step " in said.split("rank 0 has")[1].splitlines()[0]
    assert said.count("gives no sign of life") == 1
    assert "is over" in output.read_text()

    with started(tmp_path / "whole-output", *common, "run.name=whole", after="60") as launcher:
        assert launcher.wait(timeout=LIMIT) == 0
    assert facts(run) == facts(tmp_path / "runs" / "whole")
    assert not re.search(r"rank \d", (tmp_path / "whole-output").read_text())


SLOW = """
import os, time
from pathlib import Path

def letters(data_source, solution_str, ground_truth, extra_info):
    while os.environ["RANK"] == "1" and Path({slow!r}).exists():
        time.sleep(0.05)
    return len(set(solution_str)) / 20
"""


def test_a_rank_that_lives_but_does_not_come_is_named_with_its_place(online_file: Path, tmp_path: Path) -> None:
    """From some step on rank 1 takes long to judge its responses, and rank 0 waits for them."""
    slow, output, metrics = tmp_path / "slow", tmp_path / "output", tmp_path / "runs" / "run" / "metrics.jsonl"
    (tmp_path / "reward.py").write_text(SLOW.format(slow=str(slow)), encoding="utf-8")
    words = ["train", online_file, "run.steps=40", "run.export=false", "reward.time_limit=600"]
    with started(output, *words, after="2") as launcher:
        wait_for(metrics.exists, launcher, output)
        slow.touch()
        wait_for(lambda: "rank 1 has not come" in output.read_text(), launcher, output)
        slow.unlink()
        assert launcher.wait(timeout=LIMIT) == 0, output.read_text()
    line = next(line for line in output.read_text().splitlines() if "rank 1 has not come" in line)
    assert re.match(r"rank 0 has waited \d+ s at a \w+, in step \d+, ", line)
    assert re.search(r"it is at .*step \d+", line)
    assert "no sign of life" not in output.read_text()


def test_a_wrong_interval_is_refused(recipe_file: Path) -> None:
    one = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = cold_lockstep("train", recipe_file, TORCHELASTIC_USE_AGENT_STORE="True", LOCKSTEP_MISSED_AFTER="soon", **one)
    assert done.returncode == 2
    assert "LOCKSTEP_MISSED_AFTER" in done.stderr
    assert "Traceback" not in done.stderr
