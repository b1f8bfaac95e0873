"""The supervisor process of a worker that runs user code. The supervisor ends the worker when the run ends."""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch.containers import MARK, remove_noted_containers
from lockstep.run.files import write_private, written_aside

# Linux system calls that say what happens to a process when its parent ends. On systems other than Linux these
# functions do nothing.

# Constants of linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, instead of init (subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_without_parent() -> None:
    """Makes the kernel resume this process (SIGCONT) when its parent thread ends. A stopped supervisor could not clean
    up."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# Functions that set up a worker process before it runs user code.


def worker_socket(descriptor: int) -> socket.socket:
    """Returns the socket that connects the worker to the run. Child processes of the user function do not inherit the
    socket. The worker ignores Ctrl-C after this call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def exit_if_forked(worker: int) -> None:
    """Exits if this process is not the worker: the user function may fork, and the fork may return from the function.
    `worker` is the PID of the worker process."""
    if os.getpid() != worker:
        os._exit(0)


def limit_memory(memory_bytes: int) -> None:
    """Limits the address space of this process to its current size plus `memory_bytes`.

    Libraries reserve more address space than the memory that they use, so an absolute limit would make imports fail. On
    systems without /proc no limit is set.
    """
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


# Finds the process tree of a worker, including processes that left its group, session or parent. Two methods are
# combined: parent PIDs (`adopt_orphans` makes the supervisor the parent of orphans), and the environment variable MARK,
# which child processes inherit. All descendants are found, except one that clears its environment and whose subreaper
# was killed. Requires /proc.

# Passed instead of the PID of a process that has ended, because the system may give that PID to another process.
NOBODY = -1
_PROC = Path("/proc")
# How often, and at what interval, `kill_tree` checks that killed processes have ended. A process that hangs in the
# kernel may never end.
_PASSES, _PAUSE = 500, 0.01


def kill_tree(root: int, mark: str) -> bool:
    """Kills all descendants of `root` and all processes whose environment has MARK=`mark`, until none is left. Returns
    False if some of these processes do not end."""
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
    """Returns whether `root` or a descendant is suspended by a signal such as SIGSTOP."""
    for pid in (root, *descendants(root, mark)):
        with suppress(OSError):  # the process has ended
            if _parent_and_state((_PROC / str(pid) / "stat").read_bytes())[1] in (b"T", b"t"):
                return True
    return False


def descendants(root: int, mark: str) -> list[int]:
    """Returns the PIDs of the live descendants of `root` and of all processes whose environment has MARK=`mark`. `root`
    and this process are excluded."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    ended: set[int] = set()
    trace = f"{MARK}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # the process has ended, or belongs to another user
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
    """Returns the parent PID and the state of a process from the text of /proc/PID/stat (fields 4 and 3). Field 2 of
    that file, the program name in parentheses, may contain any character."""
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0]


# Maximum size of the output file of a worker. In memory the output may grow to twice this size before its start is
# dropped.
KEPT_BYTES = 64 * 2**10
_DROPPED = b"[earlier lines were dropped]\n"


class OutputTail:
    """Writes the last lines that a process printed to a file of bounded size. New lines are appended to an existing
    file. Nothing is written until the run has created the run folder."""

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
        """Updates the output file. After a write error the next call tries again."""
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
        """Drops the start of the output in memory. The output that is kept begins at the start of a line if
        possible."""
        kept = self._kept[len(_DROPPED) - KEPT_BYTES :]
        line_start = kept.find(b"\n") + 1
        self._kept = bytearray(_DROPPED) + (kept[line_start:] if line_start < len(kept) else kept)


# The supervisor forks the worker, adopts orphans, keeps the last lines of output, and kills all descendants when the
# worker or the run ends. The supervisor exits with the worker's status, so that the run can report why the worker
# ended.

# The worker's output is written to the file when the worker prints nothing for `_IDLE` seconds. While the worker
# prints, its output is written every `_SOMETIMES` seconds.
_IDLE, _SOMETIMES = 0.05, 1.0
_SELDOM = 5.0
_ENDING = {signal.SIGTERM, signal.SIGHUP}


def started(arguments_fd: int) -> NoReturn:
    """Calls `main` with the arguments that are stored in this open file."""
    with open(arguments_fd, "rb") as file:
        main(*ast.literal_eval(file.read().decode()))


def main(
    connection: int, parent_pipe: int, run: int, serve: str, arguments: tuple[Any, ...], mark: str, output: str | None
) -> NoReturn:
    """Runs the supervisor. The worker calls `serve` (`module:function`) with its `connection` and the arguments.
    `parent_pipe` is the read end of a pipe from the run. Data or end-of-file in `parent_pipe` ends the worker. The
    worker also ends if the process with PID `run` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = serve.partition(":")
    work = getattr(importlib.import_module(module), name)
    adopt_orphans()
    wake_without_parent()
    printed, printing = os.pipe()
    worker = _fork(lambda: work(connection, *arguments), [parent_pipe, printed], printing)
    os.close(connection)
    os.close(printing)
    tail = OutputTail(Path(output)) if output else None
    if tail is not None:
        tail.add(f"[process {worker} started at {time.strftime('%Y-%m-%d %H:%M:%S')}]\n".encode())
    status = _watch(worker, parent_pipe, run, printed, tail)
    # On systems without /proc only the worker's process group can be found and killed.
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    all_ended = kill_tree(os.getpid(), mark)
    remove_noted_containers(mark)
    ended = _reaped(worker, wait=all_ended)
    _read(printed, tail)
    if tail is not None:
        tail.write()
    _end_like(status if status is not None else ended)


