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
# "false" disables the threads of the tokenizers library, because there is already one process per core. Without this
# variable, the library warns about forks.
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
    process."""

    def __init__(self, work: Callable[[TaskT], ResultT], processes: int):
        context = mp.get_context("fork")
        started: list[mp.context.ForkProcess] = []
        ours: list[Connection] = []
        # None stands for a worker that ended.
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        with _quiet_forks():
            for _ in range(processes):
                mine, theirs = context.Pipe()
                ours.append(mine)
                process = context.Process(target=_answer_tasks, args=(work, theirs, list(ours)), daemon=True)
                process.start()
                started.append(process)
                theirs.close()
                self._idle.put(mine)
        # One thread per worker sends a task and waits for the result, so this process never waits for a full pipe.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="lockstep-encode")
        self._end = weakref.finalize(self, _end_workers, self._threads, started, ours)

    def submit(self, task: TaskT) -> Future[ResultT | None]:
        """Starts a task. The result is None if the worker failed: then the caller runs the task itself."""
        return self._threads.submit(_call, self._idle, task)

    def close(self) -> None:
        self._end()


def _call(idle: queue.SimpleQueue[Connection | None], task: TaskT) -> ResultT | None:
    connection = idle.get()
    try:
        if connection is None:
            return None
        connection.send(task)
        result: ResultT | None = connection.recv()
        return result
    except (EOFError, OSError):
        connection = None
        return None
    except Exception:  # noqa: BLE001 - the task cannot be pickled, so nothing was sent
        return None
    finally:
        idle.put(connection)


def _end_workers(
    threads: ThreadPoolExecutor, processes: Sequence[mp.context.ForkProcess], connections: Sequence[Connection]
) -> None:
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
