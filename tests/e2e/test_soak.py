"""A run that is struck again and again ends as if nothing had happened; `tools/soak.py` says how."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import warm_python

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from soak import MARK, SHARED_MEMORY, Outcome, Plan, Striker, differences, leaked, soak

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="looks for processes in /proc"),
]


def assert_unharmed(whole: Outcome, struck: Outcome, apart: list[str], blows: int) -> None:
    assert whole.status == 0, whole.said
    assert struck.status == 0, struck.said
    assert len(struck.blows) == blows
    assert apart == []
    assert struck.left == []
    assert struck.shared_memory == []


@pytest.mark.slow
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    """It is started again, from the last checkpoint. Stopped scorers are in test_reward_hostile.py for every day."""
    plan = Plan(blows=1, seed=0, kinds=("rank",), stops=False)
    whole, struck, apart = soak(tmp_path, plan, steps=4, ranks=1, python=tuple(warm_python()))
    assert_unharmed(whole, struck, apart, 1)
    assert [(blow.kind, blow.signal) for blow in struck.blows] == [("rank", "SIGKILL")]
    assert struck.restarts == 1
    # Samples that were lost, or stored twice, would be found.
    run, alone = tmp_path / "struck" / "run", tmp_path / "whole" / "run"
    stored = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    for wrong in (stored[:-1], [*stored[:8], *stored]):
        (run / "samples.jsonl").write_text("".join(wrong))
        assert differences(run, alone) == ["samples"]


@pytest.mark.slow
def test_a_stopped_scorer_and_a_killed_rank_leave_no_trace(tmp_path: Path) -> None:
    """The score is asked for again; the rank is started again, from the last checkpoint."""
    plan = Plan(blows=2, seed=14, kinds=("worker", "rank"))
    whole, struck, apart = soak(tmp_path, plan, steps=5, ranks=1, stall=600, time_limit=4, python=tuple(warm_python()))
    assert_unharmed(whole, struck, apart, 2)
    assert [(blow.kind, blow.signal) for blow in struck.blows] == [("worker", "SIGSTOP"), ("rank", "SIGKILL")]
    assert struck.restarts == 1


@pytest.mark.slow
def test_a_killed_launcher_takes_all_with_it_and_the_command_goes_on(tmp_path: Path) -> None:
    whole, struck, apart = soak(tmp_path, Plan(blows=2, seed=0, kinds=("launcher",)), steps=8)
    assert_unharmed(whole, struck, apart, 2)
    assert struck.starts == 3
    assert struck.restarts == 0


@pytest.mark.slow
def test_ranks_that_divide_experts_go_on(tmp_path: Path) -> None:
    """A killed rank leaves the other waiting for its tokens; both are started again."""
    plan = Plan(blows=2, seed=0, kinds=("rank",), stops=False)
    whole, struck, apart = soak(tmp_path, plan, steps=8, experts=2)
    assert_unharmed(whole, struck, apart, 2)
    assert struck.restarts == 2
    recipe = (tmp_path / "struck" / "run" / "recipe.yaml").read_text()
    assert "expert_parallel: 2" in recipe


@pytest.mark.slow
def test_twenty_blows_leave_no_trace(tmp_path: Path) -> None:
    whole, struck, apart = soak(tmp_path, Plan(blows=20, seed=0), steps=120)
    assert_unharmed(whole, struck, apart, 20)
    assert struck.restarts >= 1


def test_what_is_left_would_be_found(tmp_path: Path) -> None:
    """A process with the mark, and a piece of shared memory that it has opened."""
    token = f"lockstep-soak-{os.getpid()}"
    piece = SHARED_MEMORY / token
    piece.write_text("left")
    striker = Striker(token, tmp_path / "metrics.jsonl", Plan(0, 0))
    try:
        with (
            piece.open() as opened,
            subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: token}, stdin=opened) as process,
        ):
            try:
                assert striker.look() == {process.pid: "launcher"}
            finally:
                process.kill()
        assert striker.look() == {}
        assert leaked(striker.shared) == [token]
    finally:
        piece.unlink()
    assert leaked(striker.shared) == []
