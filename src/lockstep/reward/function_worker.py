"""The worker process that calls a user's reward function, and the format of its answers. It imports nothing heavy."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import queue
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from lockstep.functions import LONGEST_WHY, Unloadable, function_of, refuse_signature, run_file, told
from lockstep.launch.worker_process import limit_memory

if TYPE_CHECKING:
    from lockstep.types import Message


# What the process of a user's function may answer, and how it is written: a line of JSON with the number of the call.
#
# The function is not trusted with more than its score, so nothing that it sends is ever unpickled; what is no answer
# in this form is garbage.

# Of one line. A score with thousands of further numbers fits.
LONGEST_LINE = 2**20
# The answer to loading the function; calls count from 1.
LOADING = 0


@dataclass(frozen=True)
class Loaded:
    """The function is there and can be called."""


@dataclass(frozen=True)
class Unusable:
    """The function cannot be called at all."""

    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Given:
    """What a call gave: its score, and the further numbers of a dict by name."""

    score: float
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """A call that gave no score. `spent`: the process cannot be used any more. `log`: where its last lines are kept."""

    why: str
    spent: bool = False
    log: str | None = None


Reply = Loaded | Unusable | Given | Raised


def line_of(call: int, reply: Reply) -> bytes:
    """What `read_line` reads."""
    fields: dict[str, Any] = {"call": call, "kind": type(reply).__name__, **vars(reply)}
    line = json.dumps(fields, allow_nan=False).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        return line_of(call, Raised("returned more numbers than can be logged"))
    return line


def read_line(line: bytes) -> tuple[int, Reply]:
    """The number of the call and the answer to it; ValueError for what is no such line."""
    try:
        fields = json.loads(line)
        call, kind = fields.pop("call"), fields.pop("kind")
        reply = _read(kind, fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no answer: {line[:80]!r}") from error
    if type(call) is not int or reply is None:
        raise ValueError(f"no answer: {line[:80]!r}")
    return call, reply


def _read(kind: str, fields: dict[str, Any]) -> Reply | None:
    """The reply, or None where a field is not what it should be."""
    reply: Reply
    if kind == "Given":
        reply = Given(fields["score"], fields["more"])
        numbers = [reply.score, *reply.more.values()]
        good = all(isinstance(entry, int | float) and number(entry) is not None for entry in numbers)
    elif kind == "Raised":
        reply = Raised(fields["why"][: 2 * LONGEST_WHY], fields["spent"])
        good = isinstance(reply.why, str) and isinstance(reply.spent, bool)
    elif kind == "Unusable":
        reply = Unusable(fields["why"], fields["remedy"])
        good = isinstance(reply.why, str) and isinstance(reply.remedy, str)
    else:
        reply, good = Loaded(), kind == "Loaded"
    return reply if good else None


def number(value: Any) -> float | None:
    """As a plain float; None for what is no finite number. Text is no number."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        plain = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return plain if math.isfinite(plain) else None


# What a user's function gives, where it is `async` too.


def awaited(value: Any) -> Any:
    """The value itself, or that of an awaitable."""
    if not inspect.isawaitable(value):
        return value
    # Importing it takes nearly as long as all else that a process needs to call functions, and few of them need it.
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


# Reward functions of OpenRLHF's form: `reward_func(queries, prompts, labels)` over a batch, asked for one response.

BATCH_CALL = ("queries", "prompts", "labels")


class BatchFunction:
    """Calls the function with lists of one. A query is the prompt's text and the response; no chat template is in it.

    It returns a list, array or tensor of one number, or a dict of these: `rewards` is the score, the rest is logged.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, prompt: str, solution_str: str, ground_truth: str, **unread: Any) -> dict[str, Any]:
        value = awaited(self._function(queries=[prompt + solution_str], prompts=[prompt], labels=[ground_truth]))
        if not isinstance(value, dict):
            return {"score": _only(value)}
        if "rewards" not in value:
            raise ValueError(f"the dict returned has no rewards, only {', '.join(map(str, value))}")
        logged = value.get("extra_logs")
        more = {key: _only(entry) for key, entry in logged.items()} if isinstance(logged, dict) else {}
        return {**more, "score": _only(value["rewards"])}


def prompt_text(prompt: list[Message]) -> str:
    """The contents of a chat, a line break after each."""
    return "".join(f"{message.get('content')}\n" for message in prompt)


def _only(value: Any) -> Any:
    """The one entry of a list, array or tensor; a plain number is itself."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(entries, list | tuple):
        if len(entries) != 1:
            raise ValueError(f"gave {len(entries)} rewards for one response")
        entries = entries[0]
    return entries


