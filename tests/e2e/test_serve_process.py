"""`lockstep serve` as a process: many clients at once, and a signal while it generates."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import warm_python
from hang import HANG, wait_until
from lockstep.commands.generate import Conversation
from served import talk
from speaker import write_speaker

# Beyond this much more memory than after the first round, something is kept of requests that are over.
LEAK_BYTES = 24 * 2**20


@pytest.fixture(scope="module")
def speaker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("speaker") / "tiny", tiny_folder)


@pytest.fixture(scope="module")
def expected(speaker: Path) -> dict[str, str]:
    spoken = Conversation(str(speaker), "cpu", max_new_tokens=24, temperature=0.0, seed=0, system=None)
    found = {words: spoken.answer(words) for words in (f"{'so ' * (i % 4)}{i} and {i * i}?" for i in range(8))}
    assert len(set(found.values())) == 8
    return found


class Process:
    def __init__(self, speaker: Path, rows: int):
        words = ["serve", str(speaker), "--port", "0", "--device", "cpu", "--max-sequences", str(rows)]
        self.process = subprocess.Popen(
            [*warm_python(), "-m", "lockstep", *words, "--max-length", "300", "--cache-gb", "0.004"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"tiny on (http://127\.0\.0\.1:\d+): /health, /v1/chat/completions, ", line)
        assert found is not None, line
        self.address = found[1]

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.address}/health", timeout=HANG) as answer:
            return json.load(answer)

    def is_idle(self) -> bool:
        load = self.health()
        return (load["running"], load["waiting"], load["free_blocks"]) == (0, 0, load["blocks"])

    def served_by(self) -> int:
        """The process that listens: started warm, it is not the one that was asked for."""
        port = int(self.address.rsplit(":", 1)[1])
        inode = next(
            line.split()[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        )
        for folder in Path("/proc").glob("[0-9]*/fd"):
            try:
                if any(os.readlink(link) == f"socket:[{inode}]" for link in folder.iterdir()):
                    return int(folder.parent.name)
            except OSError:
                continue  # not ours to look at, or gone
        raise AssertionError("nobody listens")


@pytest.fixture
def process(speaker: Path) -> Iterator[Process]:
    started = Process(speaker, rows=16)
    yield started
    started.process.kill()
    started.process.wait(HANG)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_signal_while_generating_ends_the_process_in_time(process: Process) -> None:
    """The clients get the end of their streams, and the exit status is 0."""
    body = json.dumps({"prompt": "x", "n": 8, "max_tokens": 290, "ignore_eos": True, "stream": True, "model": "tiny"})
    request = urllib.request.Request(f"{process.address}/v1/completions", body.encode())
    with urllib.request.urlopen(request, timeout=HANG) as stream:
        assert stream.readline().startswith(b"data: ")
        process.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError, http.client.HTTPException):  # a cut stream is an end too
            while stream.readline():
                pass
    assert process.process.wait(HANG) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "rounds"), [pytest.param(200, 4, marks=pytest.mark.slow), pytest.param(16, 2)], ids=["200", "16"]
)
def test_clients_that_come_and_go_leave_nothing(
    process: Process, expected: dict[str, str], requests: int, rounds: int
) -> None:
    pid = process.served_by()
    found = []
    for _ in range(rounds):
        asyncio.run(talk(process.address, expected, requests))
        wait_until(process.is_idle)
        if found:
            wait_until(lambda: files(pid) <= found[0][1])
        found.append((resident(pid), files(pid)))
    assert found[-1][0] - found[0][0] < LEAK_BYTES, found
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(HANG) == 0
