"""The host processes of environments, as the run sees them: calls, answers, time limits and replaced processes."""

from __future__ import annotations

import json
import pickle
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.environments.host_worker import HEADER, LOADING, LONGEST_LINE
from lockstep.errors import Refusal
from lockstep.functions import LOAD_SECONDS
from lockstep.launch.process_pool import SupervisedProcess


@dataclass(frozen=True)
class HostSetup:
    """What the host processes run: `environment` is `path/to/file.py:Class` or `package.module:Class`. `key` and
    `shown` are the recipe key and its value, for messages."""

    environment: str
    arguments: Mapping[str, Any]
    key: str
    shown: str
    workers: int
    threads: int
    """Maximum number of synchronous methods that run at once in a host."""
    output: Path | None = None
    """OUTPUT-N.log keeps the last output lines of host N; with None the output is dropped."""
    more_seconds: float = 0.0
    """Seconds that a call may take besides `rollout.step_timeout`."""
    serve: str = "lockstep.environments.host_worker:serve"
    """The function of the host processes."""

    @property
    def where(self) -> str:
        return f"{self.key} {self.shown}"

    def log(self, index: int) -> Path | None:
        return None if self.output is None else self.output.with_name(f"{self.output.name}-{index}.log")


@dataclass(frozen=True)
class HostAnswer:
    """The answer to a call: its fields, or the reason why there is none. `code` is the error code of the reason."""

    call: int
    fields: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    code: str = "function-raised"
    remedy: str = ""
    """The remedy of a refusal by lockstep's own code."""
    time: float = field(default_factory=time.monotonic, compare=False)
    """The time at which the answer arrived."""


