"""A pool of killable worker processes for reward functions."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # a separate class before Python 3.11
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import LostProcess, Refusal
from lockstep.functions import LOAD_SECONDS
from lockstep.launch.worker_process import FunctionProcess
from lockstep.reward.function_worker import (
    HEADER,
    LOADING,
    LONGEST_LINE,
    Given,
    Loaded,
    Raised,
    Reply,
    Unusable,
    answer,
    read_line,
)


@dataclass(frozen=True)
class Target:
    """The function to call and its limits. `key` is its setting."""

    path: str
    name: str
    time_limit: float
    memory_limit_gb: float
    output: Path | None = None
    """OUTPUT-N.log keeps the last output lines of worker N; None drops them."""
    key: str = "reward.function"
    extra: tuple[str, ...] = ()
    """Names of additional arguments."""

    def log(self, index: int) -> Path | None:
        return None if self.output is None else self.output.with_name(f"{self.output.name}-{index}.log")


class WorkerProcess:
    """One worker process and its connection. Replies are read as text with limits of time and size. One thread calls;
    any thread can kill."""

    def __init__(self, target: Target, index: int):
        self._target = target
        self._calls = LOADING
        self._unread = b""
        self.disturbed = False
        """Whether the last reply is missing because the process was killed or stopped from outside."""
        arguments = (target.path, target.name, int(target.memory_limit_gb * 2**30), target.extra)
        self._process = FunctionProcess("lockstep.reward.function_worker:serve", arguments, target.log(index))
        self._connection = self._process.connection

    @property
    def alive(self) -> bool:
        return self._process.alive

    def wait_loaded(self) -> Unusable | None:
        reply = self._reply(LOAD_SECONDS, "the time for loading")
        if isinstance(reply, Loaded):
            return None
        if isinstance(reply, Unusable):
            return reply
        return Unusable(f"could not be loaded: {reply.why if isinstance(reply, Raised) else reply}")

    def ask(self, call: dict[str, Any]) -> Given | Raised:
        try:
            pickled = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - whatever the objects of the row raise is the reason
            return Raised(f"the row cannot be handed to its process: {error}")
        self._calls += 1
        reply = self._reply(
            self._target.time_limit, "reward.time_limit", HEADER.pack(self._calls, len(pickled)) + pickled
        )
        return reply if isinstance(reply, Given | Raised) else self._invalid_reply()

    def release(self) -> None:
        """Requests the end of the process without waiting."""
        self._process.release()

    def kill(self) -> None:
        """Kills the process and its children. Can be called twice, and from another thread."""
        self._process.kill()

    def disconnect(self) -> None:
        """Closes the connection of an ended process."""
        self._connection.close()

    def _reply(self, seconds: float, limit: str, call: bytes = b"") -> Reply:
        """The reply to the current call. Replies to earlier calls come from forked copies and are ignored."""
        deadline = time.monotonic() + seconds
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(call)
            while True:
                number, reply = read_line(self._line(deadline))
                if number == self._calls:
                    return reply
                if number > self._calls:
                    return self._invalid_reply()
        except TimeoutError:
            self.disturbed = self._process.disturbed
            return Raised(f"gave nothing in {seconds:g} s ({limit})", spent=True)
        except (EOFError, OSError):
            how = self._process.ended()
            self.disturbed = self._process.disturbed
            return Raised(f"its process {how} before it gave a score", spent=True)
        except ValueError:
            return self._invalid_reply()

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            if len(self._unread) > LONGEST_LINE:
                raise ValueError("a line without an end")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            piece = self._connection.recv(2**16)
            if not piece:
                raise EOFError
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _invalid_reply(self) -> Raised:
        return Raised("wrote something else than its answer to the connection of its process", spent=True)


# Workers are started as new interpreters, not by `multiprocessing.Process`: that would run the main script of the
# parent in each (and import torch), and its daemon processes cannot have children.


@dataclass(frozen=True)
class _Job:
    call: dict[str, Any]
    future: Future[Given | Raised]


class Pool:
    """A queue of calls, with one worker process and one supervising thread per slot."""

    def __init__(self, target: Target, workers: int):
        """Starts the processes. Refuses a function that cannot be loaded or called.

        A process that was killed or stopped twice while loading raises `LostProcess`: a restart may help."""
        self._target = target
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        # A call is either queued before the pool closes, or answered by `submit`.
        self._submit_lock = threading.Lock()
        self._closing = threading.Event()
        self._workers: list[WorkerProcess | None] = [None] * workers
        # Wait for the first worker alone, so that an unusable file is reported once.
        try:
            self._start(0)
        except LostProcess:
            self._start(0)
        self._threads = [
            threading.Thread(target=self._supervise, args=(index,), name=f"reward-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: dict[str, Any]) -> Future[Given | Raised]:
        """Returns at once. The future never raises and cannot be cancelled."""
        future = _promised()
        with self._submit_lock:
            if not self._closing.is_set():
                self._jobs.put(_Job(call, future))
                return future
        future.set_result(_CLOSED)
        return future

    def close(self) -> None:
        """Kills all processes; waiting and running calls fail."""
        with self._submit_lock:
            self._closing.set()
            for _ in self._threads:
                self._jobs.put(None)
        # A process that is being started is killed in `_start`.
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
        """Starts a process at this index and waits until it is loaded."""
        before = self._workers[index]
        worker = WorkerProcess(self._target, index)
        self._workers[index] = worker
        if before is not None:
            before.kill()
            before.disconnect()
        if self._closing.is_set():
            worker.kill()
        try:
            problem = worker.wait_loaded()
        except BaseException:
            worker.kill()
            raise
        if problem is not None:
            worker.kill()
            where = f"{self._target.key} {self._target.path}:{self._target.name}"
            if worker.disturbed:
                remedy = "find out what killed or stopped it, for example a lack of memory; then try again"
                raise LostProcess.at(where, problem.why, remedy, code=problem.code)
            raise Refusal.at(where, problem.why, problem.remedy, code=problem.code)

    def _supervise(self, index: int) -> None:
        # A failed start is retried at the next call.
        self._ready(index)
        while (job := self._jobs.get()) is not None:
            job.future.set_result(self._answer(index, job.call))

    def _answer(self, index: int, call: dict[str, Any]) -> Given | Raised:
        """Always returns an outcome: a call without one would block the run forever."""
        answer = self._call_worker(index, call)
        worker = self._workers[index]
        if worker is not None and worker.disturbed and not self._closing.is_set():
            # Retry once after a kill from outside, so that it does not change the training.
            answer = self._call_worker(index, call)
        if self._closing.is_set():
            return _CLOSED
        log = self._target.log(index)
        if isinstance(answer, Raised) and log is not None and log.parent.parent.is_dir():
            return replace(answer, log=str(log))
        return answer

    def _call_worker(self, index: int, call: dict[str, Any]) -> Given | Raised:
        problem = self._ready(index)
        if problem is not None:
            return problem
        try:
            return self._run(index, call)
        except Exception as error:  # noqa: BLE001 - reported as the reason
            return Raised(f"its process could not be called: {type(error).__name__}: {error}")

    def _ready(self, index: int) -> Raised | None:
        """Ensures a running process at this index; returns the reason if there is none."""
        if self._closing.is_set():
            return _CLOSED
        worker = self._workers[index]
        if worker is None or not worker.alive:
            try:
                self._start(index)
            except Refusal as refusal:
                return Raised(f"its process could not be started: {refusal.problems[0].why}")
            except Exception as error:  # noqa: BLE001 - out of memory or processes: the next call may succeed
                return Raised(f"its process could not be started: {type(error).__name__}: {error}")
        return None

    def _run(self, index: int, call: dict[str, Any]) -> Given | Raised:
        worker = self._workers[index]
        assert worker is not None
        try:
            answer = worker.ask(call)
        except Exception:
            worker.kill()
            raise
        if isinstance(answer, Raised) and answer.spent:
            worker.kill()
        return answer


class LocalCalls:
    """Like `Pool`, for a function that exists only in this process: calls run one by one in a thread. A thread over the
    time limit cannot be killed; it is abandoned, and the next call gets a new one.
    """

    def __init__(self, function: Callable[..., Any], path: str, seconds: float):
        self._function, self._path, self._seconds = function, path, seconds
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._submit_lock, self._closing = threading.Lock(), False
        self._calls: queue.SimpleQueue[_Job | None] | None = None
        """Queue of the calling thread; None ends the thread."""
        self._supervisor = threading.Thread(target=self._supervise, name="reward-calls", daemon=True)
        self._supervisor.start()

    def submit(self, call: dict[str, Any]) -> Future[Given | Raised]:
        """Returns at once. The future never raises and cannot be cancelled."""
        job = _Job(call, _promised())
        with self._submit_lock:
            if not self._closing:
                self._jobs.put(job)
                return job.future
        job.future.set_result(_CLOSED)
        return job.future

    def close(self) -> None:
        """Fails waiting calls; waits for the running one within its time limit."""
        with self._submit_lock:
            self._closing = True
            self._jobs.put(None)
        self._supervisor.join()

    def _supervise(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.future.set_result(_CLOSED if self._closing else self._answer(job.call))
        if self._calls is not None:
            self._calls.put(None)

    def _answer(self, call: dict[str, Any]) -> Given | Raised:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._calls,), name="reward-function", daemon=True).start()
        job = _Job(call, _promised())
        self._calls.put(job)
        try:
            return job.future.result(self._seconds)
        except FutureTimeout:
            self._calls.put(None)
            self._calls = None
            return Raised(f"gave nothing in {self._seconds:g} s (reward.time_limit)")

    def _run(self, calls: queue.SimpleQueue[_Job | None]) -> None:
        while (job := calls.get()) is not None:
            job.future.set_result(self._called(job.call))

    def _called(self, call: dict[str, Any]) -> Given | Raised:
        try:
            # A copy, as in another process: the function must not change the row.
            copied = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - whatever the objects of the row raise is the reason
            return Raised(f"the row cannot be copied for it: {error}")
        return answer(self._function, copied, self._path)


def _promised() -> Future[Given | Raised]:
    future: Future[Given | Raised] = Future()
    future.set_running_or_notify_cancel()
    return future


_CLOSED = Raised("the run was ending before it was scored")
