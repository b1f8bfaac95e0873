"""The host process of environments: runs many environments in one asyncio loop. Imports no large packages.

Synchronous methods run in threads of the host. The run sends pickled calls. The host answers with lines of JSON, which
are never unpickled, because the environment is not trusted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.environments.message_images import opened_row
from lockstep.environments.return_values import (
    Level,
    checked_scores,
    checked_start,
    checked_turn,
    json_object,
    state_of,
)
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, check_signature, describe_error, run_file
from lockstep.launch.supervisor import exit_if_forked, worker_socket

# Header of a pickled call: the number of the call and its length in bytes.
HEADER = struct.Struct(">QQ")
# Maximum length of an answer in bytes. A longer answer fails the call.
LONGEST_LINE = 2**24
# The number of the line that reports whether the class was loaded. The numbers of calls start at 1.
LOADING = 0
# The smallest number of threads for tools and for `asyncio.to_thread` in user code. A thread starts when it is needed.
TOOL_THREADS = 256
# Seconds in which a cancelled coroutine must end.
CANCEL_SECONDS = 0.5
# The methods of each kind of environment with their arguments: start of a trajectory, answer to a turn.
METHODS: dict[Level, dict[str, tuple[str, ...]]] = {
    "tokens": {"reset_tokens": ("row", "seed"), "step_tokens": ("ids",)},
    "text": {"reset_text": ("row", "seed"), "step_text": ("reply",)},
    "messages": {"reset": ("row", "seed"), "step": ("reply",)},
}


def serve(descriptor: int, environment: str, arguments: Mapping[str, Any], threads: int) -> None:
    """Loads the environment class, then answers calls until the connection is closed."""
    connection = worker_socket(descriptor)
    try:
        created, file = load_environment(environment)
    except Unloadable as error:
        connection.sendall(as_line(LOADING, {"unusable": [error.why, error.remedy, error.code]}))
        return
    loaded = {"group": callable(getattr(created, "score_group", None)), "text": level_of(created) == "text"}
    connection.sendall(as_line(LOADING, loaded))
    asyncio.run(HostProcess(connection, created, dict(arguments), file, threads).run())


def load_environment(environment: str) -> tuple[Callable[..., Any], str]:
    """Loads the class of `path/to/file.py:Class` or `package.module:Class`. Returns it with the file of its code."""
    created, file = load_object(environment, "class")
    if inspect.isclass(created):
        _check_methods(created, environment.rpartition(":")[2])
    return created, file


def load_object(environment: str, kind: str) -> tuple[Callable[..., Any], str]:
    """Loads an object of a file or package, without a check of its methods. `kind` is `class` or `function`."""
    where, _, name = environment.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).expanduser().absolute()
        if not path.is_file():
            why, remedy = f"file {where} does not exist", "give the path relative to the working directory"
            raise Unloadable(why, remedy, code="no-such-file")
        module, file = run_file(path), str(path)
    else:
        try:
            module = import_module(where)
            # An adapter imports its package here, where the time limit is that of a load and not of a step.
            getattr(module, "import_package", lambda: None)()
        except BaseException as error:  # noqa: BLE001 - a module may raise anything when it is imported
            why = f"module {where} cannot be imported: {describe_error(error, where)}"
            raise Unloadable(why, "install the package, or fix the name", code="import-failed") from None
        file = str(getattr(module, "__file__", where))
    created = getattr(module, name, None)
    if not callable(created):
        fits = inspect.isclass if kind == "class" else inspect.isfunction
        names = [
            key
            for key, value in vars(module).items()
            if fits(value) and not key.startswith("_") and value.__module__ == module.__name__
        ]
        remedy = f"those of the file are: {', '.join(names) or 'none'}"
        raise Unloadable(f"has no {kind} {name}", remedy, code="invalid-function")
    return created, file


def level_of(environment: Any) -> Level:
    """Returns what an environment, or its class, writes: the first kind of which it has a method."""
    return next((level for level, methods in METHODS.items() if hasattr(environment, next(iter(methods)))), "messages")


def _check_methods(created: type, name: str) -> None:
    for method, call in METHODS[level_of(created)].items():
        function = getattr(created, method, None)
        if function is None:
            words = ", ".join(("self", *call))
            why, remedy = f"{name} has no method {method}", f"write: def {method}({words})"
            raise Unloadable(why, remedy, code="invalid-function")
        check_signature(function, f"{name}.{method}", ("self", *call), by_name=False)


def as_line(call: int, fields: dict[str, Any]) -> bytes:
    """Encodes an answer as a line. Raises ValueError if a value is not JSON, or if the answer is too long."""
    try:
        line = json.dumps({"call": call, **fields}, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        raise ValueError("returned text with half of a character (a lone surrogate)") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"returned a value that is not JSON: {error}") from None
    if len(line) > LONGEST_LINE:
        raise ValueError(f"returned {len(line):,} bytes, over the limit of {LONGEST_LINE:,}")
    return line


class _Failed(Exception):
    """Wraps an exception of a thread that asyncio cannot pass on, such as SystemExit."""


# The number of the call that runs in a task, and in the threads that the task starts; and the method that it runs.
_number: ContextVar[int] = ContextVar("number", default=LOADING)
_method: ContextVar[str] = ContextVar("method", default="")


class _CallThreads:
    """The number of threads that run for each call."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()
        self._count = threading.Lock()

    def add(self, number: int, count: int) -> None:
        with self._count:
            self._running[number] += count

    def runs(self, number: int) -> bool:
        """Returns whether a thread of the call is running."""
        with self._count:
            return self._running[number] > 0


