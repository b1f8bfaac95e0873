"""Scores of verl's reward rules against verl's own functions, on 10,000 texts per rule and version: half of them are
answers with small changes, half are random sequences of the marks that the rules read. Rules that run programs are
compared on fewer programs, because each of them starts processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import Any

import pytest

from lockstep.compat.verl.verl_rewards import reward_rules
from lockstep.reward.rules import rule_name
from lockstep.reward.verl_versions import NAMES, verl_score

from .peers import _entered, module
from .verl_reward_texts import VERSIONS, cases, prime_code, quiet, verl_function

pytestmark = pytest.mark.peers

TEXTS = 10_000
EVERY_VERSION = ("0.3.0.post1", "0.4.1", "0.6.0", "0.9.0", "0.9.1")


@pytest.mark.parametrize(("name", "version"), [(name, one) for name, versions in VERSIONS.items() for one in versions])
def test_every_score_is_verls(name: str, version: str) -> None:
    ours, theirs = verl_score(f"verl/{name}@{version}").score, verl_function(name, version)
    scores = set()
    for text, truth in cases(name, TEXTS, seed=len(name)):
        expected = quiet(theirs, text, truth)
        assert ours(text, truth) == expected, (text, truth)
        scores.add(expected)
    assert len(scores) == {"search_r1": 3, "geo3k": 4}.get(name, 2)


def test_every_rule_that_reads_text_is_compared() -> None:
    assert set(VERSIONS) == set(NAMES) - {"prime_code", "sandbox_fusion"}


def test_the_processes_of_prime_math_change_no_score() -> None:
    theirs, ours = verl_function("prime_math", "0.9.1", processes=True), verl_score("verl/prime_math@0.9.1").score
    for text, truth in cases("prime_math", 300, seed=5):
        assert ours(text, truth) == quiet(theirs, text, truth), (text, truth)


# Rules that run programs.

ADD = {"inputs": ["1 2\n", "3 4", "-1 1"], "outputs": ["3\n", "7", "0"]}
LINES = {"inputs": ["2\na\nb", "1\nx"], "outputs": ["a\nb\n", " x \n\n"]}
NUMBERS = {"inputs": ["1", "2"], "outputs": ["0.3333333\n", "1.0"]}
CALLED = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"}
KEYS = {"inputs": ['{"1": 2}'], "outputs": ['{"1": 2}'], "fn_name": "add"}
MANY = {"inputs": [str(one) for one in range(14)], "outputs": [str(one % 7) for one in range(14)]}
TESTS = (ADD, LINES, NUMBERS, CALLED, KEYS, MANY)
PROGRAMS = (
    "a, b = map(int, input().split())\nprint(a + b)",
    "import sys\na, b = map(int, sys.stdin.readline().split())\nprint(a + b)",
    "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))",
    "a, b = map(int, open(0).read().split())\nprint(a + b)",
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "print(3)",
    "def main():\n    a, b = map(int, input().split())\n    print(a + b)\nif __name__ == '__main__':\n    main()",
    "def add(a, b):\n    return a + b\nif __name__ == '__main__' and True:\n    print(add(*map(int, input().split())))",
    "class Solution:\n    def add(self, a, b):\n        return a + b",
    "def add(a, b):\n    return (a + b,)",
    "def add(a, b=0):\n    return a",
    "def add(a, b=0):\n    return {a}",
    "n = int(input())\nfor _ in range(n):\n    print(input())",
    "n = int(input())\nfor _ in range(n + 1):\n    print(input())",
    "from math import *\nn = int(input())\nprint(n / 3)",
    "n = int(input())\nprint(0.33333333 if n == 1 else '1')",
    "n = int(input())\nprint(n % 7)",
    "n = int(input())\nprint(n if n < 7 else -1)",
    "n = int(input())\nprint(n % 7, end='')\nimport sys\nsys.exit(1)",
    "n = int(input())\nprint(n % 7)\nexit()",
    "n = input()\nprint(1 / 0)",
    "this is not Python",
    "",
    "import subprocess\nprint(input())",
    "import os\nprint(os.getcwd())",
    "total = 0\ndef count():\n    global total\n    total += 1\ncount()\nprint(int(input()) % 7)",
    "text = '''\nx'''\nprint(text)",
    "import sys\nsys.stdout.write(input() + '\\n')\nsys.stdout.close()",
    "stdout.write(input())",
    "print('The answer is', Counter(input()).most_common(1)[0][0])",
)
FORMS = (
    "```python\n{}\n```",
    "Here:\n```python\nprint(1)\n```\n```python\n{}\n```\ndone",
    "{}",
    "```\n{}\n```",
    "```py\n{}",
)


def programs(step: int) -> list[tuple[str, str]]:
    """Every program with every test, of which each `step`th is taken."""
    found = []
    for place, (program, tests) in enumerate(product(PROGRAMS, TESTS)):
        form = FORMS[place % len(FORMS)] if place % 3 == 0 else FORMS[0]
        found.append((form.replace("{}", program), json.dumps(tests)))
    return found[::step]


@pytest.mark.parametrize(("version", "step"), [("0.3.0.post1", 4), ("0.4.1", 4), ("0.9.1", 1)])
def test_every_score_of_programs_is_verls(version: str, step: int) -> None:
    """180 programs with their tests for verl 0.9.1, 45 for the earlier versions."""
    ours, theirs = verl_score(f"verl/prime_code@{version}").score, prime_code(version)
    scores = set()
    for text, tests in programs(step):
        expected = quiet(theirs, text, tests)
        assert ours(text, tests) == expected, (text, tests)
        scores.add(expected)
    assert {0.0, 1.0} < scores


def test_a_program_that_does_not_end_scores_as_in_verl() -> None:
    text = "```python\nif input() == '1':\n    while True: pass\nprint(2)\n```"
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["2", "2"]})
    assert verl_score("verl/prime_code@0.9.1").score(text, tests) == quiet(prime_code("0.9.1"), text, tests) == 0.5


class RunCode(BaseHTTPRequestHandler):
    """The interface `/run_code` of SandboxFusion, which runs Python programs."""

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stdin = given["stdin"] or ""
        done = subprocess.run([sys.executable, "-c", given["code"]], input=stdin, capture_output=True, text=True)
        run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        answer = {"status": "Failed" if done.returncode else "Success", "compile_result": None, "run_result": run}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), RunCode)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/run_code"
    server.shutdown()


@pytest.mark.parametrize(("version", "step"), [("0.4.1", 4), ("0.9.1", 2)])
def test_every_score_of_sandbox_fusion_is_verls(version: str, step: int, service: str) -> None:
    """90 programs with their tests for verl 0.9.1, 45 for 0.4.1, and statements."""
    ours, peer = (
        verl_score(f"verl/sandbox_fusion@{version}").score,
        module("verl", version, "utils.reward_score.sandbox_fusion"),
    )
    statements = json.dumps({"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]})
    more = [("```python\ndef add(a, b):\n    return a + b\n```", statements)]
    scores = set()
    for text, tests in [*programs(step), *more]:
        expected = quiet(peer.compute_score, service, None, 1024, text, tests, True)[0]  # type: ignore[index]
        assert ours(text, tests) == expected, (text, tests)
        scores.add(expected)
    assert {0.0, 1.0} < scores


# Data sources.

FILES = {
    "gsm8k": "gsm8k", "math": "math", "math_reward": "math", "math_dapo": "math_dapo", "prime_math": "prime_math",
    "prime_code": "prime_code", "geo3k": "geo3k", "search_r1_like_qa_em": "search_r1",
}  # fmt: skip
SOURCES = (
    "openai/gsm8k", "gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math",
    "math_dapo", "math_dapo_reasoning", "aime", "aime24", "aime_2025/x", "AIME", "numina_aops_forum",
    "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads", "numina",
    "codecontests", "apps", "codeforces", "taco", "code", "hiyouga/geometry3k", "geo3k", "searchR1_nq",
    "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa", "searchR1_2wikimultihopqa", "searchR1_musique",
    "searchR1_bamboogle", "searchR1_x", "rlla", "arithmetic",
)  # fmt: skip


class Called(Exception):
    pass


def chosen_by_verl(version: str) -> dict[str, str | None]:
    chosen: dict[str, str | None] = {}
    with _entered("verl", version):
        from importlib import import_module

        package = import_module("verl.utils.reward_score")
        score = getattr(package, "default_compute_score", None) or package._default_compute_score
        sys.modules["pyext"] = type(sys)("pyext")
        vars(sys.modules["pyext"])["RuntimeModule"] = None
        for file, rule in FILES.items():
            try:
                found = import_module(f"verl.utils.reward_score.{file}")
            except ModuleNotFoundError:
                continue

            def called(*_: Any, rule: str = rule, **__: Any) -> None:
                raise Called(rule)

            found.compute_score = called  # type: ignore[attr-defined]
        for source in SOURCES:
            try:
                score(source, "", "")
            except Called as rule:
                chosen[source] = str(rule)
            except NotImplementedError:
                chosen[source] = None
        del sys.modules["pyext"]
    return chosen


@pytest.mark.parametrize("version", EVERY_VERSION)
def test_every_data_source_has_verls_rule(version: str) -> None:
    rules = reward_rules(version)
    ours = {source: rule_name(source, rules) for source in SOURCES}
    assert {source: name and name.partition("/")[2].partition("@")[0] for source, name in ours.items()} == (
        chosen_by_verl(version)
    )
