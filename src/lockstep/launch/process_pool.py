"""Worker processes that run user code under a supervisor process, with a time limit for each call.

If a worker is killed, its child processes are killed too. `SupervisedProcess` is one process and a connection to it.
`LineWorker` reads replies from the connection as lines, with a limit of time and of line length. `ProcessPool`
distributes calls over several line workers and replaces those that fail.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from lockstep.errors import LostProcess, Refusal
from lockstep.launch.containers import MARK, remove_noted_containers
from lockstep.launch.supervisor import NOBODY, any_stopped, kill_tree

# Timeout of a send whose deadline has already passed. A timeout of 0 would make the socket non-blocking.
_SHORTEST_SECONDS = 0.001
# Maximum time in which a supervisor kills all processes that the user function started.
ENDING_SECONDS = 10.0

# The Python comment at the end of the command shows users of `ps` what this process runs.
_START = (
    "import sys; sys.path[:] = {path!r}; from lockstep.launch.supervisor import started; started({fd})  # {shown!r}"
)


class SupervisedProcess:
    """A process under a supervisor, and the socket to it. Any thread may call `kill`."""

    def __init__(self, serve: str, arguments: tuple[Any, ...], log: Path | None = None):
        """Starts a process that calls `serve` (`module:function`) with a socket and the arguments, which must be Python
        literals.

        The last lines that the process prints are written to `log`; without `log` the output is discarded.
        """
        self._mark = secrets.token_hex(16)
        self._pipe_lock, self._kill_lock = threading.Lock(), threading.Lock()
        self._gone = False
        self.connection, childs = socket.socketpair()
        end, parent_pipe = os.pipe()
        self._parent_pipe: int | None = parent_pipe
        output = None if log is None else str(log.absolute())
        # Arguments may contain secrets, and all users can read command lines. So the command line shows only `serve`,
        # the user's file and the log; the arguments are passed in a file.
        file = arguments[0] if arguments and isinstance(arguments[0], str) else None
        shown = " ".join(filter(None, [serve, file, output]))
        arguments_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in the `finally` block below
        arguments_file.write(repr((childs.fileno(), end, os.getpid(), serve, arguments, self._mark, output)).encode())
        arguments_file.seek(0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, fd=arguments_file.fileno(), shown=shown)],
                pass_fds=[childs.fileno(), end, arguments_file.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The process gets a new session, so that it does not receive Ctrl-C from the terminal.
                start_new_session=True,
                # The hash seed is fixed, so that the order of sets is the same in every process.
                env={"PYTHONHASHSEED": "0", **os.environ, MARK: self._mark},
            )
        except BaseException:
            os.close(parent_pipe)
            self.connection.close()
            raise
        finally:
            os.close(end)
            childs.close()
            arguments_file.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def disturbed(self) -> bool:
        """Whether something other than the user function, such as the OOM killer, killed or stopped the process."""
        ended = self._process.poll()
        return ended == -signal.SIGKILL if ended is not None else any_stopped(self._process.pid, self._mark)

    def release(self) -> None:
        """Requests the end of the process without waiting for it."""
        with self._pipe_lock:
            if self._parent_pipe is not None:
                # A byte is written before the pipe is closed, because a forked child of the run may keep the pipe open.
                with suppress(BrokenPipeError):
                    os.write(self._parent_pipe, b".")
                os.close(self._parent_pipe)
                self._parent_pipe = None

    def kill(self) -> None:
        """Kills the process and all processes that it started. `kill` may be called twice, and from any thread."""
        self.release()
        with self._kill_lock:
            if self._gone:
                return
            try:
                self._process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                kill_tree(self._process.pid, self._mark)
                self._process.kill()
                self._process.wait()
            # The user function may have killed the supervisor, so all processes whose environment contains the worker's
            # mark are killed too.
            kill_tree(NOBODY, self._mark)
            remove_noted_containers(self._mark)
            self._gone = True

    def ended(self) -> str:
        """Kills the process, if it is still running, and returns how it ended. Called after the process closed its
        connection."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.kill()
        status = self._process.returncode
        return f"was killed ({_signal(-status)})" if status < 0 else f"ended with status {status}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # signals between SIGRTMIN and SIGRTMAX have no name
        return f"signal {number}"


