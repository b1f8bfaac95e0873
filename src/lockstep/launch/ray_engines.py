"""Serving engines as Ray actors (`rollout.server.replicas`): the actor of an engine, and how rank 0 controls it.

Rank 0 is a child process of its Ray actor and does not use Ray. It sends calls through a socket to its actor
(`RankEngines`), which calls the actors of the engines (`EngineHost`). Requests for samples and weights do not pass
through Ray: the ranks send them to the engines' addresses.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.errors import first_line
from lockstep.launch.process_pool import SupervisedProcess
from lockstep.run.files import write_private

# The variable with the descriptor of rank 0's socket to its actor.
LINK = "LOCKSTEP_ENGINE_LINK"
_BEAT_SECONDS = 1.0
# Time limit of one call of an engine's actor, and of the return of an actor that Ray restarts.
_CALL_SECONDS, _RETURN_SECONDS = 60.0, 120.0


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs. `devices` has the indices of its accelerators, and `port` is free."""

    address: str
    port: int
    devices: list[str]


@dataclass(frozen=True)
class EngineCommand:
    """How an engine is started. The environment has the API key. A `key_file` is written on the engine's node."""

    command: list[str]
    environment: dict[str, str]
    log: str
    address: str
    port: int
    key_file: str = ""
    key_text: str = ""


@dataclass(frozen=True)
class EngineState:
    alive: bool = True
    killed: bool = False
    """Whether the engine or its actor was killed, so that its arguments are not the cause."""
    how: str = ""
    """How the engine ended."""


