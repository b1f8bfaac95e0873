"""The worker process that calls a user's reward function, and the format of its replies. Imports no large packages."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import queue
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from lockstep.functions import LONGEST_WHY, Unloadable, check_signature, describe_error, get_function, run_file
from lockstep.launch.supervisor import exit_if_forked, limit_memory, worker_socket
from lockstep.reward.trl_signature import COMPLETIONS, TrlFunction, is_trl

if TYPE_CHECKING:
    from lockstep.types import Message


# Each reply is one line of JSON with the number of the call. The user's function is not trusted, so replies are never
# unpickled.

# Maximum length of a reply line in bytes: enough for a score with thousands of further numbers.
LONGEST_LINE = 2**20
# Call number of the reply that reports whether the function was loaded; the numbers of calls start at 1.
LOADING = 0


@dataclass(frozen=True)
class Loaded:
    """Reply: the function is loaded. `batched`: the function has TRL's signature and scores batches."""

    batched: bool = False


@dataclass(frozen=True)
class Unusable:
    """Reply: the function cannot be called."""

    why: str
    remedy: str = ""
    code: str = "import-failed"


@dataclass(frozen=True)
class Given:
    """The result of a call: the score, and further numbers to log by name."""

    score: float
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenAll:
    """The result of a call for a batch. An entry is a score, None if the function returned None for the response, or
    the reason why it is not a score."""

    scores: list[float | str | None]


@dataclass(frozen=True)
class Raised:
    """A call that gave no score. `spent` is true if the worker process must be replaced. `log` is the file with the
    last output of the process."""

    why: str
    spent: bool = False
    log: str | None = None


WorkerReply = Loaded | Unusable | Given | GivenAll | Raised


def line_of(call: int, reply: WorkerReply) -> bytes:
    """Encodes a reply as one line, which `read_line` decodes."""
    fields: dict[str, Any] = {"call": call, "kind": type(reply).__name__, **vars(reply)}
    line = json.dumps(fields, allow_nan=False).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        return line_of(call, Raised("returned more numbers than can be logged"))
    return line


