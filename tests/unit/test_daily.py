"""The marker `daily`: named cases, combinations with each value, and a name that no case has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import daily

CONFTEST = """
import pytest
from daily import mark_slow_cases

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    mark_slow_cases(items, config)
"""
TESTS = """
import pytest

@pytest.mark.daily("b", "c")
@pytest.mark.parametrize("one", ["a", "b", pytest.param("c", marks=pytest.mark.slow), "c"], ids=["a", "b", "long", "c"])
def test_named(one): ...

@pytest.mark.daily
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("two", [[4], {5: 6}])
def test_combined(one, two): ...

@pytest.mark.daily(every=2)
@pytest.mark.parametrize("one", [1, 2, 3])
def test_sampled(one): ...

def test_alone(): ...
"""


def collected(folder: Path, tests: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    daily\n    slow\n")
    (folder / "test_cases.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(daily.__file__).parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def names(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_cases_that_run_daily(tmp_path: Path) -> None:
    combined = ["test_combined[two0-1]", "test_combined[two1-2]", "test_combined[two0-3]"]
    assert names(collected(tmp_path, TESTS, "-m", "not slow")) == [
        "test_named[b]",
        "test_named[c]",
        *sorted(combined, key=lambda name: name.split("[")[1]),
        "test_sampled[1]",
        "test_sampled[3]",
        "test_alone",
    ]
    slow = names(collected(tmp_path, TESTS, "-m", "slow"))
    assert {"test_named[a]", "test_named[long]"} < set(slow)
    assert len(slow) == 2 + 3 + 1


@pytest.mark.slow
def test_a_name_that_no_case_has_is_an_error(tmp_path: Path) -> None:
    wrong = TESTS.replace('"b", "c")', '"b", "d")')
    done = collected(tmp_path, wrong)
    assert done.returncode == 4
    assert "test_named: `daily` names cases that do not exist: d" in done.stderr
    # One case by its name: the others are not collected, and nothing can be said of them.
    assert collected(tmp_path, wrong, "test_cases.py::test_named[b]").returncode == 0
