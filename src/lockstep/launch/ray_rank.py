"""One rank under Ray: an actor on the rank's machine that runs it as a process of its own, and hands on what it says.

A process beside the actor's: what kills or stops the rank leaves somebody who can tell, the rank has its main thread
and its signals to itself, and its exit status is its own.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.errors import Problem
from lockstep.launch.launcher import LAUNCHER
from lockstep.launch.restarts import status_of

# What a process that has ended left in its pipes; a child of its own may keep them open.
_DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class RankHeard:
    """What a rank wrote (1 is stdout, 2 is stderr), and the status it ended with; None while it runs."""

    lines: list[tuple[int, bytes]]
    status: int | None


class RankSeat(NamedTuple):
    """Ray's name of a node, its address, and the numbers of the accelerators there that are this actor's."""

    node: str
    address: str
    devices: list[str]


class RankProcess:
    """The actor. Its methods run beside each other: one waits for output while another sends a signal."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._store: Any = None

    def place(self) -> RankSeat:
        import ray

        context = ray.get_runtime_context()
        devices = [one for ids in context.get_accelerator_ids().values() for one in ids]
        return RankSeat(context.get_node_id(), ray.util.get_node_ip_address(), devices)

    def hold_store(self, address: str) -> int:
        """Hold the store where the ranks meet, so that it outlives each of them; the port."""
        from torch.distributed import TCPStore

        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(self, words: list[str], environment: dict[str, str], folder: str | None) -> Problem | None:
        """Run `lockstep` with these words in a folder; None is that of the job's working directory. What is in the way
        is returned: an exception would come to the driver as another one."""
        if folder is not None and not Path(folder).is_dir():
            return Problem(
                f"folder {folder}",
                f"the run was started there, and node {os.uname().nodename} does not have it",
                "start it in a folder that all nodes share",
            )
        # By lines also where the rank is killed.
        own = {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        # Ray blocks Ctrl-C in its workers, and a child has the mask of the thread that makes it.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment, **own},
                cwd=folder,
                start_new_session=True,  # Ctrl-C comes from the driver, once
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            reader = threading.Thread(target=self._pump, args=(number, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)
        return None

    def _pump(self, number: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._lines.put((number, line))

    def read(self, seconds: float) -> RankHeard:
        """What has come since the last time; waits so long where nothing has."""
        assert self._process is not None
        given_up, status = time.monotonic() + seconds, self._process.poll()
        while self._lines.empty() and status is None and time.monotonic() < given_up:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=0.05)
        if status is not None:
            end = time.monotonic() + _DRAIN_SECONDS
            for reader in self._readers:
                reader.join(timeout=max(0.0, end - time.monotonic()))
        lines = []
        with suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return RankHeard(lines, None if status is None else status_of(status))

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """The rank, and what it has started in its session."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
