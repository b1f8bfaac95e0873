"""Runs tasks in forked worker processes. All ranks of a host share the CPU cores of the host.

Forked workers inherit the rows, the reader and the tokenizer. A fresh interpreter would need seconds for its imports.
Workers do not use a device. If a worker fails, the parent runs its remaining tasks and raises the error itself.

`in_processes` runs a list of tasks and waits for their results. `BackgroundWorkers` run tasks while the parent
continues.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from pathlib import Path
from typing import Generic, TypeVar

from lockstep.launch.supervisor import die_with_parent

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

MOST = 32
# How many workers are replaced if they end early. Rows that end every worker must not start processes forever.
REPLACED = 8
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# TOKENIZERS_PARALLELISM=false disables the threads of the tokenizers library, because there is already one process per
# core. If TOKENIZERS_PARALLELISM is not set, the tokenizers library warns about forks.
_THREADS = "TOKENIZERS_PARALLELISM"


def processes_here(tasks: int) -> int:
    """Returns the number of worker processes to use; 1 means no workers."""
    if not sys.platform.startswith("linux") or mp.current_process().daemon:
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
    return max(1, min(tasks, usable_cores() // max(1, ranks), MOST))


def spare_processes() -> int:
    """Returns the number of background workers of this rank; 0 means no workers. One core is left to the training."""
    return processes_here(MOST + 1) - 1


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use within the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # a quota of "max" (no limit) raises ValueError
    return cores


def in_processes(
    work: Callable[[TaskT], ResultT], tasks: Sequence[TaskT], processes: int
) -> Iterator[tuple[TaskT, ResultT]]:
    """Yields each task with its result, in the order in which the tasks are completed."""
    left = list(range(len(tasks)))
    if processes > 1:
        # `closing` ends the workers at once: since Python 3.12, closing a generator leaves an inner generator open
        # until it is freed.
        with contextlib.closing(_forked(work, tasks, processes)) as results:
            for number, result in results:
                left.remove(number)
                yield tasks[number], result
    for number in left:
        yield tasks[number], work(tasks[number])


def _forked(
    work: Callable[[TaskT], ResultT], tasks: Sequence[TaskT], processes: int
) -> Generator[tuple[int, ResultT], None, None]:
    context = mp.get_context("fork")
    started: list[mp.context.ForkProcess] = []
    ours: list[Connection] = []
    try:
        with _quiet_forks():
            for first in range(processes):
                reader, writer = context.Pipe(duplex=False)
                ours.append(reader)
                numbers = range(first, len(tasks), processes)
                process = context.Process(target=_serve, args=(work, tasks, numbers, writer, ours), daemon=True)
                process.start()
                started.append(process)
                writer.close()
        waiting = list(ours)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                try:
                    yield ready.recv()
                except (EOFError, OSError):
                    waiting.remove(ready)
    finally:
        for connection in ours:
            connection.close()
        for process in started:
            process.terminate()
            process.join()


@contextlib.contextmanager
def _quiet_forks() -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        with warnings.catch_warnings():
            # Newer Python versions warn about forks in a process with threads. The workers need no lock that a thread
            # may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


def _serve(
    work: Callable[[TaskT], ResultT],
    tasks: Sequence[TaskT],
    numbers: Sequence[int],
    connection: Connection,
    readers: Sequence[Connection],
) -> None:
    """Main function of a worker: sends every result to the parent. The worker ends when the parent closes the pipe."""
    _begin_worker(readers)
    with contextlib.suppress(Exception):
        for number in numbers:
            connection.send((number, work(tasks[number])))


def _begin_worker(inherited: Sequence[Connection]) -> None:
    """Sets up a forked worker. `inherited` are the parent's ends of pipes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    for connection in inherited:
        connection.close()
    gc.freeze()


class BackgroundWorkers(Generic[TaskT, ResultT]):
    """Forked workers that run tasks while this process continues. They end with `close`, with this object, or with this
    process. A worker that ends early is replaced, at most `REPLACED` times in all, and a warning says so."""

    def __init__(self, work: Callable[[TaskT], ResultT], processes: int):
        context = mp.get_context("fork")
        started: list[mp.context.ForkProcess] = []
        ours: list[Connection] = []
        with _quiet_forks():
            control, theirs = context.Pipe()
            ours.append(control)
            starter = context.Process(target=_start_workers, args=(work, theirs, [control]), daemon=True)
            starter.start()
            theirs.close()
            self._idle = _IdleWorkers(processes, _Starter(control, starter), ours)
            for _ in range(processes):
                mine, theirs = context.Pipe()
                ours.append(mine)
                process = context.Process(target=_answer_tasks, args=(work, theirs, list(ours)), daemon=True)
                process.start()
                started.append(process)
                theirs.close()
                self._idle.queue.put((mine, process))
        # One thread per worker sends a task and waits for the result, so this process never waits for a full pipe.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="lockstep-encode")
        self._end = weakref.finalize(self, _end_workers, self._idle, self._threads, [*started, starter], ours)

    def submit(self, task: TaskT) -> Future[ResultT | None]:
        """Starts a task. The result is None if the worker failed: then the caller runs the task itself."""
        return self._threads.submit(_call, self._idle, task)

    def close(self) -> None:
        self._end()


