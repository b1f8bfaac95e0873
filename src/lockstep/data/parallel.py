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
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Generic, TypeVar

from lockstep.launch.supervisor import die_with_parent

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

MOST = 32
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
    process. A worker that ends early gets no more tasks, and a warning says so."""

    def __init__(self, work: Callable[[TaskT], ResultT], processes: int):
        context = mp.get_context("fork")
        started: list[mp.context.ForkProcess] = []
        ours: list[Connection] = []
        self._idle = _IdleWorkers(processes)
        with _quiet_forks():
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
        self._end = weakref.finalize(self, _end_workers, self._idle, self._threads, started, ours)

    def submit(self, task: TaskT) -> Future[ResultT | None]:
        """Starts a task. The result is None if the worker failed: then the caller runs the task itself."""
        return self._threads.submit(_call, self._idle, task)

    def close(self) -> None:
        self._end()


class _IdleWorkers:
    """The workers without a task. Workers that have ended are not among them; None follows after the last one."""

    def __init__(self, count: int):
        self.queue: queue.SimpleQueue[tuple[Connection, mp.context.ForkProcess] | None] = queue.SimpleQueue()
        self._alive, self._lock = count, threading.Lock()
        self.closed = False

    def lost(self, process: mp.context.ForkProcess) -> None:
        """Counts a worker that has ended. Its tasks go to the other workers or, after the last one, to the caller."""
        with self._lock:
            self._alive -= 1
            left = self._alive
        if not left:
            self.queue.put(None)
        if self.closed:
            return
        process.join(1.0)
        rest = f"the other {left} encode its rows" if left else "this process encodes the rows, which slows training"
        warnings.warn(f"a process that encodes rows ended (exit code {process.exitcode}); {rest}", stacklevel=2)


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
        process.terminate()
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
