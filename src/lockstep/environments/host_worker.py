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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.environments.return_values import checked_scores, checked_start, checked_turn, json_object
from lockstep.functions import Unloadable, check_signature, describe_error, run_file
from lockstep.launch.supervisor import exit_if_forked, worker_socket

# Header of a pickled call: the number of the call and its length in bytes.
HEADER = struct.Struct(">QQ")
# Maximum length of an answer in bytes. A longer answer fails the call.
LONGEST_LINE = 2**24
# The number of the line that reports whether the class was loaded. The numbers of calls start at 1.
LOADING = 0
# The methods of the two kinds of environments, each with its arguments.
MESSAGE_METHODS = {"reset": ("row", "seed"), "step": ("reply",)}
TOKEN_METHODS = {"reset_tokens": ("row", "seed"), "step_tokens": ("ids",)}


def serve(descriptor: int, environment: str, arguments: Mapping[str, Any], threads: int) -> None:
    """Loads the environment class, then answers calls until the connection is closed."""
    connection = worker_socket(descriptor)
    try:
        created, file = load_environment(environment)
    except Unloadable as error:
        connection.sendall(_line(LOADING, {"unusable": [error.why, error.remedy, error.code]}))
        return
    connection.sendall(_line(LOADING, {"group": callable(getattr(created, "score_group", None))}))
    asyncio.run(_Host(connection, created, dict(arguments), file, threads).run())


def load_environment(environment: str) -> tuple[Callable[..., Any], str]:
    """Loads the class of `path/to/file.py:Class` or `package.module:Class`. Returns it with the file of its code."""
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
        except BaseException as error:  # noqa: BLE001 - a module may raise anything when it is imported
            why = f"module {where} cannot be imported: {describe_error(error, where)}"
            raise Unloadable(why, "install the package, or fix the name", code="import-failed") from None
        file = str(getattr(module, "__file__", where))
    created = getattr(module, name, None)
    if not callable(created):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("_")]
        raise Unloadable(
            f"has no class {name}",
            f"the classes of the file are: {', '.join(classes) or 'none'}",
            code="invalid-function",
        )
    if inspect.isclass(created):
        _check_methods(created, name)
    return created, file


def _check_methods(created: type, name: str) -> None:
    methods = TOKEN_METHODS if hasattr(created, "reset_tokens") else MESSAGE_METHODS
    for method, call in methods.items():
        function = getattr(created, method, None)
        if function is None:
            words = ", ".join(("self", *call))
            why, remedy = f"{name} has no method {method}", f"write: def {method}({words})"
            raise Unloadable(why, remedy, code="invalid-function")
        check_signature(function, f"{name}.{method}", ("self", *call), by_name=False)


def _line(call: int, fields: dict[str, Any]) -> bytes:
    """Encodes an answer as a line. Raises ValueError if a value is not JSON, or if the answer is too long."""
    try:
        line = json.dumps({"call": call, **fields}, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"returned a value that is not JSON: {error}") from None
    if len(line) > LONGEST_LINE:
        raise ValueError(f"returned {len(line):,} bytes, over the limit of {LONGEST_LINE:,}")
    return line


class _Failed(Exception):
    """Wraps whatever a synchronous method raised, also exceptions that asyncio cannot pass on (SystemExit,
    StopIteration)."""


class _Host:
    def __init__(
        self, connection: socket.socket, created: Callable[..., Any], arguments: dict[str, Any], file: str, threads: int
    ):
        self._connection, self._created, self._arguments, self._file = connection, created, arguments, file
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._in_threads: set[int] = set()
        """The calls whose synchronous method is running."""
        self._threads = ThreadPoolExecutor(threads, "environment")
        self._process = os.getpid()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
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
        if fields["do"] == "cancel":
            self._cancel(number, fields["cancelled"])
        else:
            self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, fields))

    def _cancel(self, number: int, cancelled: int) -> None:
        """Cancels a call. The answer says whether a thread of the call is still running."""
        task = self._tasks.get(cancelled)
        if task is not None:
            task.cancel()
        self._send(number, {"stuck": cancelled in self._in_threads})

    async def _answer(self, number: int, fields: dict[str, Any]) -> None:
        where = fields["do"]
        try:
            where, answer = await self._call(number, fields)
            self._send(number, answer)
        except _Invalid as error:
            self._send(number, {"raised": f"{error.method} {error.__cause__}", "code": "invalid-return"})
        except BaseException as error:  # noqa: BLE001 - whatever the environment raises is the reason
            cause = error.__cause__ if isinstance(error, _Failed) and error.__cause__ is not None else error
            why = f"{where} raised {describe_error(cause, self._file)}"
            self._send(number, {"raised": why})
        finally:
            self._tasks.pop(number, None)

    async def _call(self, number: int, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Runs a call. Returns the name of the last method, and the fields of the answer."""
        key = fields.get("trajectory")
        if fields["do"] == "reset":
            environment = await self._run(number, self._create)
            self._environments[key] = environment
            tokens = hasattr(environment, "reset_tokens")
            method = "reset_tokens" if tokens else "reset"
            value = await self._run(number, getattr(environment, method), fields["row"], fields["seed"])
            return method, {**_valid(method, lambda: checked_start(value, tokens)), "tokens": tokens}
        if fields["do"] == "step":
            environment, reply = self._environments[key], fields["reply"]
            tokens = isinstance(reply, list)
            method = "step_tokens" if tokens else "step"
            value = await self._run(number, getattr(environment, method), reply)
            return method, _valid(method, lambda: checked_turn(value, tokens))
        if fields["do"] == "group":
            value = await self._run(number, self._created.score_group, fields["trajectories"])  # type: ignore[attr-defined]
            return "score_group", _valid(
                "score_group", lambda: {"scores": checked_scores(value, fields["trajectories"])}
            )
        return await self._finish(number, key, fields["finished"])

    async def _finish(self, number: int, key: int, finished: Any) -> tuple[str, dict[str, Any]]:
        """Scores a finished trajectory, and closes its environment. `finished` is None if the trajectory failed."""
        environment = self._environments.pop(key, None)
        answer: dict[str, Any] = {"score": None, "info": {}}
        try:
            if finished is not None and callable(getattr(environment, "score", None)):
                value = await self._run(number, environment.score, finished)
                answer["score"] = _valid("score", lambda: checked_scores(value))
            if finished is not None:
                answer["info"] = _valid("info", lambda: json_object(getattr(environment, "info", {})))
        finally:
            if callable(getattr(environment, "close", None)):
                await self._run(number, environment.close)
        return "close", answer

    def _create(self) -> Any:
        return self._created(**self._arguments)

    async def _run(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a method. A coroutine function runs in the loop, another function in a thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self._threads, self._in_thread, number, function, *arguments)
        return await value if inspect.isawaitable(value) else value

    def _in_thread(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self._in_threads.add(number)
        try:
            return function(*arguments)
        except BaseException as error:
            raise _Failed from error
        finally:
            exit_if_forked(self._process)
            self._in_threads.discard(number)

    def _send(self, number: int, fields: dict[str, Any]) -> None:
        try:
            line = _line(number, fields)
        except ValueError as error:
            line = _line(number, {"raised": str(error), "code": "invalid-return"})
        self._connection.sendall(line)


class _Invalid(Exception):
    """A method returned a value that cannot be used. The cause is a ValueError."""

    def __init__(self, method: str):
        super().__init__(method)
        self.method = method


def _valid(method: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:
        raise _Invalid(method) from error