class _Starter:
    """A process that forks workers in place of those that ended. It was forked before models were loaded, and has no
    threads. A fork of the training process could copy locks that its threads hold, and a device context."""

    def __init__(self, control: Connection, process: mp.context.ForkProcess):
        self._control, self._process, self._left = control, process, REPLACED

    def start(self) -> Connection | None:
        """Returns the connection to a new worker, or None if there is none."""
        if not self._left or not self._process.is_alive():
            return None
        self._left -= 1
        mine, theirs = mp.get_context("fork").Pipe()
        try:
            with theirs:
                send_handle(self._control, theirs.fileno(), self._process.pid)
                return mine if self._control.recv() else None
        except (EOFError, OSError):
            mine.close()
            return None


def _start_workers(work: Callable[[TaskT], ResultT], control: Connection, inherited: Sequence[Connection]) -> None:
    """Main function of the starter. It ends when the parent closes the pipe, and its workers end with it."""
    _begin_worker(inherited)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes workers that have ended
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection = Connection(recv_handle(control))
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _answer_tasks(work, connection, [control])
                finally:
                    os._exit(0)
            connection.close()
            control.send(True)


class _IdleWorkers:
    """The workers without a task. Workers that have ended are not among them; None follows after the last one."""

    def __init__(self, count: int, starter: _Starter, connections: list[Connection]):
        self.queue: queue.SimpleQueue[tuple[Connection, mp.context.ForkProcess | None] | None] = queue.SimpleQueue()
        self._alive, self._lock = count, threading.Lock()
        self._starter, self._connections = starter, connections
        self.closed = False

    def lost(self, process: mp.context.ForkProcess | None) -> None:
        """Replaces a worker that has ended. If it cannot be replaced, its tasks go to the other workers or, after the
        last one, to the caller. `process` is None for a worker that is a replacement itself."""
        with self._lock:
            new = None if self.closed else self._starter.start()
            if new is None:
                self._alive -= 1
            else:
                self._connections.append(new)
            left = self._alive
        if new is not None:
            self.queue.put((new, None))
        elif not left:
            self.queue.put(None)
        if self.closed:
            return
        if process is not None:
            process.join(1.0)
        code = "" if process is None else f" (exit code {process.exitcode})"
        rest = f"the other {left} encode its rows" if left else "this process encodes the rows, which slows training"
        rest = "it was replaced" if new is not None else rest
        warnings.warn(f"a process that encodes rows ended{code}; {rest}", stacklevel=2)


def _call(idle: _IdleWorkers, task: TaskT) -> ResultT | None:
    worker = idle.queue.get()
    if worker is None:
        idle.queue.put(None)
        return None
    connection, process = worker
    try:
        connection.send(task)
        result: ResultT | None = connection.recv()
    except (EOFError, OSError):
        idle.lost(process)
        return None
    except Exception:  # noqa: BLE001 - the task cannot be pickled, so nothing was sent
        result = None
    idle.queue.put(worker)
    return result


def _end_workers(
    idle: _IdleWorkers,
    threads: ThreadPoolExecutor,
    processes: Sequence[mp.context.ForkProcess],
    connections: Sequence[Connection],
) -> None:
    idle.closed = True
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()  # the kernel kills the workers that the starter forked
    for process in processes:
        process.join()
    threads.shutdown()  # the workers have ended, so no thread waits for a result
    for connection in connections:
        connection.close()


def _answer_tasks(work: Callable[[TaskT], ResultT], connection: Connection, inherited: Sequence[Connection]) -> None:
    """Main function of a background worker. It ends when the parent closes the pipe."""
    _begin_worker(inherited)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                answer = ForkingPickler.dumps(work(task))
            except Exception:  # noqa: BLE001 - the parent runs the task itself and reports the error
                answer = ForkingPickler.dumps(None)
            connection.send_bytes(answer)
