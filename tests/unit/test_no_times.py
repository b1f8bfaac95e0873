"""No test asserts a time: what a clock says tells of the machine and of what else runs on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_trees import parsed

TESTS = Path(__file__).parents[1]
CLOCKS = {
    *("perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "thread_time", "thread_time_ns"),
    *("monotonic", "monotonic_ns", "time", "time_ns"),
}
SECONDS = 120
"""A limit for what hangs is at least this: two minutes."""


def is_clock(node: ast.AST) -> bool:
    """A call of `time.monotonic`, of a bare `monotonic`, or of a page's `performance.now` in a script."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and "performance.now" in node.value
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr in CLOCKS and isinstance(called.value, ast.Name) and called.value.id == "time"
    return isinstance(called, ast.Name) and called.id in CLOCKS


def named(node: ast.AST) -> str | None:
    """`took` for `took`, `took[0]` and `self.took`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def targets(node: ast.AST) -> list[ast.AST]:
    """What a statement gives a value to, `took` of `took.append(...)` among them."""
    if isinstance(node, ast.Assign):
        return [inner for target in node.targets for inner in getattr(target, "elts", [target])]
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "add"):
        return [node.func.value]
    return []


def timed_names(tree: ast.AST) -> set[str]:
    """Names that hold what a clock said, or something made of it."""
    known: set[str] = set()
    while True:
        found = {
            name
            for node in ast.walk(tree)
            if targets(node) and any(is_clock(inner) or named(inner) in known for inner in ast.walk(node))
            for target in targets(node)
            if (name := named(target)) is not None
        }
        if found <= known:
            return known
        known |= found


def fakes_the_clock(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setattr"
        and any(isinstance(word, ast.Constant) and word.value in CLOCKS for word in node.args)
        for node in ast.walk(function)
    )


def asserted_times(tree: ast.Module) -> Iterator[int]:
    """Lines of assertions that hang on a clock."""
    for function in tree.body:
        if fakes_the_clock(function):
            continue
        timed = timed_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and any(is_clock(it) or named(it) in timed for it in ast.walk(node.test)):
                yield node.lineno


def short_limits(tree: ast.Module) -> Iterator[int]:
    """Lines with a limit of seconds for a process, a thread or an event."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "join"):
            limits += node.args[:1]
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value < SECONDS:
                yield node.lineno


def own_deadlines(tree: ast.Module) -> Iterator[int]:
    """Lines of `settings` that set a deadline, or put the check for slow examples back."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and named(node.func) == "settings":
            words = {word.arg: word.value for word in node.keywords}
            deadline = words.get("deadline", ast.Constant(None))
            if "suppress_health_check" in words or not (isinstance(deadline, ast.Constant) and deadline.value is None):
                yield node.lineno


# Of a rule: what finds it, what stands in each file that can break it, and what to do instead.
RULES = {
    "clock": (
        asserted_times,
        re.compile(rf"\b({'|'.join(CLOCKS)})\(|performance\.now"),
        "an assertion hangs on a clock: count the work, or move it to bench/",
    ),
    "limit": (short_limits, re.compile(r"timeout|\.wait\(|\.join\("), "a limit for what hangs is minutes: hang.HANG"),
    "deadline": (own_deadlines, re.compile(r"settings\("), "tests/conftest.py settles this for all tests"),
}


@pytest.mark.xdist_group("source trees")
@pytest.mark.parametrize("rule", RULES)
def test_no_time_is_asserted(rule: str) -> None:
    find, words, advice = RULES[rule]
    files = [file for file in sorted(TESTS.rglob("*.py")) if words.search(file.read_text(encoding="utf-8"))]
    assert files
    found = [f"{file.relative_to(TESTS)}:{line}" for file in files for line in find(parsed(file))]
    assert found == [], advice


def examples() -> Iterator[object]:
    """Of a rule: code, and the lines on which it must be found, which end with `# FOUND`.

    In a file of their own, so that nobody who searches the tests for such code finds them.
    """
    text = (Path(__file__).parent / "data" / "asserted_times.txt").read_text(encoding="utf-8")
    for part in text.split("=== ")[1:]:
        title, _, code = part.partition("\n")
        rule, _, about = title.partition(": ")
        lines = [number for number, line in enumerate(code.splitlines(), 1) if line.endswith("# FOUND")]
        yield pytest.param(rule, code, lines, id=about.replace(" ", "-"))


@pytest.mark.parametrize(("rule", "code", "lines"), examples())
def test_what_breaks_a_rule_is_found(rule: str, code: str, lines: list[int]) -> None:
    find, words, _ = RULES[rule]
    assert words.search(code) or not lines
    assert list(find(ast.parse(code))) == lines
