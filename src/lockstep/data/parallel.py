"""Runs tasks in forked worker processes. All ranks of a host share the CPU cores of the host.

Forked workers inherit the rows, the reader and the tokenizer. A fresh interpreter would need seconds for its imports.
Workers do not use a device. If a worker fails, the parent runs its remaining tasks and raises the error itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    for reader in readers:
        reader.close()
    gc.freeze()
    with contextlib.suppress(Exception):
        for number in numbers:
            connection.send((number, work(tasks[number])))
