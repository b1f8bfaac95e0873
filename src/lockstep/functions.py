"""User functions: `path/to/file.py:name` in a recipe, or a Python callable; found, checked and limited in time."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lockstep.errors import Problem, Refusal

# A limit of time for a function of the user's that runs inside the run itself, next to the weights.
#
# A timer's signal ends what is in Python, also where it sleeps or waits. What does not come back from the inside of a
# library cannot be ended from within its own process, so a second clock then ends the whole run, with what it stood
# at.

# After the limit: for a function to be ended by the signal, before the run is.
GRACE_SECONDS = 30.0
# A function that catches all there is may be ended by the next signal.
AGAIN_SECONDS = 5.0
# Of the run, where it had to be ended with the function.
ENDED = 2


class TimeUp(BaseException):
    """The limit is over. No `except Exception` of the user's keeps it."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Raises `TimeUp` in the block after so many seconds. `message` is what the run ends with where that cannot be."""
    last = threading.Timer(seconds + GRACE_SECONDS, _end_run, (message,))
    last.daemon = True
    last.start()
    try:
        # Signals are the main thread's; any other has the second clock alone.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _raise)
        earlier = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
            # Somebody else's clock around this one starts anew.
            signal.setitimer(signal.ITIMER_REAL, *earlier)
    finally:
        last.cancel()


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeUp


def _end_run(message: str) -> None:
    """Whatever else the process does: the message, where every thread stands, and the end."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(ENDED)


# Functions of the user's own: `path/to/file.py:name` in a recipe, or a callable given from Python.

LONGEST_WHY = 300
# Running a user's file may import torch from a slow disk.
LOAD_SECONDS = 120.0

# Callables that were given from Python, by the path that the recipe names them with.
_given: dict[str, Callable[..., Any]] = {}
# Files that were run already, by path and time of change: two functions of one file share its globals.
_modules: dict[tuple[Path, int], ModuleType] = {}
# Files that are being run right now, the innermost last.
_running: list[Path] = []


class Unloadable(Exception):
    """A function that cannot be had: why, and what to do."""

    def __init__(self, why: str, remedy: str):
        super().__init__(why)
        self.why, self.remedy = why, remedy


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user's with the key that names it. What it raises is told with file, name and line.

    `seconds` is what a call may take, and `limit` the key that says so; without them somebody else watches the clock.
    """

    key: str
    function_path: str
    function: Callable[..., Any]
    seconds: float | None = None
    limit: str = ""

    @property
    def where(self) -> str:
        return f"{self.key} {self.function_path}"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        file = self.function_path.rpartition(":")[0]
        try:
            with self._limited():
                return self.function(*arguments, **named)
        except Refusal:
            raise
        except TimeUp as over:
            raise Refusal([self._late(line_of(over, file))]) from over
        except Exception as error:
            raise Refusal.at(self.where, f"raised {told(error, file)}", "mend the function") from error

    def calling(self, function: Callable[..., Any]) -> OwnFunction:
        """The same for something that calls the function and goes on with what it gives."""
        return replace(self, function=function)

    def _limited(self) -> AbstractContextManager[None]:
        return nullcontext() if self.seconds is None else time_limit(self.seconds, str(self._late("")))

    def _late(self, line: str) -> Problem:
        return Problem(
            self.where,
            f"gave nothing in {self.seconds:g} s ({self.limit}){line}",
            f"let it end sooner, or raise {self.limit}; the last checkpoint is untouched",
        )

    def refuse(self, why: str, remedy: str) -> Refusal:
        return Refusal.at(self.where, why, remedy)


def is_function_path(value: str) -> bool:
    """Whether a value is written as the path of a function (`file.py:name`), not as a name of ours."""
    return ":" in value


def located(function_path: str, key: str) -> tuple[Path, str]:
    """File and name of `path/to/file.py:name`; refused where there is no such file."""
    path, _, name = function_path.rpartition(":")
    if not path or not name.isidentifier():
        raise Refusal.at(key, f"{function_path!r} does not name a function", "write path/to/file.py:name")
    file = Path(path).expanduser().absolute()
    if path.startswith("<") or "ipykernel_" in path:
        why = f"{function_path} was defined in a notebook or an interactive session, which no other process can load"
        raise Refusal.at(key, why, "put the function into a file: path/to/file.py:name")
    if not file.is_file():
        raise Refusal.at(key, f"there is no file {path}", "give the path from the folder that you start in")
    return file, name


def own_function(
    function_path: str, key: str, call: Sequence[str], seconds: float | None = None, limit: str = ""
) -> OwnFunction:
    """The function behind a path, which must be callable with the arguments `call` by position.

    A call may take `seconds`, which the key `limit` says.
    """
    if function_path in _given:
        function = _given[function_path]
    else:
        file, name = located(function_path, key)
        try:
            return OwnFunction(key, function_path, load_by_position(file, name, call), seconds, limit)
        except Unloadable as error:
            raise Refusal.at(f"{key} {function_path}", error.why, error.remedy) from error
    try:
        refuse_signature(function, function_path.rpartition(":")[2], call, by_name=False)
    except Unloadable as error:
        raise Refusal.at(f"{key} {function_path}", error.why, error.remedy) from error
    return OwnFunction(key, function_path, function, seconds, limit)


