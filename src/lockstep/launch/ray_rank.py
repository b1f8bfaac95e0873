"""One rank under Ray: an actor that runs the rank as a child process and forwards its output.

Because the rank is a separate process, the actor can report that the rank was killed or stopped, the rank has its own
main thread and signals, and its exit status is available.
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
from lockstep.launch.restarts import LAUNCHER, status_of

# Time limit for reading the rest of the output of an ended process; a child process may keep the pipes open.
_DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class RankOutput:
    """Output of a rank (1: stdout, 2: stderr), and its exit status, which is None while the rank runs."""

    lines: list[tuple[int, bytes]]
    status: int | None


class RankPlace(NamedTuple):
    """The location of an actor: Ray's node id, the node's address, and the indices of its accelerators."""

    node: str
    address: str
    devices: list[str]


class RankProcess:
    """The Ray actor of one rank. Its methods run concurrently: one waits for output while another sends a signal."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._store: Any = None

    def place(self) -> RankPlace:
        import ray

        context = ray.get_runtime_context()
        devices = [one for ids in context.get_accelerator_ids().values() for one in ids]
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), devices)

    def hold_store(self, address: str) -> int:
        """Hosts the rendezvous store in the actor, so that it outlives the ranks; returns the port."""
        from torch.distributed import TCPStore

        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(self, arguments: list[str], environment: dict[str, str], folder: str | None) -> Problem | None:
        """Runs `lockstep` with these arguments in `folder`, or in the job's working directory if it is None. Returns a
        problem instead of raising, because Ray would wrap the exception."""
        if folder is not None and not Path(folder).is_dir():
            return Problem(
                f"folder {folder}",
                f"the run was started there, but node {os.uname().nodename} does not have it",
                "start it in a folder that all nodes share",
                code="not-shared",
            )
        # Output is unbuffered, so that it is complete if the rank is killed.
        extra = {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        # Ray blocks SIGINT in its workers, and a child inherits the signal mask of its thread.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment, **extra},
                cwd=folder,
                start_new_session=True,  # Ctrl-C is forwarded once, by the driver
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

    def read(self, seconds: float) -> RankOutput:
        """Returns the output since the last call; waits up to `seconds` if there is none."""
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
        return RankOutput(lines, None if status is None else status_of(status))

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kills the rank and its session."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
