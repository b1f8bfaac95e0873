"""verl's rule `sandbox_fusion`: the score that verl computes from the service SandboxFusion (`/run_code`), with
lockstep's own sandbox in place of the service.

Each of the first 10 tests runs the program in a process of its own, for at most 10 seconds. A test passes if the
program ends without an error and writes the expected output, apart from line breaks at the end. The score is the share
of tests that pass. The ground truth has the lists `inputs` and `outputs`; with `fn_name`, the inputs are arguments of a
function, one JSON value per line. From 0.6 on, `assert_case` may hold statements that run after the program.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.environments.sandbox import SandboxLimits, run_python
from lockstep.reward.verl_code import COUNTED, STAR_IMPORTS

LIMITS = SandboxLimits(seconds=10.0, memory_mb=1024, output_bytes=2**24)
# Calls the function with the arguments of the standard input and prints its result. An error is reported on standard
# error only: the program ends normally, without output.
_CALL = """
def _called():
    import json, sys, traceback
    given = sys.stdin.read()
    try:
        arguments = [json.loads(line) for line in given.split("\\n")] if given.strip() else []
        function = globals().get(_NAME)
        if _NAME not in globals() and "Solution" in globals():
            function = getattr(globals()["Solution"](), _NAME)
        if not function:
            return
        result = function(*arguments)
    except Exception:
        sys.stderr.write(traceback.format_exc())
        return
    plain = isinstance(result, (dict, list, tuple, bool)) or result is None
    print(json.dumps(result) if plain else str(result))

if __name__ == "__main__":
    _called()
"""


def fusion_code(text: str) -> str | None:
    """Returns the code of the last block that starts with three backquotes and `python`, or of the first block; None
    without a block."""
    if "```python" in text:
        return text.split("```python")[-1].split("```")[0]
    if "```" not in text:
        return None
    code = text.split("```")[1]
    language, line, rest = code.partition("\n")
    return rest if line and language.strip().isalpha() else code


def fusion_score(text: str, ground_truth: str, *, statements: bool) -> float:
    """Returns the share of the tests that pass. `statements`: whether `assert_case` is read."""
    code = fusion_code(text)
    if code is None or bad_fusion_tests(ground_truth, statements=statements):
        return 0.0
    inputs, outputs, after, name = _tests(json.loads(ground_truth), statements)
    cases = list(zip(inputs, outputs, after, strict=True))[:COUNTED]
    return sum(_passes(f"{code}{end}", given, wanted, name, statements) for given, wanted, end in cases) / len(cases)


def _passes(code: str, given: Any, wanted: Any, name: str | None, statements: bool) -> bool:
    if name:
        code = f"import traceback\n{STAR_IMPORTS}\n{code}\n_NAME = {name!r}\n{_CALL}"
    done = run_python(code, LIMITS, stdin="" if given is None else str(given))
    if not done.succeeded:
        return False
    return (statements and wanted is None) or done.stdout.rstrip("\n") == str(wanted).rstrip("\n")


def _tests(given: dict[str, Any], statements: bool) -> tuple[list[Any], list[Any], list[str], str | None]:
    cases = given.get("assert_case") if statements else None
    if isinstance(cases, list):
        given = {"inputs": [""] * len(cases), "outputs": [None] * len(cases), **given}
    inputs = given["inputs"]
    after = [f"\n\n{one}" for one in cases] if isinstance(cases, list) else [""] * len(inputs)
    return inputs, given["outputs"], after, given.get("fn_name")


def bad_fusion_tests(ground_truth: str, *, statements: bool) -> str | None:
    """Returns why all responses to a row would score 0, or None."""
    try:
        inputs, outputs, after, _ = _tests(json.loads(ground_truth), statements)
    except (ValueError, TypeError, KeyError, AttributeError):
        return 'is not an object with the keys "inputs" and "outputs"'
    if not isinstance(inputs, list) or not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return "needs the lists inputs and outputs, of equal length"
    return None if len(after) == len(inputs) else "needs a statement in assert_case for each input"