class Host(SupervisedProcess):
    """A host process. Two threads read its answers and write the calls, so that a host that hangs never blocks the
    run."""

    def __init__(self, index: int, setup: HostSetup, inbox: queue.SimpleQueue[Any]):
        arguments = (setup.environment, dict(setup.arguments), setup.threads)
        super().__init__(setup.serve, arguments, setup.log(index))
        self.index, self._inbox = index, inbox
        self.loaded: queue.SimpleQueue[HostAnswer] = queue.SimpleQueue()
        self.is_loaded = self.stuck = self.dead = False
        self.trajectories: set[int] = set()
        self.cancelling = 0
        """The number of calls that are being cancelled. Any of them may turn out to be stuck."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"environment-host-{index}", daemon=True).start()

    def send(self, call: int, fields: dict[str, Any]) -> None:
        """Queues a call. Raises ValueError if the row cannot be pickled."""
        try:
            pickled = pickle.dumps(fields)
        except Exception as error:
            raise ValueError(f"the row cannot be sent to the process of the environment: {error}") from error
        self._outbox.put(HEADER.pack(call, len(pickled)) + pickled)

    def end(self) -> None:
        """Kills the process and closes the connection. The threads of the host end."""
        self.dead = True
        self._outbox.put(None)
        self.kill()
        self.connection.close()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.connection.sendall(message)
            except OSError:
                return  # the process has ended; the reading thread reports it

    def _read(self) -> None:
        partial = bytearray()
        why = ""
        while not why:
            try:
                piece = self.connection.recv(2**16)
            except OSError:
                piece = b""
            if not piece:
                break
            first, *more = piece.split(b"\n")
            partial += first
            lines = [bytes(partial), *more[:-1]] if more else []
            if more:
                partial = bytearray(more[-1])
            try:
                for line in lines:
                    self._deliver(_answer(line))
            except ValueError:
                why = "wrote something other than its answer to the connection of its process"
            if len(partial) > LONGEST_LINE:
                why = f"wrote an answer of over {LONGEST_LINE:,} bytes"
        if not self.dead:
            self._ended(why or f"its process {self.ended()}")

    def _ended(self, why: str) -> None:
        self.kill()
        self.loaded.put(HostAnswer(LOADING, why=why, code="process-lost"))
        self._inbox.put((self, HostAnswer(LOADING, why=why, code="process-lost")))

    def _deliver(self, answer: HostAnswer) -> None:
        if answer.call == LOADING:
            self.is_loaded = True
            self.loaded.put(answer)
        self._inbox.put((self, answer))


def _answer(line: bytes) -> HostAnswer:
    try:
        fields = json.loads(line)
        call = fields.pop("call")
        if type(call) is not int:
            raise ValueError
        if "unusable" in fields:
            why, remedy, code = (str(word) for word in fields["unusable"])
            return HostAnswer(call, fields, why, code, remedy)
        code, remedy = str(fields.get("code", "function-raised")), str(fields.get("remedy", ""))
        return HostAnswer(call, fields, str(fields.get("raised", "")), code, remedy)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no answer: {line[:80]!r}") from error


class EnvironmentHosts:
    """The host processes of a run. `inbox` gets a pair (host, `HostAnswer`) for every answer. An answer to the call
    `LOADING` says that the host has loaded the environment or, with a reason, that it has ended."""

    def __init__(self, setup: HostSetup):
        """Starts the first host and waits until it has loaded the environment. Raises `Refusal` if it cannot be
        loaded."""
        self.setup = setup
        self.inbox: queue.SimpleQueue[tuple[Host, HostAnswer]] = queue.SimpleQueue()
        self.hosts: list[Host] = []
        self._calls = self._started = 0
        first = self._start()
        try:
            loaded = first.loaded.get(timeout=LOAD_SECONDS)
        except queue.Empty:
            loaded = HostAnswer(LOADING, why=f"could not be loaded in {LOAD_SECONDS:g} s", code="import-failed")
        if loaded.why:
            self.close()
            raise Refusal.at(setup.where, loaded.why, loaded.remedy or "fix the environment", code=loaded.code)
        self.scores_groups = bool(loaded.fields.get("group"))
        """Whether the class has `score_group`."""
        self.writes_text = bool(loaded.fields.get("text"))
        """Whether the environment writes raw text, and gets the prompt as text."""

    def _start(self) -> Host:
        try:
            host = Host(self._started % self.setup.workers, self.setup, self.inbox)
        except OSError as error:
            raise Refusal.at(
                self.setup.where,
                f"its process cannot be started: {error}",
                "free memory, processes or files of this machine; the last checkpoint is untouched",
                code="process-lost",
            ) from error
        self._started += 1
        self.hosts.append(host)
        return host

    def place(self, trajectory: int) -> Host | None:
        """Returns the host for a new trajectory: the one with the fewest trajectories. Starts a host if fewer hosts
        than `workers` can take trajectories. Returns None if the trajectory must wait: until it is known whether a
        call of a host is stuck, or until one of `workers` stuck hosts has ended."""
        for host in [host for host in self.hosts if not host.alive and not host.trajectories]:
            self.remove(host)
        usable = [host for host in self.hosts if host.alive and not host.stuck and not host.cancelling]
        least = min(usable, key=lambda host: len(host.trajectories), default=None)
        working = sum(host.alive and not host.stuck for host in self.hosts)
        if (least is None or least.trajectories) and working < self.setup.workers:
            least = self._start() if len(self.hosts) < 2 * self.setup.workers else least
        if least is not None:
            least.trajectories.add(trajectory)
        return least

    def place_now(self, trajectory: int) -> Host:
        """Returns the host for a call that cannot wait."""
        found = self.place(trajectory) or self._start()
        found.trajectories.add(trajectory)
        return found

    def send(self, host: Host, **fields: Any) -> int:
        """Sends a call to a host. Returns the number of the call."""
        self._calls += 1
        host.send(self._calls, fields)
        return self._calls

    def release(self, host: Host, trajectory: int) -> None:
        """Removes a finished trajectory from its host. A host with a call that cannot be cancelled is killed after its
        last trajectory."""
        host.trajectories.discard(trajectory)
        if host.stuck and not host.trajectories:
            self.remove(host)

    def remove(self, host: Host) -> None:
        """Kills a host."""
        host.end()
        if host in self.hosts:
            self.hosts.remove(host)

    def close(self) -> None:
        """Kills all hosts."""
        for host in self.hosts:
            host.release()
        for host in list(self.hosts):
            self.remove(host)
