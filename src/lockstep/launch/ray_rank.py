"""A Ray actor that runs one rank as a child process and forwards its output.

The rank is a separate process, so the actor can report that the rank was killed or stopped and which exit status it
had. The rank also has its own main thread and signal handlers.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.errors import Problem
from lockstep.launch.rank_logs import DRAIN_SECONDS, RankLog
from lockstep.launch.ray_engines import LINK, RankEngines
from lockstep.launch.restarts import LAUNCHER, status_of


@dataclass(frozen=True)
class RankOutput:
    """The output lines of a rank, each with its stream (1: stdout, 2: stderr), and its exit status. The status is None
    while the rank runs."""

    lines: list[tuple[int, bytes]]
    status: int | None


class RankPlace(NamedTuple):
    """The node on which an actor runs, with its id in Ray and its address. `devices` has the indices of the actor's
    accelerators."""

    node: str
    address: str
    devices: list[str]


class RankProcess:
    """The Ray actor of one rank. The methods of the actor run concurrently: one call waits for output while another
    sends a signal."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._store: Any = None
        self._log: RankLog

    def place(self) -> RankPlace:
        import ray

        context = ray.get_runtime_context()
        devices = [one for ids in context.get_accelerator_ids().values() for one in ids]
        return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), devices)

    def hold_store(self, address: str) -> int:
        """Creates torch's rendezvous store in this actor, so that the store outlives the ranks. Returns its port."""
        from torch.distributed import TCPStore

        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        folder: str | None,
        run_folder: str,
        niceness: int,
        engines: Sequence[Any] = (),
    ) -> Problem | int:
        """Starts `lockstep` with these arguments in `folder`, or in the Ray job's working directory if `folder` is
        None. Rank 0 controls `engines`, the actors of serving engines. Returns the niceness of the rank, which is
        `niceness` if this process may lower it. Returns a problem instead of raising it, because Ray would wrap an
        exception in its own."""
        if folder is not None and not Path(folder).is_dir():
            return Problem(
                f"folder {folder}",
                f"the run was started in this folder, but it does not exist on node {os.uname().nodename}",
                "start the run in a folder that all nodes share",
                code="not-shared",
            )
        # Output is unbuffered, so that no output is lost if the rank is killed.
        extra = {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        link = RankEngines(engines).theirs if engines else None
        if link is not None:
            extra[LINK] = str(link.fileno())
        # Ray blocks SIGINT in its workers, and a child process inherits the signal mask, so SIGINT is unblocked first.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment, **extra},
                cwd=folder,
                pass_fds=[link.fileno()] if link is not None else [],
                start_new_session=True,  # the terminal's Ctrl-C must not reach the rank, because the driver forwards it
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if link is not None:
                link.close()
        # Ray gives its workers niceness 15, which the rank inherits. Lowering it needs root or CAP_SYS_NICE.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        self._log = RankLog(Path(folder or os.getcwd()) / run_folder, int(environment["RANK"]))
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            reader = threading.Thread(target=self._pump, args=(number, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    def _pump(self, number: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._log.write(line)
            self._lines.put((number, line))

    def read(self, seconds: float) -> RankOutput:
        """Returns the rank's output since the last call. If there is no new output, waits up to `seconds` for
        output."""
        assert self._process is not None
        self._log.write(b"")  # a rank without output has a file too
        given_up, status = time.monotonic() + seconds, self._process.poll()
        while self._lines.empty() and status is None and time.monotonic() < given_up:
            with suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=0.05)
        if status is not None:
            end = time.monotonic() + DRAIN_SECONDS
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
        """Kills the rank and all processes of its process group."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
