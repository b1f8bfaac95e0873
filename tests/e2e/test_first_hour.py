"""tools/first_hour.sh, as a newcomer would run it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from commands import search_path
from hang import HANG

SCRIPT = Path(__file__).parents[2] / "tools" / "first_hour.sh"


@pytest.mark.slow
def test_the_first_hour(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", SCRIPT, tmp_path / "hour"],
        env={**os.environ, "PATH": search_path(), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert done.stdout.rstrip().endswith("== the first hour is over, and all of it worked")
