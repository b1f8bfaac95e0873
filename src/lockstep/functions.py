"""Finds, loads and checks user functions (`path/to/file.py:name` or a Python callable), and limits their run time."""

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

# If the timer signal does not stop a user function, the run is ended this many seconds after the time limit.
GRACE_SECONDS = 30.0
# The timer signal is repeated at this interval, in case a user function catches every exception.
AGAIN_SECONDS = 5.0
# Exit code of the run if a user function could not be stopped.
ENDED = 2


class TimeUp(BaseException):
    """The time limit of a user function is exceeded. This is a BaseException, so that `except Exception` in user code
    does not catch it."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Context manager that raises `TimeUp` in its block after `seconds`, by a timer signal.

    A signal cannot interrupt code that does not return from a native library. If the code does not return, a second
    timer ends the run with `message`.
    """
    last = threading.Timer(seconds + GRACE_SECONDS, _end_run, (message,))
    last.daemon = True
    last.start()
    try:
        # Only the main thread gets signals. In other threads, only the second timer limits the time.
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
            # Restart an outer timer.
            signal.setitimer(signal.ITIMER_REAL, *earlier)
    finally:
        last.cancel()


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeUp


def _end_run(message: str) -> None:
    """Prints the message and the stacks of all threads, and ends the process."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(ENDED)


LONGEST_WHY = 300
# Time limit for importing a user file. The limit is long, because the file may import torch from a slow disk.
LOAD_SECONDS = 120.0

# Callables passed from Python, keyed by their path in the recipe.
_given: dict[str, Callable[..., Any]] = {}
# Imported modules of user files, by path and modification time. Two functions of one user file therefore share its
# globals.
_modules: dict[tuple[Path, int], ModuleType] = {}
# User files that are being imported. If one user file imports another, the imported file comes last.
_running: list[Path] = []


class Unloadable(Exception):
    """A user function cannot be loaded. `why` is the reason, and `remedy` says how to fix it."""

    def __init__(self, why: str, remedy: str, *, code: str):
        super().__init__(why)
        self.why, self.remedy, self.code = why, remedy, code


@dataclass(frozen=True)
class UserFunction:
    """A user function and the recipe key that names it. Exceptions of the function are reported with file, name and
    line.

    `seconds` is the time limit of a call (None: this class sets no limit), and `limit` is the recipe key of the time
    limit.
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
            raise Refusal([self._late(source_line(over, file))]) from over
        except Exception as error:
            raise Refusal.at(
                self.where, f"raised {describe_error(error, file)}", "fix the function", code="function-raised"
            ) from error

    def with_function(self, function: Callable[..., Any]) -> UserFunction:
        """Returns a copy with another function, such as a wrapper, and the same key and time limit."""
        return replace(self, function=function)

    def _limited(self) -> AbstractContextManager[None]:
        return nullcontext() if self.seconds is None else time_limit(self.seconds, str(self._late("")))

    def _late(self, line: str) -> Problem:
        return Problem(
            self.where,
            f"did not return within {self.seconds:g} s ({self.limit}){line}",
            f"make the function faster, or raise {self.limit}; the last checkpoint is unchanged",
            code="function-too-slow",
        )

    def refuse(self, why: str, remedy: str, *, code: str) -> Refusal:
        return Refusal.at(self.where, why, remedy, code=code)


def is_function_path(value: str) -> bool:
    """Returns whether a recipe value is a function path (`file.py:name`) and not the name of a built-in."""
    return ":" in value


def locate(function_path: str, key: str) -> tuple[Path, str]:
    """Splits `path/to/file.py:name` into file and name. Raises an error if the file does not exist."""
    path, _, name = function_path.rpartition(":")
    if not path or not name.isidentifier():
        raise Refusal.at(
            key, f"{function_path!r} is not a function path", "write path/to/file.py:name", code="invalid-function"
        )
    file = Path(path).expanduser().absolute()
    if path.startswith("<") or "ipykernel_" in path:
        why = f"{function_path} was defined in a notebook or an interactive session, so no other process can load it"
        raise Refusal.at(key, why, "put the function into a file: path/to/file.py:name", code="invalid-function")
    if not file.is_file():
        raise Refusal.at(
            key, f"file {path} does not exist", "give the path relative to the working directory", code="no-such-file"
        )
    return file, name


def load_user_function(
    function_path: str, key: str, call: Sequence[str], seconds: float | None = None, limit: str = ""
) -> UserFunction:
    """Loads the function of `function_path` and checks that it accepts the positional arguments `call`.

    `seconds` is the time limit of a call, which the recipe key `limit` sets.
    """
    if function_path in _given:
        function = _given[function_path]
    else:
        file, name = locate(function_path, key)
        try:
            return UserFunction(key, function_path, load_by_position(file, name, call), seconds, limit)
        except Unloadable as error:
            raise Refusal.at(f"{key} {function_path}", error.why, error.remedy, code=error.code) from error
    try:
        check_signature(function, function_path.rpartition(":")[2], call, by_name=False)
    except Unloadable as error:
        raise Refusal.at(f"{key} {function_path}", error.why, error.remedy, code=error.code) from error
    return UserFunction(key, function_path, function, seconds, limit)


def is_registered(function_path: str) -> bool:
    """Returns whether the path refers to a callable that was registered in this process."""
    return function_path in _given


