"""verl's rule `prime_code`: runs the tests of a row against the code in a response, in a sandbox.

The ground truth is `{"inputs": [...], "outputs": [...]}`: the standard input and output of a program, as text; with
`"fn_name"`, the arguments (one JSON value per line) and the result of a function, as JSON text. The score is 1 if all
tests pass in one process. Otherwise each of the first 10 tests runs in a process of its own, always as a program (verl
drops `fn_name` there), and the score is the share of those that pass.

The program runs as verl runs it: as the body of a function in a module that has imported much of the standard library,
with replaced `open`, `sys.stdin` and `sys.stdout`. Its results are compared outside of the sandbox, so no program can
read the expected outputs. verl has no limit of memory and no sandbox.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.environments.sandbox import DOCKER, SandboxFailed, SandboxLimits, chosen_isolation, execute

COUNTED = 10  # tests that count if not all tests pass
_PATIENCE = 20.0  # for the start and the end of a sandbox
_MEMORY_MB, _OUTPUT_BYTES = 4096, 2**26
_MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
            "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
STAR_IMPORTS = "".join(
    [
        *(f"from {name} import *\n" for name in (*_MODULES, "builtins", "typing")),
        *(f"import {name}\n" for name in _MODULES),
    ]
)
_PRELUDE = f"{STAR_IMPORTS}sys.setrecursionlimit(6*10**5)\n"


@dataclass(frozen=True)
class PrimeCode:
    """What differs between the versions of verl."""

    single_seconds: int = 10
    """Time limit of a test in a process of its own (0.3: 5)."""
    alarm: bool = True
    """Whether a test is stopped at its limit (from 0.4 on), not one second later."""
    hidden: tuple[str, ...] = ("subprocess", "ctypes")
    """Modules that the program cannot import (0.9)."""


ALL_SECONDS = 5  # time limit of each test if they share a process
# The harness in the sandbox. It runs each check in a process of its own, and writes one line for each check: a list
# with the result of each test that ended: the text that a program wrote, or the encoded value of a function.
HARNESS = r"""
import asyncio, builtins, faulthandler, io, json, os, select, shutil, signal, subprocess, sys, time, types
from unittest.mock import mock_open, patch
try:
    import numpy
except ImportError:
    pass
report = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
print("started", file=report, flush=True)
task = json.load(sys.stdin)
GONE = {
    os: "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
    "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir",
    shutil: "rmtree move chown", subprocess: "Popen", builtins: "exit quit help",
}
HIDDEN = ["ipdb", "joblib", "resource", "psutil", "tkinter", *task["hidden"]]


def guard():
    faulthandler.disable()
    os.environ["OMP_NUM_THREADS"] = "1"
    for owner, names in GONE.items():
        for name in names.split():
            setattr(owner, name, None)
    for name in HIDDEN:
        sys.modules[name] = None


def encoded(value):
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", [encoded(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key), encoded(one)] for key, one in value.items()]]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return ["value", kind(value)]
    return ["value", None]


def with_input(program, text):
    lines, stdin = iter(text.split("\n")), io.StringIO(text)
    sys.stdout = written = io.StringIO()
    written.close = lambda x: 1
    reads = {"readline": lambda *_: next(lines), "readlines": lambda *_: text.split("\n"), "read": lambda *_: text}
    with patch("builtins.open", mock_open(read_data=text)), patch.object(sys, "stdin", stdin):
        with patch.multiple(stdin, **reads):
            try:
                program()
            except SystemExit:
                pass
    return written.getvalue()


def with_arguments(function, lines):
    arguments = [json.loads(line) for line in lines.split("\n")]
    if arguments and isinstance(arguments[0], dict):
        try:
            arguments = [{int(key): one for key, one in arguments[0].items()}]
        except Exception:
            pass
    result = function(*arguments)
    json.dumps(result)
    return encoded(result)


