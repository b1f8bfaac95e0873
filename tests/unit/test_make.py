"""`make test` with stand-ins for its parts: all run, and the exit status tells."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make found")


def script(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("pytest_ends", "lint_ends", "ascend_ends", "failed"),
    [
        (0, 0, 0, ""),
        (1, 0, 0, " pytest"),
        (0, 1, 0, " lint"),
        (0, 0, 1, " test-ascend"),
        (1, 1, 1, " pytest lint test-ascend"),
    ],
)
def test_all_parts_run_and_the_status_tells(
    tmp_path: Path, pytest_ends: int, lint_ends: int, ascend_ends: int, failed: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "constraints-common.txt"):
        (tmp_path / name).touch()
    script(tmp_path / ".venv/bin/python", f"echo ran pytest; exit {pytest_ends}")
    script(tmp_path / "tools/test_ascend.sh", f"echo ran ascend; exit {ascend_ends}")
    script(tmp_path / ".venv/bin/mypy", f"echo ran mypy; exit {lint_ends}")
    for name in (".venv/bin/pip", ".venv/bin/ruff", "tools/install_chromium.sh", ".venv/.test"):
        script(tmp_path / name, "exit 0")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("ran")] == [
        "ran pytest",
        "ran mypy",
        "ran ascend",
    ]
    assert (done.returncode == 0) == (not failed), done.stdout + done.stderr
    assert (f"make test: FAILED:{failed}\n" in done.stdout) == bool(failed)


@pytest.mark.xdist_group("whole")
def test_a_group_is_told_to_whoever_deals_the_tests_out(request: pytest.FixtureRequest) -> None:
    """By the end of a test's name, as pytest-xdist reads it: what a group shares is then set up once."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process, or tests that are dealt out one by one")
    assert request.node.nodeid.endswith("@whole")