class ReplyTimeout(Exception):
    """Raised if a worker did not reply within its time limit. The worker was killed."""


class WorkerEnded(Exception):
    """Raised if a worker closed its connection. The message says how the worker ended."""


class LineWorker(SupervisedProcess):
    """A process that replies with lines of text. Only one thread may call the process, but any thread may kill it."""

    def __init__(
        self, serve: str, arguments: tuple[Any, ...], log: Path | None = None, longest_line: int | None = None
    ):
        super().__init__(serve, arguments, log)
        self.lost = False
        """Whether the last reply is missing because something other than the user function killed or stopped the
        process."""
        self._longest_line = longest_line
        self._lines: deque[bytes] = deque()
        self._partial = bytearray()
        self._late = False

    def send(self, message: bytes, deadline: float) -> None:
        """Sends a message. Raises `ReplyTimeout` or `WorkerEnded` if the message cannot be sent."""
        try:
            self.connection.settimeout(max(deadline - time.monotonic(), _SHORTEST_SECONDS))
            self.connection.sendall(message)
        except TimeoutError:
            self._kill_late()
            raise ReplyTimeout from None
        except OSError:
            raise self._ended() from None

    def read_line(self, deadline: float) -> bytes:
        """Returns the next line of the reply, without its newline. At the deadline (of `time.monotonic`) the process is
        killed. Lines that the process sent before are still returned; then `ReplyTimeout` is raised. Raises ValueError
        if a line is too long."""
        while not self._lines:
            if self._longest_line is not None and len(self._partial) > self._longest_line:
                raise ValueError("the line is too long")
            left = deadline - time.monotonic()
            if left <= 0 and not self._late:
                self._kill_late()
            try:
                self.connection.settimeout(None if self._late else left)
                piece = self.connection.recv(2**16)
            except TimeoutError:
                continue
            except OSError:
                piece = b""
            if not piece:
                raise ReplyTimeout if self._late else self._ended()
            first, *more = piece.split(b"\n")
            self._partial += first
            if more:
                self._lines.append(bytes(self._partial))
                self._lines.extend(more[:-1])
                self._partial = bytearray(more[-1])
        return self._lines.popleft()

    def disconnect(self) -> None:
        """Closes the connection to an ended process."""
        self.connection.close()

    def _kill_late(self) -> None:
        self.lost, self._late = self.disturbed, True
        self.kill()

    def _ended(self) -> WorkerEnded:
        how = self.ended()
        self.lost = self.disturbed
        return WorkerEnded(how)


CallT = TypeVar("CallT", contravariant=True)
ReplyT = TypeVar("ReplyT")


class PoolWorker(LineWorker, ABC, Generic[CallT, ReplyT]):
    """A worker process of a `ProcessPool`. If `spent` is true, the pool replaces the worker."""

    spent = False

    @abstractmethod
    def wait_loaded(self) -> None:
        """Waits until the worker has loaded the user code. Raises `Refusal` if the code cannot be loaded, or
        `LostProcess` if the process was lost and a restart may help."""

    @abstractmethod
    def call(self, call: CallT) -> ReplyT:
        """Sends one call to the worker process and returns its reply."""