class EngineHost:
    """The Ray actor of one engine. The engine ends with the actor, because it runs under a supervisor."""

    def __init__(self, passed: Mapping[str, str], niceness: int):
        self._passed, self._niceness = dict(passed), niceness
        self._process: SupervisedProcess | None = None
        self._begun: EngineCommand | None = None
        self._lock = threading.Lock()

    def place(self) -> EnginePlace:
        import ray

        address = ray.util.get_node_ip_address()
        ids = ray.get_runtime_context().get_accelerator_ids()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            port = int(listener.getsockname()[1])
        return EnginePlace(address, port, [one for each in ids.values() for one in each])

    def start(self, begun: EngineCommand) -> EngineState:
        """Starts the engine, and ends the one before it."""
        import ray

        address = ray.util.get_node_ip_address()
        if address != begun.address:
            # The ranks know only the first address.
            return EngineState(False, True, f"was lost with its node {begun.address}: Ray moved its actor to {address}")
        with self._lock:
            self._end()
            self._begun = begun
            if begun.key_file:
                Path(begun.key_file).parent.mkdir(mode=0o700)
                write_private(Path(begun.key_file), begun.key_text)
            # Ray gives its workers niceness 15, which the engine inherits. Lowering it needs root or CAP_SYS_NICE.
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
            work = "lockstep.launch.supervisor:run_command"
            self._process = SupervisedProcess(work, (begun.command,), Path(begun.log))
            self._process.connection.sendall(json.dumps(self._passed | begun.environment).encode() + b"\n")
        return EngineState()

    def state(self) -> EngineState:
        with self._lock:
            if self._process is None:
                return EngineState(False, True, "was lost with its Ray actor, which was restarted")
            if self._process.alive:
                self._remove_read_key()
                return EngineState()
            return EngineState(False, self._process.disturbed, self._process.ended())

    def check(self, python: str, code: str) -> int | str:
        """Runs a Python program on the engine's node. Returns its exit status, or why it cannot be run."""
        environment, words = {**os.environ, **self._passed}, [python, "-c", code]
        try:
            done = subprocess.run(words, env=environment, capture_output=True, timeout=_CALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{error} (on {os.uname().nodename})"
        return done.returncode

    def end(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._remove_key()

    def _remove_read_key(self) -> None:
        """Removes the key file when the engine listens, because it has read the file by then."""
        if self._begun is not None and self._begun.key_file and Path(self._begun.key_file).exists():
            with suppress(OSError), socket.create_connection((self._begun.address, self._begun.port), timeout=1):
                self._remove_key()

    def _remove_key(self) -> None:
        if self._begun is not None and self._begun.key_file:
            with suppress(FileNotFoundError):
                Path(self._begun.key_file).unlink()
                Path(self._begun.key_file).parent.rmdir()


class RankEngines:
    """Answers rank 0's calls, in the Ray actor of rank 0. An engine is started and watched by a thread, so that no
    answer takes long."""

    def __init__(self, engines: Sequence[Any]):
        self._engines = engines
        self._states = [EngineState(False, False, "was not started") for _ in engines]
        self._turns = [0] * len(engines)
        self._ours, self.theirs = socket.socketpair()
        threading.Thread(target=self._serve, daemon=True, name="engines").start()

    def _serve(self) -> None:
        with self._ours, self._ours.makefile("r", encoding="utf-8") as calls:
            for line in calls:
                call = json.loads(line)
                reply = self._answer(call["engine"], call["do"], call["given"])
                with suppress(OSError):  # the rank has ended
                    self._ours.sendall(json.dumps(reply).encode() + b"\n")

    def _answer(self, engine: int, do: str, given: list[Any]) -> Any:
        if do == "state":
            return asdict(self._states[engine])
        if do == "start":
            self._states[engine] = EngineState()
            self._turns[engine] += 1
            begun = EngineCommand(**given[0])
            watching = (engine, self._turns[engine], begun)
            threading.Thread(target=self._watch, args=watching, daemon=True, name=f"engine {engine}").start()
            return None
        if do == "end":
            self._turns[engine] += 1  # ends the thread that watches
        try:
            result = self._call(engine, do, *given)
        except Exception as error:  # noqa: BLE001 - Ray's exceptions have no common base; the rank reports it
            return {"lost": first_line(error)}
        return asdict(result) if isinstance(result, EnginePlace) else {"result": result}

    def _call(self, engine: int, do: str, *given: Any) -> Any:
        import ray

        return ray.get(getattr(self._engines[engine], do).remote(*given), timeout=_CALL_SECONDS)

    def _watch(self, engine: int, turn: int, begun: EngineCommand) -> None:
        """Starts the engine and keeps its state up to date until it has ended or is started again."""
        state = self._started(engine, turn, begun)
        while self._turns[engine] == turn:
            self._states[engine] = state
            if not state.alive:
                return
            time.sleep(_BEAT_SECONDS)
            state = self._state(engine)

    def _started(self, engine: int, turn: int, begun: EngineCommand) -> EngineState:
        """Starts the engine. An actor that was lost is awaited, because Ray restarts it."""
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

        given_up = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                state: EngineState = self._call(engine, "start", begun)
                return state
            except (RayActorError, GetTimeoutError) as error:
                lost = EngineState(False, True, f"was lost with its Ray actor: {first_line(error)}")
                late = time.monotonic() > given_up or self._turns[engine] != turn
                if late or isinstance(error, ActorDiedError):
                    return lost
            time.sleep(_BEAT_SECONDS)

    def _state(self, engine: int) -> EngineState:
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            state: EngineState = self._call(engine, "state")
            return state
        except RayActorError as error:
            return EngineState(False, True, f"was lost with its Ray actor: {first_line(error)}")
        except GetTimeoutError:
            return EngineState()  # an engine whose node is cut off is found lost by the requests to it


# The side of rank 0.


class EngineLink:
    """Rank 0's connection to the engines of its run. Any thread may call it."""

    def __init__(self, descriptor: int):
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._replies = self._socket.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()

    def call(self, engine: int, do: str, *given: Any) -> dict[str, Any]:
        with self._lock:
            try:
                self._socket.sendall(json.dumps({"engine": engine, "do": do, "given": given}).encode() + b"\n")
                line = self._replies.readline()
            except OSError as error:
                return {"lost": f"rank 0 has lost its Ray actor: {error}"}
        return (json.loads(line) or {}) if line else {"lost": "rank 0 has lost its Ray actor"}


@cache
def engine_link() -> EngineLink:
    return EngineLink(int(os.environ[LINK]))


class PlacedProcess:
    """An engine on a node of the cluster, with the interface of `SupervisedProcess`."""

    def __init__(self, engine: int, begun: EngineCommand):
        self._engine, self._link = engine, engine_link()
        self._link.call(engine, "start", asdict(begun))

    def _state(self) -> EngineState:
        found = self._link.call(self._engine, "state")
        return EngineState(False, True, found["lost"]) if "lost" in found else EngineState(**found)

    @property
    def alive(self) -> bool:
        return self._state().alive

    @property
    def disturbed(self) -> bool:
        return self._state().killed

    def ended(self) -> str:
        return self._state().how or "was ended"

    def kill(self) -> None:
        self._link.call(self._engine, "end")
