"""The process that calls a user's function. It imports nothing heavy of its own: it must start in a moment.

It reads calls from one connection, each with its number, and writes an answer to each (`answers.py`); the first one
says whether the function could be loaded.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from lockstep.functions import LONGEST_WHY, Unloadable, function_of, refuse_signature, run_file, told
from lockstep.launch.worker_process import limit_memory
from lockstep.reward.answers import LOADING, Given, Loaded, Raised, Unusable, line_of, number
from lockstep.reward.awaited import awaited
from lockstep.reward.batch_function import BATCH_CALL, BatchFunction

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
        # At once, in the middle of a call; the warden ends what the function has started.
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
