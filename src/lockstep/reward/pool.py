"""Processes that call a user's function: each can be killed and replaced without the others noticing.

They are started as fresh interpreters, not by `multiprocessing.Process`: that would run the main script of the parent
again in each (and import torch with it), and its processes may not have children of their own.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.reward.worker import Given, Loaded, Raised, Unusable

# Importing a user's file may import torch from a slow disk.
LOAD_SECONDS = 120.0

_START = "import sys; sys.path[:] = {path!r}; from lockstep.reward.worker import serve; serve({arguments})"


@dataclass(frozen=True)
class Target:
    """The function to call and what a call may take. `key` is the setting that named it."""

    path: str
    name: str
    time_limit: float
    memory_limit_gb: float
    output: Path | None = None
    """File that what the function prints is appended to; without one it is thrown away."""
    key: str = "reward.function"


@dataclass(frozen=True)
class _Job:
    call: dict[str, Any]
    future: Future[Given | Raised]


class Pool:
    """Calls wait in one line; a thread for each process takes them from it and watches the clock."""

    def __init__(self, target: Target, workers: int):
        """Starts the processes. Refuses a function that cannot be loaded or called."""
        self._target = target
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._closing = threading.Event()
        self._workers: list[_Worker | None] = [None] * workers
        # The first is waited for alone: a file that cannot be used is then told once, not by each.
        self._start(0)
        self._threads = [
            threading.Thread(target=self._supervise, args=(place,), name=f"reward-{place}", daemon=True)
            for place in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: dict[str, Any]) -> Future[Given | Raised]:
        """Returns at once. The future never raises and cannot be cancelled."""
        future: Future[Given | Raised] = Future()
        future.set_running_or_notify_cancel()
        if self._closing.is_set():
            future.set_result(_CLOSED)
        else:
            self._jobs.put(_Job(call, future))
        return future

    def close(self) -> None:
        """Kill every process; calls that wait or run are answered with a failure."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        # One that is being started meanwhile is killed where it is started.
        for worker in list(self._workers):
            if worker is not None:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def _start(self, place: int) -> None:
        """A new process in this place, ready for calls."""
        worker = _Worker(self._target)
        self._workers[place] = worker
        if self._closing.is_set():
            worker.kill()
        try:
            trouble = worker.wait_loaded()
        except BaseException:
            worker.kill()
            raise
        if trouble is not None:
            worker.kill()
            where = f"{self._target.key} {self._target.path}:{self._target.name}"
            raise Refusal.at(where, trouble.why, trouble.remedy)

    def _supervise(self, place: int) -> None:
        # A process that cannot be started now is tried again when there is something to do.
        self._ready(place)
        while (job := self._jobs.get()) is not None:
            job.future.set_result(self._ready(place) or self._run(place, job.call))

    def _ready(self, place: int) -> Raised | None:
        """See that a living process is in this place, or say why there is none."""
        if self._closing.is_set():
            return _CLOSED
        worker = self._workers[place]
        if worker is None or not worker.alive:
            try:
                self._start(place)
            except Refusal as refusal:
                why = f"its process could not be started: {refusal.problems[0].why}"
                return _CLOSED if self._closing.is_set() else Raised(why)
        return None

    def _run(self, place: int, call: dict[str, Any]) -> Given | Raised:
        worker = self._workers[place]
        assert worker is not None
        answer = worker.ask(call)
        if self._closing.is_set():
            return _CLOSED
        if isinstance(answer, Raised) and answer.spent:
            worker.kill()
        return answer


_CLOSED = Raised("the run was ending before it was scored")


class _Worker:
    """One process and the connection to it."""

    def __init__(self, target: Target):
        self._target = target
        self._connection, childs = Pipe()
        arguments = (childs.fileno(), target.path, target.name, int(target.memory_limit_gb * 2**30))
        code = _START.format(path=sys.path, arguments=", ".join(map(repr, arguments)))
        with childs, _opened(target.output) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[childs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Out of reach of the terminal's Ctrl-C; and the leader of a group that is killed as one.
                start_new_session=True,
                # The order of a set must not depend on which process looks at it.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_loaded(self) -> Unusable | None:
        answer = self._received(LOAD_SECONDS, "the time for loading")
        if isinstance(answer, Loaded):
            return None
        if isinstance(answer, Unusable):
            return answer
        return Unusable(f"could not be loaded: {answer.why if isinstance(answer, Raised) else answer}")

    def ask(self, call: dict[str, Any]) -> Given | Raised:
        try:
            self._connection.send(call)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Raised(f"the row cannot be handed to its process: {error}")
        except OSError:
            return self._ended()
        answer = self._received(self._target.time_limit, "reward.time_limit")
        assert isinstance(answer, Given | Raised)
        return answer

    def kill(self) -> None:
        """End the process and everything it started. Safe to call twice, and from another thread."""
        # The group may outlive its leader.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _received(self, seconds: float, limit: str) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            return self._ended()
        return Raised(f"gave nothing in {seconds:g} s ({limit})", spent=True)

    def _ended(self) -> Raised:
        """Why the process is gone."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.kill()
        status = self._process.returncode
        how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
        return Raised(f"its process {how} before it gave a score", spent=True)


@contextmanager
def _opened(output: Path | None) -> Iterator[Any]:
    """Where a process prints to."""
    if output is None:
        yield subprocess.DEVNULL
    else:
        with output.open("ab") as file:
            yield file