class ProcessPool(Generic[CallT, ReplyT]):
    """A queue of calls and a fixed number of slots. Each slot has one worker process and one thread that supervises it.

    Workers are new interpreters. `multiprocessing.Process` is not used, because it would run the parent's main script
    in each worker, and this script imports torch. Besides, daemon processes of `multiprocessing` cannot have child
    processes.
    """

    def __init__(
        self,
        start: Callable[[int], PoolWorker[CallT, ReplyT]],
        workers: int,
        *,
        name: str,
        failed: Callable[[int, str], ReplyT],
        closed: ReplyT,
    ):
        """Starts the processes. `start` creates the worker process of a slot. `failed` creates the reply to a call if
        the worker could not be started or called. `closed` is the reply to a call after the pool is closed.

        Raises `LostProcess` if the first process was killed or stopped twice while it loaded the user code."""
        self._start_worker, self._failed, self._closed = start, failed, closed
        self._jobs: queue.Queue[tuple[CallT, Future[ReplyT]] | None] = queue.Queue()
        # The lock ensures that a call is either queued before the pool closes, or answered by `submit` itself.
        self._submit_lock = threading.Lock()
        self._closing = threading.Event()
        self._workers: list[PoolWorker[CallT, ReplyT] | None] = [None] * workers
        # The other workers start only after the first one has loaded, so that an unusable user file is reported only
        # once.
        try:
            self._start(0)
        except LostProcess:
            self._start(0)
        self._threads = [
            threading.Thread(target=self._supervise, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: CallT) -> Future[ReplyT]:
        """Queues a call and returns its future immediately. The future never raises and cannot be cancelled."""
        future: Future[ReplyT] = running_future()
        with self._submit_lock:
            if not self._closing.is_set():
                self._jobs.put((call, future))
                return future
        future.set_result(self._closed)
        return future

    def close(self) -> None:
        """Kills all worker processes. Queued and running calls get the reply `closed`."""
        with self._submit_lock:
            self._closing.set()
            for _ in self._threads:
                self._jobs.put(None)
        # This list does not contain processes that are still being started. `_start` kills these processes.
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.release()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        for gone in self._workers:
            if gone is not None:
                gone.disconnect()

    def _start(self, index: int) -> None:
        """Starts the worker process of this slot and waits until it has loaded the user code."""
        before = self._workers[index]
        worker = self._start_worker(index)
        self._workers[index] = worker
        if before is not None:
            before.kill()
            before.disconnect()
        if self._closing.is_set():
            worker.kill()
        try:
            worker.wait_loaded()
        except BaseException:
            worker.kill()
            raise

    def _supervise(self, index: int) -> None:
        # If this first start of the worker process fails, the next call starts it again.
        self._ready(index)
        while (job := self._jobs.get()) is not None:
            call, future = job
            future.set_result(self._reply(index, call))

    def _reply(self, index: int, call: CallT) -> ReplyT:
        """Returns a reply even if the worker failed, because a call without a reply would block the run forever."""
        reply = self._call_worker(index, call)
        worker = self._workers[index]
        if worker is not None and worker.lost and not self._closing.is_set():
            # If something other than the user function killed the worker, the call is repeated once, so that the kill
            # does not change the training.
            reply = self._call_worker(index, call)
        return self._closed if self._closing.is_set() else reply

    def _call_worker(self, index: int, call: CallT) -> ReplyT:
        why = self._ready(index)
        if why is not None:
            return self._failed(index, why)
        worker = self._workers[index]
        assert worker is not None
        try:
            reply = worker.call(call)
        except Exception as error:  # noqa: BLE001 - the reply reports the error
            worker.kill()
            return self._failed(index, f"the worker process could not be called: {type(error).__name__}: {error}")
        if worker.spent:
            worker.kill()
        return reply

    def _ready(self, index: int) -> str | None:
        """Starts the worker process of this slot if none is running. Returns the error text if the start fails, else
        None."""
        if self._closing.is_set():
            return "the pool is closed"
        worker = self._workers[index]
        if worker is None or not worker.alive:
            try:
                self._start(index)
            except Refusal as refusal:
                return f"the worker process could not be started: {refusal.problems[0].why}"
            except Exception as error:  # noqa: BLE001 - out of memory or processes: the next call may succeed
                return f"the worker process could not be started: {type(error).__name__}: {error}"
        return None


def running_future() -> Future[Any]:
    """Returns a future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