# The process that calls a user's function. It imports nothing heavy of its own: it must start in a moment.
#
# It reads calls from one connection, each with its number, and writes an answer to each (`answers.py`); the first one
# says whether the function could be loaded.

CALL = ("data_source", "solution_str", "ground_truth", "extra_info")
# Before each pickled call: its number and its length.
HEADER = struct.Struct(">QQ")


def serve(descriptor: int, path: str, name: str, memory_bytes: int, extra: tuple[str, ...] = ()) -> None:
    """Load the function, then answer calls until the other end of the connection is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The function's own children must not hold the connection open.
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    me = os.getpid()
    calls: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    function = _loaded(Path(path), name, (*CALL, *extra))
    _end_copies(me)
    if isinstance(function, Unusable):
        connection.sendall(line_of(LOADING, function))
        return
    limit_memory(memory_bytes)
    connection.sendall(line_of(LOADING, Loaded()))
    while True:
        number_of_call, call = calls.get()
        reply = answer(function, call, path)
        _end_copies(me)
        connection.sendall(line_of(number_of_call, reply))


def _end_copies(me: int) -> None:
    """A process that the function forked, and that returned from it like its parent, has nothing to say here."""
    if os.getpid() != me:
        os._exit(0)


def _receive(connection: socket.socket, calls: queue.SimpleQueue[tuple[int, bytes]]) -> None:
    """Read in a thread of its own, so that the end of the parent is noticed in the middle of a call too."""
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                number_of_call, length = HEADER.unpack(header)
                calls.put((number_of_call, stream.read(length)))
    finally:
        # At once, in the middle of a call; the supervisor ends what the function has started.
        os._exit(0)


def _loaded(path: Path, name: str, call: tuple[str, ...]) -> Callable[..., Any] | Unusable:
    """The function, or why it cannot be had."""
    try:
        return in_either_form(function_of(run_file(path), name, call, path), name, call)
    except Unloadable as error:
        return Unusable(error.why, error.remedy)


def in_either_form(function: Callable[..., Any], name: str, call: tuple[str, ...]) -> Callable[..., Any]:
    """A function that takes `call` by name, or lists of the batch form; `Unloadable` where it takes neither."""
    try:
        refuse_signature(function, name, call, by_name=True)
    except Unloadable:
        with suppress(Unloadable):
            refuse_signature(function, name, BATCH_CALL, by_name=True)
            return BatchFunction(function)
        raise
    return function


def answer(function: Callable[..., Any], call: bytes, path: str) -> Given | Raised:
    """One call. Whatever it raises or returns, it is answered."""
    try:
        arguments = pickle.loads(call)
    except Exception as error:  # noqa: BLE001 - whatever the classes of the row raise is the reason
        return Raised(f"the row cannot be read by its process: {told(error, path)}")
    if not isinstance(function, BatchFunction):
        arguments.pop("prompt", None)
    try:
        return checked(awaited(function(**arguments)))
    except MemoryError as error:
        why = told(error, path)
        # What the call had gathered must go before anything else can be done.
        traceback.clear_frames(error.__traceback__)
        return Raised(f"{why}: over reward.memory_limit_gb", spent=True)
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the reason
        return Raised(told(error, path))


def checked(value: Any) -> Given | Raised:
    """A finite number, or a dict whose `score` is one; its other finite numbers go along, the rest does not."""
    entries = value if isinstance(value, dict) else {"score": value}
    if "score" not in entries:
        names = ", ".join(_shown(name) for name in list(entries)[:20])
        return Raised(f'the dict returned has no "score", only {names or "nothing"}'[:LONGEST_WHY])
    score = number(entries["score"])
    if score is None:
        return Raised(f"returned {_shown(entries['score'])}, which is not a finite number")
    more = {str(key): number(entry) for key, entry in entries.items() if key != "score"}
    return Given(score, {key: entry for key, entry in more.items() if entry is not None})


def _shown(value: Any) -> str:
    """Its beginning; of a long text no second copy is made."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text[:80] + ("..." if len(text) > 80 or (isinstance(value, str | bytes) and len(value) > 80) else "")
