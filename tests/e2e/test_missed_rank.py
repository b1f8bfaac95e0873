"""A rank that the others wait for is named, with the place; when it comes, the run goes on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import changed_lockstep, lockstep, warm_torchrun
from hang import HANG
from runs import facts

pytestmark = pytest.mark.torchrun
SOON = "4"  # seconds, more than a busy machine keeps a process that lives from saying so


@contextmanager
def started(output: Path, *words: object, after: str, program: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Two processes of the command, whose streams go to a file; none of them is left at the end."""
    environment = {**os.environ, "LOCKSTEP_MISSED_AFTER": after}
    with output.open("wb") as file:
        command = warm_torchrun(*words, program=program)
        launcher = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield launcher
        finally:
            launcher.terminate()  # which ends its ranks; nothing is left of a run that is done
            launcher.wait(timeout=HANG)


def wait_for(moment: Callable[[], bool], launcher: subprocess.Popen[bytes], output: Path) -> None:
    while not moment():
        assert launcher.poll() is None, output.read_text()
        time.sleep(0.01)


# Of its own accord, so that it is in the same step on any machine.
STOPPED = """
import lockstep.train.step as step

own, updates = step.Learner.optim_step, []

def optim_step(*given):
    updates.append(None)
    if os.environ["RANK"] == "1" and len(updates) == 3:
        with open({number!r}, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return own(*given)

step.Learner.optim_step = optim_step
"""


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    common = ["train", recipe_file, "run.export=false", "run.steps=4", "data.val=[]"]
    output, run, number = tmp_path / "output", tmp_path / "runs" / "stopped", tmp_path / "number"
    program = changed_lockstep(tmp_path, STOPPED.format(number=str(number)))
    with started(output, *common, "run.name=stopped", after=SOON, program=program) as launcher:
        try:
            wait_for(lambda: "rank 1 has sent no heartbeat" in output.read_text(), launcher, output)
            said = output.read_text()
        finally:
            if number.exists():
                os.kill(int(number.read_text()), signal.SIGCONT)
        assert launcher.wait(timeout=HANG) == 0, output.read_text()
    assert re.search(r"rank 0 has .*step 3\b.*: rank 1 .* no heartbeat", said)
    assert said.count("rank 1 has sent no heartbeat") == 1
    assert re.search(r"rank 1 .* no heartbeat for \d+ s; .*step [123]\b", said)
    assert "collective completed after" in output.read_text()

    with started(tmp_path / "whole-output", *common, "run.name=whole", after="60") as launcher:
        assert launcher.wait(timeout=HANG) == 0
    assert len(facts(run)) == 4
    assert facts(run) == facts(tmp_path / "runs" / "whole")
    assert not re.search(r"rank \d", (tmp_path / "whole-output").read_text())


SLOW = """
import os, time
from pathlib import Path

def letters(data_source, solution_str, ground_truth, extra_info):
    while os.environ["RANK"] == "1" and Path({metrics!r}).exists() and not Path({go!r}).exists():
        time.sleep(0.05)
    return len(set(solution_str)) / 20
"""


@pytest.mark.slow
def test_a_rank_that_lives_but_does_not_come_is_named_with_its_place(online_file: Path, tmp_path: Path) -> None:
    """After the first step rank 1 takes long to judge its responses, and rank 0 waits for them."""
    go, output, metrics = tmp_path / "go", tmp_path / "output", tmp_path / "runs" / "run" / "metrics.jsonl"
    (tmp_path / "reward.py").write_text(SLOW.format(metrics=str(metrics), go=str(go)), encoding="utf-8")
    words = ["train", online_file, "run.export=false", "reward.time_limit=600"]
    with started(output, *words, after=SOON) as launcher:
        wait_for(lambda: "rank 1 has not arrived" in output.read_text(), launcher, output)
        go.touch()
        assert launcher.wait(timeout=HANG) == 0, output.read_text()
    line = next(line for line in output.read_text().splitlines() if "rank 1 has not arrived" in line)
    assert re.match(r"rank 0 has waited \d+ s .*, in step \d+, ", line)
    assert re.search(r"it is at .*step \d+", line)
    assert "rank 1 has sent no heartbeat" not in output.read_text()


def test_a_wrong_interval_is_refused(recipe_file: Path) -> None:
    one = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = lockstep("train", recipe_file, TORCHELASTIC_USE_AGENT_STORE="True", LOCKSTEP_MISSED_AFTER="soon", **one)
    assert done.returncode == 2
    assert "LOCKSTEP_MISSED_AFTER" in done.stderr
    assert "Traceback" not in done.stderr
