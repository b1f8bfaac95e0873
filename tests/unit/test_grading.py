"""The rule `sandbox`: tests run against the model's code in a sandbox of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.environments.grading import MOST_TESTS, extract_code, grade, read_tests
from lockstep.environments.sandbox import NAMESPACES, SandboxLimits, why_unusable
from lockstep.errors import Refusal
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.rules import RULES
from lockstep.reward.scorer import RulePart
from lockstep.types import Failure, Origin, Question

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"
STATEMENTS = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0"])
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]})
PROGRAM = json.dumps({"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3", "7\n"]})
NAMED = SandboxLimits(seconds=60, output_bytes=2**20)

pytestmark = pytest.mark.skipif(bool(why_unusable(NAMESPACES)), reason=why_unusable(NAMESPACES))


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (ADD, STATEMENTS, 1.0),
        (ADD, "assert add(2, 2) == 4", 1.0),
        (ADD, CALLS, 1.0),
        ("```\nclass Solution:\n    def add(self, a, b): return a + b\n```", CALLS, 1.0),
        ("```python\nprint(sum(map(int, input().split())))\n```", PROGRAM, 1.0),
        (ADD.replace("a + b", "a - b"), STATEMENTS, 0.0),
        (ADD.replace("a + b", "abs(a + b)"), json.dumps(["assert add(1, 2) == 3", "assert add(-2, 1) == -1"]), 0.0),
        (ADD.replace("a + b", "a - b"), CALLS, 0.0),
        ("```python\nprint(3)\n```", PROGRAM, 0.0),
        ("```python\nprint(sum(map(int, input().split())))\nraise SystemExit(1)\n```", PROGRAM, 0.0),
        ("```python\ndef add(a, b:\n```", STATEMENTS, 0.0),
        ("", STATEMENTS, 0.0),
        # A program that ends before its tests, or that pretends to have passed them.
        ("```python\nimport sys\nsys.exit(0)\n```", STATEMENTS, 0.0),
        ("```python\nimport os\nos._exit(0)\n```", STATEMENTS, 0.0),
        ("```python\nprint('3')\nprint('3')\nimport os\nos._exit(0)\n```", CALLS, 0.0),
    ],
)
def test_code_scores_one_only_if_it_passes_all_tests(text: str, truth: str, score: float) -> None:
    assert grade(text, truth, NAMED) == score


def test_code_that_hangs_scores_zero() -> None:
    assert grade("```python\nwhile True: pass\n```", STATEMENTS, SandboxLimits(seconds=0.5)) == 0.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a\n```python\nx = 1\n```\nb\n```py\ny = 2\n```", "y = 2\n"),
        ("```bash\nls\n```", ""),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```text\noutput\n```", "x = 1\n"),
    ],
)
def test_the_last_python_block_is_the_code(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("", "has no tests"),
        ("assert (", "is not Python code"),
        ('{"inputs": ["1"], "outputs": []}', "of equal length"),
        ('{"inputs": [1], "outputs": ["1"]}', "not text"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}', "not a list of arguments"),
        ("[1, 2]", "neither Python code nor tests"),
        (json.dumps(["assert True"] * (MOST_TESTS + 1)), "more than"),
    ],
)
def test_unusable_tests_are_named(truth: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_tests(truth)
    assert why in str(RULES["sandbox"].truth_problem(truth))


def question(truth: str) -> Question:
    return Question(origin=Origin("rows.jsonl", 1), prompt=[], data_source="code", ground_truth=truth, extra_info={})


def test_the_rule_runs_in_a_process_that_can_be_killed(tmp_path: Path) -> None:
    part = RulePart(Reward(rules={"code": "sandbox"}, workers=1, time_limit=600), ["code"])
    try:
        good, bad = (part.submit(question(STATEMENTS), text) for text in (ADD, "```python\nadd = None\n```"))
        assert good.result() == {"rule": 1.0}
        assert bad.result() == {"rule": 0.0}
        assert isinstance(part.submit(question("[1]"), ADD).result(), Failure)
    finally:
        part.close()


def test_a_time_limit_that_the_rule_may_exceed_is_refused() -> None:
    with pytest.raises(Refusal) as refusal:
        RulePart(Reward(rules={"code": "sandbox"}, workers=1, time_limit=5), ["code"])
    assert [problem.where for problem in refusal.value.problems] == ["reward.time_limit"]
