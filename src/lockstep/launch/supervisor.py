"""The supervisor process between a run and a worker that runs user code; the worker cannot outlive or block the run."""

from __future__ import annotations

import ast
import ctypes
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

from lockstep.run.files import write_private, written_aside

# What becomes of a process whose parent ends, as Linux lets one say it; elsewhere nothing is said.

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, not of the system's first."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Get this process killed when the thread that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on_without_parent() -> None:
    """Get this process woken when the thread that made it ends: one that was stopped could not do what is to be done
    then."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# Every process that came from another one, also those that left its group, its session or its parent.
#
# Two traces are followed, and each catches what the other loses: the parents, which `adopt_orphans` keeps within
# reach of one process, and a variable of the environment, which stays with a child whose parents are gone. Only a
# process that drops its environment and whose adoptive parent was killed leaves neither. Without /proc none can be
# found.

MARK = "LOCKSTEP_FUNCTION_PROCESS"
# In place of a process that is gone, whose number may be another's now.
NOBODY = -1
_PROC = Path("/proc")
# A killed process may take a moment to go; one that hangs in the kernel may take for ever.
_PASSES, _PAUSE = 500, 0.01


def kill_tree(root: int, mark: str) -> bool:
    """Kill all that came from process `root`, until there are none; False where some do not end."""
    for _ in range(_PASSES):
        living = descendants(root, mark)
        if not living:
            return True
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    return False


def any_stopped(root: int, mark: str) -> bool:
    """Whether `root` or what came from it was stopped by a signal and waits to go on."""
    for pid in (root, *descendants(root, mark)):
        with suppress(OSError):  # it has ended meanwhile
            if _parent_and_state((_PROC / str(pid) / "stat").read_bytes())[1] in (b"T", b"t"):
                return True
    return False


def descendants(root: int, mark: str) -> list[int]:
    """Living processes below `root`, or with its mark in their environment; not `root` itself, nor this process."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    ended: set[int] = set()
    trace = f"{MARK}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # it ended while it was looked at, or it is somebody else's
            parents[pid], state = _parent_and_state((folder / "stat").read_bytes())
            if state in (b"Z", b"X"):
                ended.add(pid)
            elif trace in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    below = young = {root}
    while young:
        young = {pid for pid, parent in parents.items() if parent in young} - below
        below = below | young
    return sorted((marked | below) - ended - {root, os.getpid()})


def _parent_and_state(stat: bytes) -> tuple[int, bytes]:
    """Fields 4 and 3 of /proc/PID/stat. The second, the name, stands in brackets and may hold anything."""
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0]


# The last lines that a process printed, kept in a file that does not grow.

# In the file. As much again may wait in memory before it is cut.
KEPT_BYTES = 64 * 2**10
_DROPPED = b"[earlier lines were dropped]\n"


class OutputTail:
    """Goes on with what the file holds. Nothing is written before the folder above the file's own is there: it is the
    run's to make."""

    def __init__(self, file: Path):
        self._file = file
        self._kept = bytearray()
        with suppress(OSError):
            self._kept += file.read_bytes()
        self.waiting = False
        self.written_at = 0.0

    def add(self, piece: bytes) -> None:
        self._kept += piece
        self.waiting = True
        if len(self._kept) > 2 * KEPT_BYTES:
            self._cut()

    def write(self) -> None:
        """Bring the file up to date. A disk that takes nothing now is tried again at the next time."""
        self.written_at = time.monotonic()
        if not self._file.parent.parent.is_dir():
            return
        if len(self._kept) > KEPT_BYTES:
            self._cut()
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            with written_aside(self._file, durable=False) as aside:
                write_private(aside, self._kept)
            self.waiting = False

    def _cut(self) -> None:
        """Keep the end, from the beginning of a line where there is one."""
        kept = self._kept[len(_DROPPED) - KEPT_BYTES :]
        line = kept.find(b"\n") + 1
        self._kept = bytearray(_DROPPED) + (kept[line:] if line < len(kept) else kept)


# The process between the run and the worker that calls a user's function: nothing that the function starts stays.
#
# It forks the worker, adopts whatever loses its parent, keeps the last lines that are printed, and when the worker or
# the run ends it kills all that is left. It ends the way the worker ended, so that the run can tell why.

# What is printed is written to its file when there is a pause, and at times when there is none.
_IDLE, _SOMETIMES = 0.05, 1.0
_SELDOM = 5.0
_ENDING = {signal.SIGTERM, signal.SIGHUP}


def started(words: int) -> NoReturn:
    """`main` with the arguments that are written in the open file `words`."""
    with open(words, "rb") as file:
        main(*ast.literal_eval(file.read().decode()))


def main(
    connection: int, parent_pipe: int, run: int, serve: str, arguments: tuple[Any, ...], mark: str, output: str | None
) -> NoReturn:
    """The worker calls `serve` (`module:function`) with its `connection` and the arguments. `parent_pipe` is the reading end
    of a pipe: what comes there, a word or its end, is the end of all; so is the end of process `run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = serve.partition(":")
    work = getattr(importlib.import_module(module), name)
    adopt_orphans()
    go_on_without_parent()
    printed, printing = os.pipe()
    worker = _fork(lambda: work(connection, *arguments), [parent_pipe, printed], printing)
    os.close(connection)
    os.close(printing)
    tail = OutputTail(Path(output)) if output else None
    if tail is not None:
        tail.add(f"[process {worker} started at {time.strftime('%Y-%m-%d %H:%M:%S')}]\n".encode())
    status = _watch(worker, parent_pipe, run, printed, tail)
    # The group: where there is no /proc, it is all that can be found.
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    all_ended = kill_tree(os.getpid(), mark)
    ended = _reaped(worker, wait=all_ended)
    _read(printed, tail)
    if tail is not None:
        tail.write()
    _end_like(status if status is not None else ended)


def _fork(work: Callable[[], None], not_its: list[int], printing: int) -> int:
    """A child in a session of its own that does the work; it dies with this process."""
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != supervisor:
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
    except BaseException:  # noqa: BLE001 - the child must not go on as a second supervisor
        traceback.print_exc()
    finally:
        os._exit(status)


def _watch(worker: int, parent_pipe: int, run: int, printed: int, tail: OutputTail | None) -> int | None:
    """Until the worker ends, which gives its status, or the parent_pipe does."""
    woken, waking = os.pipe()
    for descriptor in (waking, woken, printed):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_ENDING):
        signal.signal(number, lambda *_: None)
    watched = [parent_pipe, woken, printed]
    pause = _IDLE
    while True:
        # The worker may have ended before the handler was there.
        if (status := _reaped(worker)) is not None:
            return status
        waiting = tail is not None and tail.waiting
        ready, _, _ = select.select(watched, [], [], pause if waiting else _SELDOM)
        if parent_pipe in ready or (woken in ready and _ENDING & set(os.read(woken, 2**16))):
            return None
        if os.getppid() != run:
            return None  # somebody that the run has forked holds the parent_pipe
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
