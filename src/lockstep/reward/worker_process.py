"""A worker as the run sees it: started, asked, killed. What it sends is read with limits of time and size, as text."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.functions import LOAD_SECONDS
from lockstep.launch.worker_process import FunctionProcess
from lockstep.reward.answers import LOADING, LONGEST_LINE, Given, Loaded, Raised, Reply, Unusable, read_line
from lockstep.reward.worker import HEADER


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
        self._calls = LOADING
        self._unread = b""
        self.disturbed = False
        """Whether the last answer is missing because somebody has killed or stopped the process."""
        arguments = (target.path, target.name, int(target.memory_limit_gb * 2**30), target.extra)
        self._process = FunctionProcess("lockstep.reward.worker:serve", arguments, target.log(index))
        self._connection = self._process.connection

    @property
    def alive(self) -> bool:
        return self._process.alive

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
        self._process.release()

    def kill(self) -> None:
        """End the process and everything it started. Safe to call twice, and from another thread."""
        self._process.kill()

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
            self.disturbed = self._process.disturbed
            return Raised(f"gave nothing in {seconds:g} s ({limit})", spent=True)
        except (EOFError, OSError):
            how = self._process.ended()
            self.disturbed = self._process.disturbed
            return Raised(f"its process {how} before it gave a score", spent=True)
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
