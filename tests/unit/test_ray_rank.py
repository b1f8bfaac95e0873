"""The process that an actor runs a rank in. It needs no Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hang import wait_until
from lockstep.parallel.ray_rank import RankHeard, RankProcess
from ranks import assert_none_left, ranks_of


def all_of(rank: RankProcess) -> RankHeard:
    lines = []
    while True:
        heard = rank.read(1)
        lines += heard.lines
        if heard.status is not None:
            return RankHeard(lines, heard.status)


def test_what_a_rank_says_and_how_it_ends(tmp_path: Path) -> None:
    good, bad = RankProcess(), RankProcess()
    good.start(["recipes"], {"RANK": "0"}, str(tmp_path))
    bad.start(["train", "nowhere.yaml"], {"RANK": "0"}, str(tmp_path))
    heard = all_of(good)
    assert heard.status == 0
    assert any(
        number == 1 and line.startswith(b"sft-arithmetic") and line.endswith(b"\n") for number, line in heard.lines
    )
    refused = all_of(bad)
    assert refused.status == 2
    assert any(number == 2 and b"nowhere.yaml" in line for number, line in refused.lines)


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="looks for processes in /proc")
def test_a_stopped_rank_can_be_ended(tmp_path: Path) -> None:
    rank = RankProcess()
    rank.start(["recipes", f"run.folder={tmp_path}"], {"RANK": "0"}, None)
    rank.send(signal.SIGSTOP)
    try:
        wait_until(lambda: ranks_of(tmp_path).keys() == {0})
        assert rank.read(0.2).status is None
    finally:
        rank.end()
    assert rank.read(0).status == 128 + signal.SIGKILL
    assert_none_left(tmp_path)


def test_a_node_without_the_folder_is_refused(tmp_path: Path) -> None:
    problem = RankProcess().start(["recipes"], {}, str(tmp_path / "nowhere"))
    assert problem is not None
    assert os.uname().nodename in problem.why
