"""The process that calls a user's function. It imports nothing heavy of its own: it must start in a moment.

It talks over one connection: first comes `Loaded` or `Unusable`, then an answer to each call that it is sent.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, SupportsFloat

CALL = "data_source, solution_str, ground_truth, extra_info"
LONGEST_WHY = 300


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
    """A call that gave no score. `spent`: the process is out of memory and must be replaced."""

    why: str
    spent: bool = False


def serve(descriptor: int, path: str, name: str, memory_bytes: int) -> None:
    """Load the function, then answer calls until the other end of the connection is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The function's own children must not hold the connection open.
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    function = load(Path(path), name)
    if isinstance(function, Unusable):
        connection.send(function)
        return
    limit_memory(memory_bytes)
    connection.send(Loaded())
    while True:
        connection.send(answer(function, calls.get(), path))


def _receive(connection: Connection, calls: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Read in a thread of its own, so that the end of the parent is noticed in the middle of a call too."""
    while True:
        try:
            calls.put(connection.recv())
        except (EOFError, OSError):
            # The function's own children go with it: the process leads its group.
            os.killpg(0, signal.SIGKILL)


def limit_memory(memory_bytes: int) -> None:
    """Bound the address space to what the loaded file has mapped and `memory_bytes` more.

    Libraries reserve far more addresses than they use memory; counting those would forbid to import them.
    A system that does not tell what is mapped (no /proc) has no limit.
    """
    told_by = Path("/proc/self/statm")
    if not told_by.exists():
        return
    mapped = int(told_by.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def load(path: Path, name: str) -> Callable[..., Any] | Unusable:
    """The function `name` of the file, or why it cannot be had. Modules beside the file can be imported by it."""
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        return Unusable("is not a Python file", "name a file that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001 - whatever the user's file raises is what must be told
        return Unusable(f"cannot be imported: {told(error, str(path))}", "mend the file")
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        return Unusable(f"has no {name}", f"its functions are: {', '.join(names) or 'none'}")
    if not callable(function):
        return Unusable(f"{name} is a {type(function).__name__}, not a function", f"write: def {name}({CALL})")
    try:
        inspect.signature(function).bind(**dict.fromkeys(CALL.split(", ")))
    except TypeError as error:
        return Unusable(f"{name} cannot be called with {CALL}: {error}", f"write: def {name}({CALL})")
    except ValueError:
        return Unusable(f"{name} does not say what arguments it takes", f"write: def {name}({CALL})")
    return function


def answer(function: Callable[..., Any], call: dict[str, Any], path: str) -> Given | Raised:
    """One call. Whatever it raises or returns, it is answered."""
    try:
        value = function(**call)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return checked(value)
    except MemoryError as error:
        why = told(error, path)
        # What the call had gathered must go before anything else can be done.
        traceback.clear_frames(error.__traceback__)
        return Raised(f"{why}: over reward.memory_limit_gb", spent=True)
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the reason
        return Raised(told(error, path))


async def _awaited(value: Any) -> Any:
    return await value


def checked(value: Any) -> Given | Raised:
    """A finite number, or a dict whose `score` is one; its other finite numbers go along, the rest does not."""
    entries = value if isinstance(value, dict) else {"score": value}
    if "score" not in entries:
        return Raised(f'the dict returned has no "score", only {", ".join(map(repr, entries)) or "nothing"}')
    score = number(entries["score"])
    if score is None:
        shown = repr(entries["score"])
        return Raised(f"returned {shown[:80]}{'...' if len(shown) > 80 else ''}, which is not a finite number")
    more = {str(key): number(entry) for key, entry in entries.items() if key != "score"}
    return Given(score, {key: entry for key, entry in more.items() if entry is not None})


def number(value: Any) -> float | None:
    """As a plain float; None for what is no finite number. Text is no number."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        plain = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return plain if math.isfinite(plain) else None


def told(error: BaseException, path: str) -> str:
    """What an exception says at its end, on one line, and where in the user's file it was."""
    last = " ".join(traceback.format_exception_only(type(error), error)[-1].split())[:LONGEST_WHY]
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == path]
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        lines.append(error.lineno)
    return last + (f" ({Path(path).name} line {lines[-1]})" if lines else "")
