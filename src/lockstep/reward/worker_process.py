"""A worker as the run sees it: started, asked, killed. What it sends is read with limits of time and size, as text."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.reward.answers import LOADING, LONGEST_LINE, Given, Loaded, Raised, Reply, Unusable, read_line
from lockstep.reward.descendants import MARK, NOBODY, end_descendants
from lockstep.reward.worker import HEADER

# Importing a user's file may import torch from a slow disk.
LOAD_SECONDS = 120.0
# For a warden to end all that the function started.
ENDING_SECONDS = 10.0

_START = "import sys; sys.path[:] = {path!r}; from lockstep.reward.warden import main; main{arguments!r}"


@dataclass(frozen=True)
class Target:
    """The function to call and what a call may take. `key` is the setting that named it."""

    path: str
    name: str
    time_limit: float
    memory_limit_gb: float
    output: Path | None = None
    """The last lines that worker N prints are kept in OUTPUT-N.log; without this they are thrown away."""
    key: str = "reward.function"
    extra: tuple[str, ...] = ()
    """Names of arguments that a call has besides."""

    def log(self, index: int) -> Path | None:
        return None if self.output is None else self.output.with_name(f"{self.output.name}-{index}.log")


class WorkerProcess:
    """One process and the connection to it. One thread asks; any may kill."""

    def __init__(self, target: Target, index: int):
        self._target = target
        self._mark = secrets.token_hex(16)
        self._calls = LOADING
        self._unread = b""
        self._leashing, self._killing = threading.Lock(), threading.Lock()
        self._gone = False
        self._connection, childs = socket.socketpair()
        log = target.log(index)
        end, leash = os.pipe()
        self._leash: int | None = leash
        memory = int(target.memory_limit_gb * 2**30)
        output = None if log is None else str(log.absolute())
        arguments = (
            childs.fileno(),
            end,
            os.getpid(),
            target.path,
            target.name,
            memory,
            self._mark,
            output,
            target.extra,
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, arguments=arguments)],
                pass_fds=[childs.fileno(), end],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Out of reach of the terminal's Ctrl-C.
                start_new_session=True,
                # The order of a set must not depend on which process looks at it.
                env={"PYTHONHASHSEED": "0", **os.environ, MARK: self._mark},
            )
        except BaseException:
            os.close(leash)
            self._connection.close()
            raise
        finally:
            os.close(end)
            childs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

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
        return reply if isinstance(reply, Given | Raised) else self._garbage()

    def release(self) -> None:
        """Ask for the end, without waiting for it."""
        with self._leashing:
            if self._leash is not None:
                # A word besides: a process that the run has forked may hold the pipe open.
                with suppress(BrokenPipeError):
                    os.write(self._leash, b".")
                os.close(self._leash)
                self._leash = None

    def kill(self) -> None:
        """End the process and everything it started. Safe to call twice, and from another thread."""
        self.release()
        with self._killing:
            if self._gone:
                return
            try:
                self._process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                end_descendants(self._process.pid, self._mark)
                self._process.kill()
                self._process.wait()
            # Once more from here, by the mark: the function may have killed the warden.
            end_descendants(NOBODY, self._mark)
            self._gone = True

    def disconnect(self) -> None:
        """Give back the connection of a process that is gone, when nobody asks it any more."""
        self._connection.close()

    def _reply(self, seconds: float, limit: str, call: bytes = b"") -> Reply:
        """The answer to the call that is under way. Answers to earlier ones come from copies of the process."""
        deadline = time.monotonic() + seconds
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(call)
            while True:
                number, reply = read_line(self._line(deadline))
                if number == self._calls:
                    return reply
                if number > self._calls:
                    return self._garbage()
        except TimeoutError:
            return Raised(f"gave nothing in {seconds:g} s ({limit})", spent=True)
        except (EOFError, OSError):
            return self._ended()
        except ValueError:
            return self._garbage()

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

    def _garbage(self) -> Raised:
        return Raised("wrote something else than its answer to the connection of its process", spent=True)

    def _ended(self) -> Raised:
        """Why the process is gone."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.kill()
        status = self._process.returncode
        how = f"was killed ({_signal(-status)})" if status < 0 else f"ended with status {status}"
        return Raised(f"its process {how} before it gave a score", spent=True)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those between SIGRTMIN and SIGRTMAX have no name
        return f"signal {number}"