def local_callable(function_path: str) -> Callable[..., Any] | None:
    """Returns the registered callable if no other process can load it, because it is defined in the main script, in a
    notebook, or inside another function. Otherwise returns None."""
    function = _given.get(function_path)
    if function is None:
        return None
    file, _, name = function_path.rpartition(":")
    module = sys.modules.get(function.__module__)
    importable = module is not None and function.__module__ != "__main__" and Path(file).is_file()
    return None if importable and getattr(module, name, None) is function else function


def running_file() -> Path | None:
    """Returns the user file that is being imported, if any."""
    return _running[-1] if _running else None


def register_callable(key: str, function: Callable[..., Any]) -> str:
    """Registers a callable for the runs of this process. Returns the function path that the recipe stores."""
    name = getattr(function, "__name__", "")
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not name.isidentifier():
        what = name or type(function).__name__
        raise Refusal.at(
            key,
            f"{what} has no file and function name that the recipe could store",
            "give a function defined with def",
            code="invalid-function",
        )
    function_path = f"{code.co_filename}:{name}"
    _given[function_path] = function
    return function_path


def class_path(key: str, kind: type) -> str:
    """Returns the path of a class that other processes can load: `package.module:Class`, or `path/to/file.py:Class` for
    a class of a script or of a module that is in no package."""
    name, module = kind.__qualname__, kind.__module__
    if "." in module and name.isidentifier():
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        file = None
    if file is None or not name.isidentifier() or not Path(file).is_file():
        raise Refusal.at(
            key,
            f"no other process can load {name}, because it is defined in a notebook or inside a function",
            "put the class into a file, outside of functions",
            code="invalid-function",
        )
    return f"{file}:{name}"


def load_by_position(path: Path, name: str, call: Sequence[str]) -> Callable[..., Any]:
    """Loads the function `name` of a user file and checks that it accepts the positional arguments `call`. The file can
    import modules of its own folder."""
    function = get_function(run_file(path), name, call, path)
    check_signature(function, name, call, by_name=False)
    return function


def get_function(module: ModuleType, name: str, call: Sequence[str], path: Path) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise Unloadable(
            f"has no function {name}",
            f"the functions of the file are: {', '.join(names) or 'none'}",
            code="invalid-function",
        )
    if not callable(function):
        raise Unloadable(
            f"{name} is a {type(function).__name__}, not a function",
            f"write: def {name}({', '.join(call)})",
            code="invalid-function",
        )
    return function


def check_signature(function: Callable[..., Any], name: str, call: Sequence[str], *, by_name: bool) -> None:
    words = ", ".join(call)
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise Unloadable(
            f"the signature of {name} cannot be read", f"write: def {name}({words})", code="invalid-function"
        ) from None
    try:
        if by_name:
            signature.bind(**dict.fromkeys(call))
        else:
            signature.bind(*call)
    except TypeError as error:
        raise Unloadable(
            f"{name} cannot be called with the arguments {words}: {error}",
            f"write: def {name.rpartition('.')[2]}({words})",
            code="invalid-function",
        ) from None


def run_file(path: Path) -> ModuleType:
    """Imports a user file once. The file can import modules of its own folder."""
    key = path.resolve(), path.stat().st_mtime_ns
    if key in _modules:
        return _modules[key]
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unloadable("is not a Python file", "give a file that ends with .py", code="invalid-function")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _running.append(path)
    try:
        with time_limit(LOAD_SECONDS, f"{path}: could not be imported in {LOAD_SECONDS:g} s"):
            spec.loader.exec_module(module)
    except TimeUp as over:
        why = f"could not be imported in {LOAD_SECONDS:g} s{source_line(over, str(path))}"
        raise Unloadable(why, "move the work from the import into the function", code="import-failed") from None
    except BaseException as error:  # noqa: BLE001 - a user file may raise anything, and it is reported
        raise Unloadable(
            f"cannot be imported: {describe_error(error, str(path))}", "fix the file", code="import-failed"
        ) from None
    finally:
        _running.remove(path)
    _modules[key] = module
    return module


def describe_error(error: BaseException, path: str) -> str:
    """Returns the message of an exception on one line, with its line number in the user file."""
    try:
        last = " ".join(traceback.format_exception_only(type(error), error)[-1].split())[:LONGEST_WHY]
    except BaseException:  # noqa: BLE001 - the __str__ of a user exception may fail
        last = type(error).__name__
    # A message may have lone surrogates, for example in the name of a file.
    return last.encode(errors="backslashreplace").decode() + source_line(error, path)


def source_line(error: BaseException, path: str) -> str:
    """Returns the line number of an error in the user file, as text, or an empty string if the error occurred in other
    code."""
    frames = traceback.walk_tb(error.__traceback__)
    # Tracebacks name the user file by its relative or absolute path.
    lines = [line for frame, line in frames if frame.f_code.co_filename in (path, str(Path(path).absolute()))]
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        lines.append(error.lineno)
    return f" ({Path(path).name} line {lines[-1]})" if lines else ""


__all__ = [
    "LONGEST_WHY",
    "Unloadable",
    "UserFunction",
    "class_path",
    "describe_error",
    "is_function_path",
    "is_registered",
    "load_user_function",
    "local_callable",
    "locate",
    "register_callable",
    "running_file",
]
