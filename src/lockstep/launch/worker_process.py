"""A worker process that runs a user's function: started, limited, connected and killed with its children."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launch.supervisor import MARK, NOBODY, any_stopped, kill_tree


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space to the current mapping plus `memory_bytes`.

    Libraries reserve far more addresses than they use memory; limiting those would prevent imports. No limit without
    /proc.
    """
    told_by = Path("/proc/self/statm")
    if not told_by.exists():
        return
    mapped = int(told_by.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


# Time for a supervisor to kill everything that the function started.
ENDING_SECONDS = 10.0

# The arguments after it are for people who read the process list.
_START = (
    "import sys; sys.path[:] = {path!r}; from lockstep.launch.supervisor import started; started({fd})  # {shown!r}"
)


class FunctionProcess:
    """One worker process and the connection to it. Any thread may kill it."""

    def __init__(self, serve: str, arguments: tuple[Any, ...], log: Path | None = None):
        """Runs `serve` (`module:function`) with a connection and the arguments, which are plain values.

        The last lines of its output are kept in `log`; without one they are discarded.
        """
        self._mark = secrets.token_hex(16)
        self._pipe_lock, self._kill_lock = threading.Lock(), threading.Lock()
        self._gone = False
        self.connection, childs = socket.socketpair()
        end, parent_pipe = os.pipe()
        self._parent_pipe: int | None = parent_pipe
        output = None if log is None else str(log.absolute())
        # Arguments may contain secrets, and command lines are public: that contains only the user's file and the log.
        file = arguments[0] if arguments and isinstance(arguments[0], str) else None
        shown = " ".join(filter(None, [serve, file, output]))
        arguments_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, with the pipe ends
        arguments_file.write(repr((childs.fileno(), end, os.getpid(), serve, arguments, self._mark, output)).encode())
        arguments_file.seek(0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, fd=arguments_file.fileno(), shown=shown)],
                pass_fds=[childs.fileno(), end, arguments_file.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A new session: the terminal's Ctrl-C does not reach it.
                start_new_session=True,
                # The order of a set must be the same in every process.
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
        """Whether it was killed or stopped from outside, e.g. by the OOM killer: not an error of the function."""
        ended = self._process.poll()
        return ended == -signal.SIGKILL if ended is not None else any_stopped(self._process.pid, self._mark)

    def release(self) -> None:
        """Request the end without waiting for it."""
        with self._pipe_lock:
            if self._parent_pipe is not None:
                # Also write a byte: a forked child of the run may keep the pipe open.
                with suppress(BrokenPipeError):
                    os.write(self._parent_pipe, b".")
                os.close(self._parent_pipe)
                self._parent_pipe = None

    def kill(self) -> None:
        """Kill the process and everything it started. Safe to call twice, and from another thread."""
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
            # Once more from here, by the mark: the function may have killed the supervisor.
            kill_tree(NOBODY, self._mark)
            self._gone = True

    def ended(self) -> str:
        """How a process ended that closed its connection."""
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