def check(tests, seconds, write, say):
    guard()
    alarm = signal.alarm if task["alarm"] else lambda seconds: None
    alarm(seconds)
    module = types.ModuleType("tmp_sol")
    exec(compile(task["code"], "<string>", "exec"), module.__dict__)
    sys.modules["tmp_sol"] = module
    owner = module.Solution() if task["class"] else module
    alarm(0)
    function = getattr(owner, task["name"])
    for test in tests:
        alarm(seconds)
        result = (with_input if task["program"] else with_arguments)(function, test)
        alarm(0)
        write(say(result) + "\n")


def child(tests, seconds, end):
    out = os.fdopen(end, "w")
    leave, dumps = os._exit, json.dumps
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(os.devnull, "w"), open(os.devnull, "w")
        report.close()
        check(tests, seconds, out.write, dumps)
    finally:
        try:
            out.flush()
        finally:
            leave(0)


def results(tests, seconds):
    start, end = os.pipe()
    process = os.fork()
    if not process:
        child(tests, seconds, end)
    os.close(end)
    deadline, read = time.monotonic() + seconds + 1, b""
    while (left := deadline - time.monotonic()) > 0 and select.select([start], [], [], left)[0]:
        piece = os.read(start, 2**16)
        if not piece:
            break
        read += piece
    os.close(start)
    try:
        os.kill(process, signal.SIGKILL)
    except OSError:
        pass
    os.waitpid(process, 0)
    found = []
    for line in read.decode("utf-8", "replace").split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


for tests in task["checks"]:
    print(json.dumps(results(tests, task["seconds"])), file=report, flush=True)
