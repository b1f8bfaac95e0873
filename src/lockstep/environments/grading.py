"""Grades code of the model: runs tests against it in a new sandbox, which no tool of the trajectory has touched.

The tests of a row are one of

- Python code, or a JSON list of Python statements: they run after the model's code, such as `assert add(1, 2) == 3`;
- `{"inputs": [...], "outputs": [...]}`: the standard input and the expected standard output of a program;
- the same with `"fn_name"`: the arguments and the expected result of a function, as JSON.

The expected outputs of the last two never enter the sandbox, so no program can read or fake them. Statements run in the
process of the model's code, which could read them or redefine what they compare.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.environments.sandbox import DOCKER, SandboxFailed, SandboxLimits, chosen_isolation, execute

# All tests of a row share these limits. The time is less than the smallest `reward.time_limit` of the rule `sandbox`.
LIMITS = SandboxLimits(seconds=6.0, output_bytes=4 * 2**20)
MOST_TESTS = 100
_FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")

# The program in the sandbox. It writes a first line before the model's code runs, reads its task after that, and writes
# one line per test.
HARNESS = r"""
import json, os, subprocess, sys
report = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
print("started", file=report, flush=True)
kind = sys.argv[1]
space = {"__name__": "solution"}
if kind != "program":
    given = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), space)
    task = json.load(given)
else:
    task = json.load(sys.stdin)
for test in task["tests"]:
    if kind == "program":
        done = subprocess.run([sys.executable, "-B", "solution.py"], input=test.encode(), capture_output=True)
        result = [done.returncode, done.stdout.decode("utf-8", "replace")]
    elif kind == "function":
        owner = space["Solution"]() if "Solution" in space else None
        result = getattr(owner, task["name"])(*test) if owner is not None else space[task["name"]](*test)
    else:
        exec(compile(test, "test", "exec"), space)
        result = task["token"]
    print(json.dumps(result), file=report, flush=True)
"""


@dataclass(frozen=True)
class Tests:
    """The tests of a row. `outputs` is None for statements."""

    kind: str
    """`statements`, `program` or `function`."""
    inputs: Sequence[Any]
    outputs: Sequence[Any] | None = None
    function: str = ""


def read_tests(ground_truth: str) -> Tests:
    """Reads the tests of a row. Raises ValueError with the reason if they cannot be used."""
    try:
        given = json.loads(ground_truth)
    except ValueError:
        given = [ground_truth]
    if isinstance(given, dict):
        inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name") or ""
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("needs the lists inputs and outputs, of equal length")
        kind = "function" if name else "program"
        expected: type = list if name else str
        if not all(isinstance(one, expected) for one in inputs):
            what = "a list of arguments" if name else "text"
            raise ValueError(f"has an input that is not {what}")
        tests = Tests(kind, inputs, outputs, str(name))
    elif isinstance(given, list) and all(isinstance(one, str) for one in given):
        tests = Tests("statements", given)
    else:
        raise ValueError("is neither Python code nor tests in JSON (`lockstep help environments`)")
    if not any(str(one).strip() or tests.outputs for one in tests.inputs):
        raise ValueError("has no tests")
    if len(tests.inputs) > MOST_TESTS:
        raise ValueError(f"has {len(tests.inputs)} tests, more than {MOST_TESTS}")
    if tests.kind == "statements":
        _refuse_broken(tests.inputs)
    return tests


def _refuse_broken(statements: Sequence[str]) -> None:
    for statement in statements:
        try:
            compile(statement, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is not Python code: {error}") from None


def extract_code(text: str) -> str:
    """Returns the last Python code block of a text; without code blocks, the whole text."""
    blocks = [match for match in _FENCED.finditer(text) if match[1].lower() in _PYTHON]
    return blocks[-1][2] if blocks else "" if _FENCED.search(text) else text


def grade(text: str, ground_truth: str, limits: SandboxLimits = LIMITS) -> float:
    """Returns 1.0 if the code in a text passes all tests of the ground truth, else 0.0. Raises `SandboxFailed` if the
    tests could not start, for which the code is not the reason."""
    tests, code = read_tests(ground_truth), extract_code(text)
    if not code.strip():
        return 0.0
    token = secrets.token_hex(16)
    task = json.dumps({"tests": list(tests.inputs), "name": tests.function, "token": token})
    isolation = chosen_isolation()
    python = "python3" if isolation.startswith(DOCKER) else sys.executable
    files = {"solution.py": code, "harness.py": HARNESS}
    done = execute([python, "-B", "harness.py", tests.kind], files, limits, stdin=task, isolation=isolation)
    started, _, results = done.stdout.partition("\n")
    if started != "started":
        raise SandboxFailed(f"the tests did not start in the sandbox {isolation}: {done.text}")
    return 1.0 if done.succeeded and _passed(results, tests, token) else 0.0


def _passed(lines: str, tests: Tests, token: str) -> bool:
    try:
        results = [json.loads(line) for line in lines.splitlines()]
    except ValueError:
        return False
    if tests.outputs is None:
        return results == [token] * len(tests.inputs)
    if len(results) != len(tests.outputs):
        return False
    pairs = zip(results, tests.outputs, strict=True)
    if tests.kind == "function":
        return all(result == output for result, output in pairs)
    return all(result[0] == 0 and _lines(result[1]) == _lines(str(output)) for result, output in pairs)


def _lines(text: str) -> list[str]:
    """Returns the lines of an output without white space at their ends and without empty last lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
