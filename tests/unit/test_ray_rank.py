"""The process that an actor runs a rank in, and the address of a cluster. Neither needs Ray."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from hang import HANG, wait_until
from lockstep.errors import Problem, Refusal
from lockstep.launch import ray_launcher
from lockstep.launch.ray_launcher import refuse_unreachable
from lockstep.launch.ray_rank import RankOutput, RankProcess
from lockstep.parallel.rendezvous import log_wait
from ranks import assert_none_left, ranks_of
from refusals import refuses


def all_of(rank: RankProcess) -> RankOutput:
    lines = []
    while True:
        heard = rank.read(1)
        lines += heard.lines
        if heard.status is not None:
            return RankOutput(lines, heard.status)


def test_what_a_rank_says_and_how_it_ends(tmp_path: Path) -> None:
    good, bad = RankProcess(), RankProcess()
    good.start(["recipes"], {"RANK": "0"}, str(tmp_path), str(tmp_path), 0)
    bad.start(["train", "nowhere.yaml"], {"RANK": "0"}, str(tmp_path), str(tmp_path), 0)
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
    rank.start(["recipes", f"run.folder={tmp_path}"], {"RANK": "0"}, None, str(tmp_path), 0)
    rank.send(signal.SIGSTOP)
    try:
        wait_until(lambda: ranks_of(tmp_path).keys() == {0})
        assert rank.read(0.2).status is None
    finally:
        rank.end()
    assert rank.read(0).status == 128 + signal.SIGKILL
    assert_none_left(tmp_path)


def test_a_node_without_the_folder_is_refused(tmp_path: Path) -> None:
    problem = RankProcess().start(["recipes"], {}, str(tmp_path / "nowhere"), str(tmp_path), 0)
    assert isinstance(problem, Problem)
    assert os.uname().nodename in problem.why


# -- RAY_ADDRESS


@pytest.mark.parametrize("address", ["nonsense", "head", "head:port", "head:0", "head:70000", "ray://head", "a b:6379"])
def test_an_address_that_is_none_is_refused_with_what_to_write(address: str) -> None:
    with refuses("RAY_ADDRESS", "invalid-address", repr(address)) as caught:
        refuse_unreachable(address)
    assert "HOST:PORT" in caught.value.problems[0].remedy


@pytest.mark.parametrize("address", [None, "", "auto", "local", "k8s://mine"])
def test_what_ray_finds_by_itself_is_left_to_it(address: str | None) -> None:
    refuse_unreachable(address)


SETTINGS = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "Connection refused"),
        (b"", "timed out"),
        (b"HTTP/1.1 400 Bad Request", "is not a Ray cluster"),
        (SETTINGS, None),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answer: bytes | None, why: str | None
) -> None:
    """Nobody listens; somebody does and says nothing; something that is no cluster; what a cluster begins with."""
    monkeypatch.setattr(ray_launcher, "_CONNECT_SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            server.listen()

        def serve() -> None:
            line, _ = server.accept()
            with line, suppress(OSError):
                line.recv(100)
                line.sendall(answer or b"")
                line.recv(100)

        if answer:
            threading.Thread(target=serve, daemon=True).start()
        if why is None:
            refuse_unreachable(address)
            return
        with pytest.raises(Refusal, match=why) as caught:
            refuse_unreachable(address)
    assert caught.value.problems[0].where == f"RAY_ADDRESS={address}"


def test_a_long_wait_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with log_wait("the others", after=0.01):
        wait_until(lambda: said.append(capfd.readouterr().err) or "waiting for the others for" in "".join(said))
    with log_wait("nobody", after=HANG):
        pass
    assert "nobody" not in capfd.readouterr().err
