"""The process between the run and the worker that calls a user's function: nothing that the function starts stays.

It forks the worker, adopts whatever loses its parent, keeps the last lines that are printed, and when the worker or the
run ends it kills all that is left. It ends the way the worker ended, so that the run can tell why.
"""

from __future__ import annotations

import ast
import importlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.parallel.orphans import adopt_orphans, die_with_parent, go_on_without_parent
from lockstep.processes.descendants import end_descendants
from lockstep.processes.output_tail import OutputTail

# What is printed is written to its file when there is a pause, and at times when there is none.
_IDLE, _SOMETIMES = 0.05, 1.0
_SELDOM = 5.0
_ENDING = {signal.SIGTERM, signal.SIGHUP}


def started(words: int) -> NoReturn:
    """`main` with the arguments that are written in the open file `words`."""
    with open(words, "rb") as file:
        main(*ast.literal_eval(file.read().decode()))


def main(
    connection: int, leash: int, run: int, serve: str, arguments: tuple[Any, ...], mark: str, output: str | None
) -> NoReturn:
    """The worker calls `serve` (`module:function`) with its `connection` and the arguments. `leash` is the reading end
    of a pipe: what comes there, a word or its end, is the end of all; so is the end of process `run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = serve.partition(":")
    work = getattr(importlib.import_module(module), name)
    adopt_orphans()
    go_on_without_parent()
    printed, printing = os.pipe()
    worker = _fork(lambda: work(connection, *arguments), [leash, printed], printing)
    os.close(connection)
    os.close(printing)
    tail = OutputTail(Path(output)) if output else None
    if tail is not None:
        tail.add(f"[process {worker} started at {time.strftime('%Y-%m-%d %H:%M:%S')}]\n".encode())
    status = _watch(worker, leash, run, printed, tail)
    # The group: where there is no /proc, it is all that can be found.
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    all_ended = end_descendants(os.getpid(), mark)
    ended = _reaped(worker, wait=all_ended)
    _read(printed, tail)
    if tail is not None:
        tail.write()
    _end_like(status if status is not None else ended)


def _fork(work: Callable[[], None], not_its: list[int], printing: int) -> int:
    """A child in a session of its own that does the work; it dies with this process."""
    warden = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != warden:
            return os._exit(status)
        for descriptor in not_its:
            os.close(descriptor)
        for descriptor in (1, 2):
            os.dup2(printing, descriptor)
        os.close(printing)
        # By lines: what was printed before a kill must be there.
        sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace")
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the child must not go on as a second warden
        traceback.print_exc()
    finally:
        os._exit(status)


def _watch(worker: int, leash: int, run: int, printed: int, tail: OutputTail | None) -> int | None:
    """Until the worker ends, which gives its status, or the leash does."""
    woken, waking = os.pipe()
    for descriptor in (waking, woken, printed):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_ENDING):
        signal.signal(number, lambda *_: None)
    watched = [leash, woken, printed]
    pause = _IDLE
    while True:
        # The worker may have ended before the handler was there.
        if (status := _reaped(worker)) is not None:
            return status
        waiting = tail is not None and tail.waiting
        ready, _, _ = select.select(watched, [], [], pause if waiting else _SELDOM)
        if leash in ready or (woken in ready and _ENDING & set(os.read(woken, 2**16))):
            return None
        if os.getppid() != run:
            return None  # somebody that the run has forked holds the leash
        if printed in ready and _read(printed, tail):
            watched.remove(printed)
        if tail is not None and tail.waiting:
            if printed not in ready or time.monotonic() - tail.written_at > _SOMETIMES:
                tail.write()
            # Not written: its folder is not there yet.
            pause = _SOMETIMES if tail.waiting and printed not in ready else _IDLE


def _reaped(worker: int, *, wait: bool = False) -> int | None:
    """Take note of all children that have ended, or wait until all have; the worker's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            if child == 0:
                break
            if child == worker:
                found = status
    return found


def _read(printed: int, tail: OutputTail | None) -> bool:
    """Take what is there to read, up to a limit; True where nothing can come any more."""
    with suppress(BlockingIOError):
        for _ in range(64):
            piece = os.read(printed, 2**16)
            if not piece:
                return True
            if tail is not None:
                tail.add(piece)
    return False


def _end_like(status: int | None) -> NoReturn:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else 1)