class _Threads(ThreadPoolExecutor):
    """Threads that know for which call they run."""

    def __init__(self, threads: int, name: str, counts: _CallThreads):
        super().__init__(threads, name)
        self._counts = counts

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return super().submit(self._counted, _number.get(), function, *arguments, **named)

    def _counted(self, number: int, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        process = os.getpid()
        self._counts.add(number, 1)
        try:
            return function(*arguments, **named)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise _Failed from error
        finally:
            exit_if_forked(process)
            self._counts.add(number, -1)


class HostProcess:
    """Answers the calls of a run."""

    def __init__(
        self, connection: socket.socket, created: Callable[..., Any], arguments: dict[str, Any], file: str, threads: int
    ):
        self._connection, self._created, self._arguments, self._file = connection, created, arguments, file
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._counts = _CallThreads()
        # Methods of environments have threads of their own: tools that hang must not block them. An environment that is
        # closed after a failure needs a thread besides those of `threads` trajectories.
        self._methods = _Threads(2 * threads, "environment", self._counts)
        self._tools = _Threads(max(TOOL_THREADS, 4 * threads), "tool", self._counts)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._tools)
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # the thread ends the process

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads calls in a separate thread, so that the host notices during a call that the run has ended."""
        try:
            with self._connection.makefile("rb") as stream:
                while len(header := stream.read(HEADER.size)) == HEADER.size:
                    number, length = HEADER.unpack(header)
                    loop.call_soon_threadsafe(self._take, number, stream.read(length))
        finally:
            # Exit immediately; the supervisor kills the child processes of the environments.
            os._exit(0)

    def _take(self, number: int, call: bytes) -> None:
        try:
            fields = pickle.loads(call)
        except Exception as error:  # noqa: BLE001 - whatever the classes of the row raise is the reason
            self._send(number, {"raised": f"the host process cannot read the row: {describe_error(error, '')}"})
            return
        cancels = fields["do"] == "cancel"
        work = self._cancel(number, fields["cancelled"]) if cancels else self._answer(number, fields)
        self._tasks[number] = asyncio.get_running_loop().create_task(work)

    async def _cancel(self, number: int, cancelled: int) -> None:
        """Cancels a call. The answer says whether the call, or a thread of it, is still running."""
        task, ended = self._tasks.get(cancelled), True
        if task is not None:
            task.cancel()
            ended = bool((await asyncio.wait({task}, timeout=CANCEL_SECONDS))[0])
        self._send(number, {"stuck": not ended or self._counts.runs(cancelled)})
        self._tasks.pop(number, None)

    async def _answer(self, number: int, fields: dict[str, Any]) -> None:
        _number.set(number)
        try:
            answer = await self._call(fields)
            self._send(number, {**answer, "stuck": True} if self._counts.runs(number) else answer)
        except _Invalid as error:
            self._send(number, {"raised": f"{_method.get()} {error.__cause__}", "code": "invalid-return"})
        except BaseException as error:  # noqa: BLE001 - whatever the environment raises is the reason
            cause = error.__cause__ if isinstance(error, _Failed) and error.__cause__ is not None else error
            self._send(number, _raised(cause, _method.get(), self._file))
        finally:
            self._tasks.pop(number, None)

    async def _call(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Runs a call. Returns the fields of the answer."""
        key = int(fields.get("trajectory", -1))
        if fields["do"] == "reset":
            environment = await self._run("__init__", self._created, self._arguments)
            self._environments[key] = environment
            level = level_of(environment)
            method, _ = METHODS[level]
            row = await self._run(method, opened_row, {}, fields["row"])
            value = await self._run(method, getattr(environment, method), {}, row, fields["seed"])
            return {**await self.valid(lambda: checked_start(value, level)), "tokens": level != "messages"}
        if fields["do"] == "step":
            environment = self._environments[key]
            level = level_of(environment)
            _, method = METHODS[level]
            reply = list(fields["reply"].ids) if level == "tokens" else fields["reply"]
            value = await self._run(method, getattr(environment, method), {}, reply)
            return await self.valid(lambda: checked_turn(value, level))
        if fields["do"] == "group":
            trajectories = fields["trajectories"]
            scored = getattr(self._created, "score_group")  # noqa: B009 - the class is not known
            value = await self._run("score_group", scored, {}, trajectories)
            return await self.valid(lambda: {"scores": checked_scores(value, trajectories)})
        return await self._finish(self._environments.pop(key, None), fields["finished"])

    async def _finish(self, environment: Any, finished: Any) -> dict[str, Any]:
        """Scores a finished trajectory, and closes its environment. `finished` is None if the trajectory failed."""
        answer: dict[str, Any] = {"score": None, "info": {}, "state": {}}
        try:
            if finished is not None and callable(getattr(environment, "score", None)):
                value = await self._run("score", environment.score, {}, finished)
                answer["score"] = await self.valid(lambda: checked_scores(value))
            if finished is not None:
                _method.set("info")
                answer["info"] = await self.valid(lambda: json_object(getattr(environment, "info", {})))
                # Many classes have an attribute `state` of another kind, which is not meant for rewards.
                answer["state"] = await self.valid(lambda: state_of(environment))
        finally:
            if callable(getattr(environment, "close", None)):
                failed = _method.get()
                await self._run("close", environment.close, {})
                _method.set(failed)
        return answer

    async def _run(self, method: str, function: Callable[..., Any], named: dict[str, Any], *arguments: Any) -> Any:
        """Calls a method. A coroutine function runs in the loop, another function in a thread."""
        _method.set(method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        value = await asyncio.get_running_loop().run_in_executor(self._methods, partial(function, *arguments, **named))
        return await value if inspect.isawaitable(value) else value

    async def valid(self, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs a check of a value in a thread: the value of a user's class may run any code, or have no end."""
        try:
            return dict(await asyncio.get_running_loop().run_in_executor(self._methods, check))
        except Exception as error:
            raise _Invalid from error

    def _send(self, number: int, fields: dict[str, Any]) -> None:
        try:
            line = as_line(number, fields)
        except ValueError as error:
            line = as_line(number, {"raised": f"{_method.get()} {error}".strip(), "code": "invalid-return"})
        self._connection.sendall(line)


class _Invalid(Exception):
    """A method returned a value that cannot be used. The cause is a ValueError."""


def _raised(error: BaseException, method: str, file: str) -> dict[str, Any]:
    """Returns the answer for an exception. A refusal of lockstep's own code has a reason, a code and a remedy."""
    if isinstance(error, Refusal):
        problem = error.problems[0]
        why = problem.why if problem.where.startswith("rollout.") else f"{problem.where}: {problem.why}"
        return {"raised": why, "code": problem.code, "remedy": problem.remedy}
    raised = {"raised": f"{method} raised {describe_error(error, file)}"}
    if method == "__init__" and isinstance(error, TypeError):
        raised["remedy"] = "write a class whose __init__ takes the keys of rollout.environment_args, and no others"
    return raised
