"""A session of tests has its own cache folder, which its workers share, and removes it at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "workers"])
def test_no_cache_folder_is_left(tmp_path: Path, workers: list[str]) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    # The variables of a worker of this session are not those of the inner session.
    for name in ("LOCKSTEP_CACHE", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        environment.pop(name, None)
    words = ["-q", "-p", "no:cacheprovider", *workers, "tests/unit/test_no_times.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert [path.name for path in tmp_path.glob("lockstep-cache-*")] == []
