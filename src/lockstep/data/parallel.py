"""Rows encoded in processes beside this one: as many as there are cores for, over all ranks of the machine.

They are forked, not started anew: rows, reader and tokenizer are there already, while a fresh interpreter takes seconds
to import what tokenises. Nothing of a device is touched in them. A process that ends early leaves its parts to the one
that asked, which meets the same error itself, with its own traceback.
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

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

MOST = 32
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Of the tokenizer library: processes are enough, each of them would start a thread for every core. It also warns of a
# fork where nothing is said.
_THREADS = "TOKENIZERS_PARALLELISM"


def processes_here(tasks: int) -> int:
    """How many processes are worth starting; 1: none but this one."""
    if not sys.platform.startswith("linux") or mp.current_process().daemon:
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
    return max(1, min(tasks, usable_cores() // max(1, ranks), MOST))


def usable_cores() -> int:
    """Those that this process may run on, within the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def in_processes(
    work: Callable[[TaskT], ResultT], tasks: Sequence[TaskT], processes: int
) -> Iterator[tuple[TaskT, ResultT]]:
    """Each task with its result, in whatever order they come."""
    left = list(range(len(tasks)))
    if processes > 1:
        # Closed by name: from Python 3.12 on a generator that is closed keeps the one inside of it until it is freed.
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
                own, theirs = context.Pipe(duplex=False)
                ours.append(own)
                numbers = range(first, len(tasks), processes)
                process = context.Process(target=_serve, args=(work, tasks, numbers, theirs, ours), daemon=True)
                process.start()
                started.append(process)
                theirs.close()
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
            # Newer Pythons warn of every fork beside threads: no lock that a thread may hold is needed there.
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
    """In the process: every result is sent; where nobody reads any more, writing ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to all: the one that asked ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for reader in readers:
        reader.close()
    gc.freeze()
    with contextlib.suppress(Exception):
        for number in numbers:
            connection.send((number, work(tasks[number])))