"""


def prime_code_text(text: str) -> str:
    """Returns the code that verl takes from a response: the last block that starts with three backquotes and `python`,
    or the text up to the first three backquotes."""
    return text.split("```python")[-1].split("```")[0]


def prime_code_score(text: str, ground_truth: str, version: PrimeCode) -> float:
    """Returns the score of a response. Raises `SandboxFailed` if the tests could not start."""
    code = prime_code_text(text)
    try:
        tests = json.loads(ground_truth)
        inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0.0
    if _all_pass(code, inputs, outputs, name, version):
        return 1.0
    if len(outputs) < len(inputs):
        return 0.0
    pairs = list(zip(inputs, outputs, strict=False))[:COUNTED]
    usable = [pair for pair in pairs if all(isinstance(one, str) for one in pair)]
    runs = _run(as_program(code), "code", [[given] for given, _ in usable], version.single_seconds, version)
    passed = [len(run) == 1 and same_output(run[0], wanted) for run, (_, wanted) in zip(runs, usable, strict=True)]
    return sum(passed) / max(1, len(pairs))


def _all_pass(code: str, inputs: list[Any], outputs: list[Any], name: str | None, version: PrimeCode) -> bool:
    if len(outputs) < len(inputs) or not all(isinstance(one, str) for one in (*inputs, *outputs[: len(inputs)])):
        return False
    if name is None:
        (done,) = _run(as_program(code), "code", [inputs], ALL_SECONDS, version)
        return len(done) == len(inputs) and all(map(same_output, done, outputs))
    try:
        wanted = [json.loads(one) for one in outputs[: len(inputs)]]
    except ValueError:
        return False
    (done,) = _run(_PRELUDE + code, name, [inputs], ALL_SECONDS, version, owned="class Solution" in code)
    try:
        return len(done) == len(inputs) and all(map(same_result, map(_decoded, done), wanted))
    except (ValueError, TypeError, RecursionError):
        return False


def _run(
    code: str, name: str, checks: Sequence[Sequence[str]], seconds: int, version: PrimeCode, owned: bool | None = None
) -> list[list[Any]]:
    """Runs each check in a process of its own. Returns the results of its tests, up to the first that failed. `owned`:
    whether the function is a method of the class Solution; None for a program."""
    task = {
        "code": code, "name": name, "checks": checks, "seconds": seconds, "alarm": version.alarm,
        "hidden": version.hidden, "program": owned is None, "class": bool(owned),
    }  # fmt: skip
    isolation = chosen_isolation()
    python = "python3" if isolation.startswith(DOCKER) else sys.executable
    limits = SandboxLimits((seconds + 1) * len(checks) + _PATIENCE, _MEMORY_MB, output_bytes=_OUTPUT_BYTES)
    done = execute(
        [python, "-B", "harness.py"], {"harness.py": HARNESS}, limits, stdin=json.dumps(task), isolation=isolation
    )
    started, _, lines = done.stdout.partition("\n")
    if started != "started":
        raise SandboxFailed(f"the tests did not start in the sandbox {isolation}: {done.text}")
    runs: list[list[Any]] = []
    for line in lines.splitlines()[: len(checks)]:
        try:
            found = json.loads(line)
        except ValueError:
            found = []
        runs.append(found if isinstance(found, list) else [])
    return runs + [[]] * (len(checks) - len(runs))


def as_program(code: str) -> str:
    """Returns the module with the function `code` that verl makes of a program. The imports before the first other line
    stay outside of the function; the block `if __name__ == "__main__"` at the end is unpacked."""
    try:
        *before, last = ast.parse(code).body
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            code = ast.unparse(before) + "\n" + ast.unparse(last.body)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001, S110 - code that is not Python fails in the sandbox
        pass
    written, started = [_PRELUDE], False
    for line in code.split("\n"):
        if not started and not line.startswith(("from ", "import ")):
            written.append("stdin = sys.stdin\nstdout = sys.stdout\ndef code():\n")
            started = True
        written.append(("\t" if started else "") + line + "\n")
    return "".join(written)


def same_output(written: Any, wanted: str) -> bool:
    """Compares the output of a program with the expected one: as text without surrounding space, then line by line
    without empty lines, then as one number per line."""
    if not isinstance(written, str):
        return False
    lines = written.splitlines()
    if wanted.strip() in ("\n".join(lines).strip(), "\n".join(line.strip() for line in lines).strip()):
        return True
    expected = [line.strip() for line in wanted.split("\n") if line]
    filled = [line for line in lines if line]
    if expected in (lines, filled):
        return True
    if len(filled) != len(expected) or all(line.isdigit() for line in (*filled, *expected)):
        return False
    import numpy as np

    try:
        return bool(np.allclose([float(line) for line in filled], [float(line) for line in expected]))
    except ValueError:
        return False


def same_result(result: Any, wanted: Any) -> bool:
    """Compares the result of a function with the expected one, or with its first element."""
    if isinstance(wanted, dict):
        wanted = _with_integers(wanted)
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        changed = _with_integers(wanted[0])
        wanted = changed if isinstance(changed, list) else wanted
    result = list(result) if isinstance(result, tuple) else result
    if result == wanted:
        return True
    if not isinstance(wanted, list) or not wanted:
        return False
    if result == wanted[0]:
        return True
    pairs = isinstance(result, list) and result and isinstance(result[0], tuple)
    return (
        bool(pairs)
        and all(isinstance(one, (list, tuple, str, dict)) for one in result)
        and ([list(one) for one in result] == wanted[0])
    )


def _with_integers(given: dict[str, Any]) -> Any:
    """Returns a list of the dictionary with integers as keys, which JSON cannot represent; else the dictionary."""
    try:
        return [{int(key): value for key, value in given.items()}]
    except ValueError:
        return given


def _decoded(encoded: Any) -> Any:
    kind, content = encoded
    if kind == "dict":
        return {_decoded(key): _decoded(value) for key, value in content}
    if kind == "value":
        return content
    items = [_decoded(one) for one in content]
    return tuple(items) if kind == "tuple" else items


def bad_code_tests(ground_truth: str) -> str | None:
    """Returns why all responses to a row would score 0, or None."""
    try:
        tests = json.loads(ground_truth)
        inputs, outputs = tests["inputs"], tests["outputs"]
    except (ValueError, TypeError, KeyError):
        return 'is not an object with the keys "inputs" and "outputs"'
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) > len(outputs) or not inputs:
        return "needs the lists inputs and outputs, of equal length"
    if not all(isinstance(one, str) for one in (*inputs, *outputs)):
        return "has an input or an output that is not text"
    return None