def given(function_path: str) -> bool:
    """Whether the path stands for a callable of this process, which no other process has."""
    return function_path in _given


def only_here(function_path: str) -> Callable[..., Any] | None:
    """The callable behind the path, where it was given from Python and no other process can load it: one of the main
    script or of a notebook cell, or one that is made inside another function."""
    function = _given.get(function_path)
    if function is None:
        return None
    file, _, name = function_path.rpartition(":")
    module = sys.modules.get(function.__module__)
    importable = module is not None and function.__module__ != "__main__" and Path(file).is_file()
    return None if importable and getattr(module, name, None) is function else function


def file_being_run() -> Path | None:
    """The user's file that is being imported for a function in it, if one is."""
    return _running[-1] if _running else None


def give(key: str, function: Callable[..., Any]) -> str:
    """Remember a callable for the runs of this process; returns the path that stands for it in the recipe."""
    name = getattr(function, "__name__", "")
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not name.isidentifier():
        what = name or type(function).__name__
        raise Refusal.at(
            key, f"{what} has no file and name that the recipe could keep", "give a function made with def"
        )
    function_path = f"{code.co_filename}:{name}"
    _given[function_path] = function
    return function_path


def load_by_position(path: Path, name: str, call: Sequence[str]) -> Callable[..., Any]:
    """The function `name` of the file, callable with `call` by position. Modules beside the file can be imported by
    it."""
    function = function_of(run_file(path), name, call, path)
    refuse_signature(function, name, call, by_name=False)
    return function


def function_of(module: ModuleType, name: str, call: Sequence[str], path: Path) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise Unloadable(f"has no {name}", f"its functions are: {', '.join(names) or 'none'}")
    if not callable(function):
        raise Unloadable(
            f"{name} is a {type(function).__name__}, not a function", f"write: def {name}({', '.join(call)})"
        )
    return function


def refuse_signature(function: Callable[..., Any], name: str, call: Sequence[str], *, by_name: bool) -> None:
    words = ", ".join(call)
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise Unloadable(f"{name} does not say what arguments it takes", f"write: def {name}({words})") from None
    try:
        if by_name:
            signature.bind(**dict.fromkeys(call))
        else:
            signature.bind(*call)
    except TypeError as error:
        raise Unloadable(f"{name} cannot be called with {words}: {error}", f"write: def {name}({words})") from None


def run_file(path: Path) -> ModuleType:
    """The module of a file, which is run once; modules beside it can be imported by it."""
    known = path.resolve(), path.stat().st_mtime_ns
    if known in _modules:
        return _modules[known]
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unloadable("is not a Python file", "name a file that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _running.append(path)
    try:
        with time_limit(LOAD_SECONDS, f"{path}: could not be imported in {LOAD_SECONDS:g} s"):
            spec.loader.exec_module(module)
    except TimeUp as over:
        why = f"could not be imported in {LOAD_SECONDS:g} s{line_of(over, str(path))}"
        raise Unloadable(why, "do its work in the function, not when the file is imported") from None
    except BaseException as error:  # noqa: BLE001 - whatever the user's file raises is what must be told
        raise Unloadable(f"cannot be imported: {told(error, str(path))}", "mend the file") from None
    finally:
        _running.remove(path)
    _modules[known] = module
    return module


def told(error: BaseException, path: str) -> str:
    """What an exception says at its end, on one line, and where in the user's file it was."""
    try:
        last = " ".join(traceback.format_exception_only(type(error), error)[-1].split())[:LONGEST_WHY]
    except BaseException:  # noqa: BLE001 - an exception of the user's own class may not be able to say what it is
        last = type(error).__name__
    return last + line_of(error, path)


def line_of(error: BaseException, path: str) -> str:
    """Where in the user's file it was; empty where it was not there."""
    frames = traceback.walk_tb(error.__traceback__)
    # The file may be known by another way to it.
    lines = [line for frame, line in frames if frame.f_code.co_filename in (path, str(Path(path).absolute()))]
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        lines.append(error.lineno)
    return f" ({Path(path).name} line {lines[-1]})" if lines else ""


# Functions of the user's own: found, checked, and limited in time. Any folder may import it.
#
# Nothing heavy is imported here: the processes must start in a moment.

__all__ = [
    "LONGEST_WHY",
    "OwnFunction",
    "Unloadable",
    "file_being_run",
    "give",
    "given",
    "is_function_path",
    "located",
    "only_here",
    "own_function",
    "told",
]
