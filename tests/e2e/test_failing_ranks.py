"""Ranks that are killed, stopped or stuck: named, ended with their stacks in the run folder, and started again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from commands import changed_lockstep, cold_lockstep, completed, lockstep, warm_python
from hang import HANG
from kills import lines
from ranks import assert_none_left
from runs import facts, stored
from struck import struck

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="looks for processes in /proc"),
]
TWO = ["parallel.devices=2", "checkpoint.every=2", "checkpoint.asynchronous=false", "run.export=false"]


@pytest.mark.slow
def test_a_killed_and_a_stopped_rank_cost_the_steps_since_the_last_checkpoint(
    recipe_file: Path, tmp_path: Path
) -> None:
    """Rank 1 falls after step 3, with a checkpoint of step 2."""
    whole = cold_lockstep("train", recipe_file, f"run.folder={tmp_path / 'whole'}", *TWO)
    assert whole.returncode == 0, whole.stderr
    for number in (signal.SIGKILL, signal.SIGSTOP):
        runs = tmp_path / number.name
        # A restart must not be refused for the folder that the first start has made.
        words = ["train", recipe_file, f"run.folder={runs}", *TWO, "parallel.max_restarts=1", "run.resume=never"]
        words += ["parallel.stall_seconds=8"] if number == signal.SIGSTOP else []
        environment, once = struck(
            tmp_path / f"{number.name}-blow", 1, number, lines(runs / "run" / "metrics.jsonl", 3)
        )
        done = cold_lockstep(*words, **environment)
        assert once.exists(), done.stdout
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("restart 1 of 1") == 1
        assert f"resuming {runs / 'run'} after step 2" in " ".join(done.stdout.split())  # lines may be broken
        assert_none_left(runs)
        assert facts(runs / "run") == facts(tmp_path / "whole" / "run")
        weights, wanted = stored(runs / "run", 6), stored(tmp_path / "whole" / "run", 6)
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        if number == signal.SIGKILL:
            assert "rank 1 was killed by SIGKILL" in done.stderr
            continue
        assert "the run has stalled: no progress for" in done.stderr
        assert re.search(r"\n  rank 0 has (waited|been) \d+ s at .*step \d", done.stderr)
        assert re.search(r"\n  rank 1 .* no heartbeat for \d+ s; .*step \d", done.stderr)
        for rank in (0, 1):
            found = (runs / "run" / "stacks" / f"rank_{rank}.txt").read_text()
            assert "rank 1 has sent no heartbeat" in found
            assert re.search(r'File ".*lockstep/train/.*", line \d+ in ', found), found


@pytest.mark.slow
def test_a_lone_process_that_is_stuck_ends_with_its_stacks(recipe_file: Path, tmp_path: Path) -> None:
    """Before there is a run folder they are shown; there is none afterwards, so the next start is a first one."""
    (tmp_path / "stuck.py").write_text("import time\n\ndef rows(path):\n    time.sleep(1e6)\n    yield {}\n")
    words = ["train", recipe_file, f"data.reader={tmp_path / 'stuck.py'}:rows", "parallel.stall_seconds=4"]
    done = lockstep(*words)
    assert done.returncode == 75, done.stderr
    assert re.search(r"\n  rank 0 has been \d+ s at ", done.stderr), done.stderr
    # The reader runs in a process of its own; this one waits for its rows.
    assert re.search(r'user_reader\.py", line \d+ in _in_process', done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()
    alone = lockstep("train", recipe_file, "parallel.launcher=ray", "parallel.devices=1", RANK="0", WORLD_SIZE="1")
    assert alone.returncode == 2
    assert "parallel.launcher" in alone.stderr


# One response of the second step never comes; all others do.
WITHHELD = """
from pathlib import Path
from lockstep.rollout.native.native_engine import NativeEngine

own = NativeEngine.generate

def generate(engine, requests, sampling):
    if not Path({metrics!r}).exists():
        yield from own(engine, requests, sampling)
        return
    for completion in own(engine, requests, sampling):
        if (completion.request, completion.sample) != (2, 1):
            yield completion
    time.sleep(1e6)

NativeEngine.generate = generate
"""


@pytest.mark.slow  # it waits half a minute
def test_a_hang_in_generation_names_the_sample_that_is_waited_for(online_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    program = changed_lockstep(tmp_path, WITHHELD.format(metrics=str(run / "metrics.jsonl")))
    words = ["train", online_file, "parallel.stall_seconds=20", "run.export=false"]
    done = completed([*warm_python(), str(program), *map(str, words)], HANG, {})
    assert done.returncode == 75, done.stderr
    where = r"step 2, gen, sample 1 of prompt 2 of the step \(.*\.jsonl line \d+\)\n"
    assert re.search(rf"\n  rank 0 has been \d+ s at {where}", done.stderr), done.stderr
    assert re.search(where, (run / "stacks" / "rank_0.txt").read_text())