def read_line(line: bytes) -> tuple[int, WorkerReply]:
    """Returns the call number and the reply; raises ValueError for an invalid line."""
    try:
        fields = json.loads(line)
        call, kind = fields.pop("call"), fields.pop("kind")
        reply = _read(kind, fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no answer: {line[:80]!r}") from error
    if type(call) is not int or reply is None:
        raise ValueError(f"no answer: {line[:80]!r}")
    return call, reply


def _read(kind: str, fields: dict[str, Any]) -> WorkerReply | None:
    """Returns the decoded reply, or None if a field of the JSON line is invalid."""
    reply: WorkerReply
    if kind == "Given":
        reply = Given(fields["score"], fields["more"])
        numbers = [reply.score, *reply.more.values()]
        good = all(isinstance(entry, int | float) and number(entry) is not None for entry in numbers)
    elif kind == "GivenAll":
        reply = GivenAll(fields["scores"])
        good = isinstance(reply.scores, list) and all(
            one is None or isinstance(one, str) or (isinstance(one, int | float) and number(one) is not None)
            for one in reply.scores
        )
    elif kind == "Raised":
        reply = Raised(fields["why"][: 2 * LONGEST_WHY], fields["spent"])
        good = isinstance(reply.why, str) and isinstance(reply.spent, bool)
    elif kind == "Unusable":
        reply = Unusable(fields["why"], fields["remedy"], fields["code"])
        good = all(isinstance(field, str) for field in vars(reply).values())
    else:
        reply = Loaded(fields.get("batched", False))
        good = kind == "Loaded" and isinstance(reply.batched, bool)
    return reply if good else None


def number(value: Any) -> float | None:
    """Returns the value as a float, or None for text and for anything that is not a finite number."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        plain = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return plain if math.isfinite(plain) else None


def awaited(value: Any) -> Any:
    """Returns the value itself or, if it is awaitable, its result."""
    if not inspect.isawaitable(value):
        return value
    # asyncio is imported here, because its import nearly doubles the start time of a worker, and few functions need it.
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


# Arguments of OpenRLHF's batch signature.
BATCH_CALL = ("queries", "prompts", "labels")
# What a function gets of a trajectory with an environment, and the images of the prompt.
TRAJECTORY = ("messages", "state", "info", "images")


class BatchFunction:
    """Wraps a reward function with OpenRLHF's signature and calls it with lists of one entry. A query is the text of
    the prompt followed by the response, without a chat template.

    A function with an argument `messages`, `state`, `info` or `images`, or with `**kwargs`, also gets these fields of
    the trajectory with an environment and the images of the prompt, as lists of one entry.

    The function returns a list, array or tensor of one number, or a dict: its entry `rewards` is the score, and the
    numbers in its entry `extra_logs` are logged.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        parameters = inspect.signature(function).parameters
        self._open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._names = frozenset(parameters)

    def __call__(
        self, prompt: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unread: Any
    ) -> dict[str, Any]:
        seen = {
            name: [extra_info[name]]
            for name in TRAJECTORY
            if isinstance(extra_info, dict) and name in extra_info and (self._open or name in self._names)
        }
        value = awaited(
            self._function(queries=[prompt + solution_str], prompts=[prompt], labels=[ground_truth], **seen)
        )
        if not isinstance(value, dict):
            return {"score": _single_value(value)}
        if "rewards" not in value:
            raise ValueError(f"the dict returned has no rewards, only {', '.join(map(str, value))}")
        logged = value.get("extra_logs")
        more = {key: _single_value(entry) for key, entry in logged.items()} if isinstance(logged, dict) else {}
        return {**more, "score": _single_value(value["rewards"])}


def prompt_text(prompt: list[Message]) -> str:
    """Returns the contents of the chat messages, each followed by a line break."""
    return "".join(f"{message.get('content')}\n" for message in prompt)


def _single_value(value: Any) -> Any:
    """Returns the single entry of a list, array or tensor; a plain number is returned unchanged."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(entries, list | tuple):
        if len(entries) != 1:
            raise ValueError(f"gave {len(entries)} rewards for one response")
        entries = entries[0]
    return entries


# Arguments that every reward function gets.
CALL = ("data_source", "solution_str", "ground_truth", "extra_info")
# Header of a pickled call: the number of the call and its length in bytes.
HEADER = struct.Struct(">QQ")


def serve(descriptor: int, path: str, name: str, memory_bytes: int, extra: tuple[str, ...] = ()) -> None:
    """Loads the user's reward function, then answers calls until the connection is closed."""
    connection, worker = worker_socket(descriptor), os.getpid()
    calls: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    function = _load(Path(path), name, (*CALL, *extra))
    exit_if_forked(worker)
    if isinstance(function, Unusable):
        connection.sendall(line_of(LOADING, function))
        return
    limit_memory(memory_bytes)
    connection.sendall(line_of(LOADING, Loaded(isinstance(function, TrlFunction))))
    while True:
        number_of_call, call = calls.get()
        reply = answer(function, call, path)
        exit_if_forked(worker)
        connection.sendall(line_of(number_of_call, reply))


def _receive(connection: socket.socket, calls: queue.SimpleQueue[tuple[int, bytes]]) -> None:
    """Reads calls in a separate thread, so that the worker notices during a call that the parent process has ended."""
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                number_of_call, length = HEADER.unpack(header)
                calls.put((number_of_call, stream.read(length)))
    finally:
        # Exit immediately; the supervisor kills the child processes of the function.
        os._exit(0)


def _load(path: Path, name: str, call: tuple[str, ...]) -> Callable[..., Any] | Unusable:
    """Loads the user's reward function, or returns why it cannot be loaded."""
    try:
        return as_reward_function(get_function(run_file(path), name, call, path), name, call)
    except Unloadable as error:
        return Unusable(error.why, error.remedy, error.code)


def as_reward_function(function: Callable[..., Any], name: str, call: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function that can be called with the argument names in `call`. A user function with OpenRLHF's or TRL's
    batch signature is wrapped. Raises `Unloadable` for other signatures."""
    if is_trl(function, name):
        return TrlFunction(function, name, call[len(CALL) :])
    try:
        check_signature(function, name, call, by_name=True)
    except Unloadable:
        with suppress(Unloadable):
            check_signature(function, name, BATCH_CALL, by_name=True)
            return BatchFunction(function)
        raise
    return function


def answer(function: Callable[..., Any], call: bytes, path: str) -> Given | GivenAll | Raised:
    """Runs one call and returns its outcome; never raises."""
    try:
        arguments = pickle.loads(call)
    except Exception as error:  # noqa: BLE001 - classes of objects in the row may raise any exception
        return Raised(f"the process of the function cannot read the row: {describe_error(error, path)}")
    if not isinstance(function, BatchFunction):
        arguments.pop("prompt", None)
    try:
        _open_images(arguments, batched=isinstance(function, TrlFunction))
        value = awaited(function(**arguments))
        return checked_all(value, len(arguments[COMPLETIONS])) if isinstance(function, TrlFunction) else checked(value)
    except MemoryError as error:
        why = describe_error(error, path)
        # Free the memory of the failed call before the reply is built.
        traceback.clear_frames(error.__traceback__)
        return Raised(f"{why}: over reward.memory_limit_gb", spent=True)
    except BaseException as error:  # noqa: BLE001 - the user's function may raise any exception
        return Raised(describe_error(error, path))


def _open_images(arguments: dict[str, Any], *, batched: bool) -> None:
    """Replaces the references to the images of a call by PIL images. A function with TRL's signature gets them in the
    column of the rows, and another function in `extra_info`."""
    refs = arguments.pop("images", None)
    if refs is None:
        return
    from lockstep.vision.images import read_image  # imports numpy and Pillow, which few functions need

    if not batched:
        opened = [read_image(ref, "the prompt") for ref in refs]
        arguments["extra_info"] = {"images": opened, **arguments["extra_info"]}
        return
    lists = [[read_image(ref, "the prompt") for ref in one] for one in refs]
    columns = arguments["columns"]
    if "image" in columns and "images" not in columns:
        columns["image"] = [one[0] if one else None for one in lists]
    else:
        columns["images"] = lists


def checked(value: Any) -> Given | Raised:
    """Validates the return value of a reward function: a finite number, or a dict with `score`. Other finite numbers of
    the dict are logged."""
    entries = value if isinstance(value, dict) else {"score": value}
    if "score" not in entries:
        names = ", ".join(_shown(name) for name in list(entries)[:20])
        return Raised(f'the dict returned has no "score", only {names or "nothing"}'[:LONGEST_WHY])
    score = number(entries["score"])
    if score is None:
        return Raised(f"returned {_shown(entries['score'])}, which is not a finite number")
    more = {str(key): number(entry) for key, entry in entries.items() if key != "score"}
    return Given(score, {key: entry for key, entry in more.items() if entry is not None})


def checked_all(values: Any, count: int) -> GivenAll | Raised:
    """Validates the return value of a function with TRL's signature: a list, array or tensor with a finite number or
    None for each of `count` responses."""
    entries = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(entries, list | tuple):
        return Raised(f"returned {_shown(values)}, not a list with a reward for each completion")
    if len(entries) != count:
        return Raised(f"returned {len(entries)} rewards for {count} completions")
    found = [entry if entry is None else number(entry) for entry in entries]
    return GivenAll(
        [
            f"returned {_shown(entry)}, which is not a finite number" if one is None and entry is not None else one
            for one, entry in zip(found, entries, strict=True)
        ]
    )


def _shown(value: Any) -> str:
    """Returns the first 80 characters of the value's repr, without copying a long string."""
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text[:80] + ("..." if len(text) > 80 or (isinstance(value, str | bytes) and len(value) > 80) else "")