def _fork(work: Callable[[], None], not_its: list[int], printing: int) -> int:
    """Forks a child process that calls `work` in a new session. The child is killed when this process ends. Returns the
    PID of the child."""
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
        # Output is line-buffered, so that output before a kill is not lost.
        sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace")
        sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace")
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the child must not continue as a second supervisor
        traceback.print_exc()
    finally:
        os._exit(status)


def _watch(worker: int, parent_pipe: int, run: int, printed: int, tail: OutputTail | None) -> int | None:
    """Waits until the worker ends, and returns its status. Returns None if the run ends first or asks the worker to
    end."""
    woken, waking = os.pipe()
    for descriptor in (waking, woken, printed):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_ENDING):
        signal.signal(number, lambda *_: None)
    watched = [parent_pipe, woken, printed]
    pause = _IDLE
    while True:
        # The worker may have ended before the SIGCHLD handler was installed.
        if (status := _reaped(worker)) is not None:
            return status
        waiting = tail is not None and tail.waiting
        ready, _, _ = select.select(watched, [], [], pause if waiting else _SELDOM)
        if parent_pipe in ready or (woken in ready and _ENDING & set(os.read(woken, 2**16))):
            return None
        if os.getppid() != run:
            return None  # the run has ended, but one of its forked children keeps the parent pipe open
        if printed in ready and _read(printed, tail):
            watched.remove(printed)
        if tail is not None and tail.waiting:
            if printed not in ready or time.monotonic() - tail.written_at > _SOMETIMES:
                tail.write()
            # Output that is still waiting could not be written, because the run folder does not exist yet.
            pause = _SOMETIMES if tail.waiting and printed not in ready else _IDLE


def _reaped(worker: int, *, wait: bool = False) -> int | None:
    """Reaps child processes that have ended. With `wait`, waits until all child processes have ended. Returns the
    worker's status if the worker was reaped."""
    worker_status = None
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            if child == 0:
                break
            if child == worker:
                worker_status = status
    return worker_status


def _read(printed: int, tail: OutputTail | None) -> bool:
    """Reads the output that the worker has printed, up to a limit. Returns True at end-of-file."""
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


# Environment variables that describe the rank of this process. A command that the run starts must not inherit these
# variables.
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_")


def run_command(connection: int, command: list[str]) -> NoReturn:
    """Replaces this supervised process with a command, such as an inference server. The environment variables of the
    command, including the API key, are read from the connection as one line of JSON."""
    with os.fdopen(connection, "rb") as pipe:
        environment: dict[str, str] = json.loads(pipe.readline())
    os.execvpe(command[0], command, {**_without_rank(os.environ), **environment})


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _RANK_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }
