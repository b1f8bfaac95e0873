"""The page on a run of 10,000 steps, 200 metrics and 100,000 responses. Its times are printed, none is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from browser import find_chromium
from hang import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium found (on Debian: sudo apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]


def test_a_large_run() -> None:
    bench = Path(__file__).parents[2] / "bench" / "view.py"
    done = subprocess.run([sys.executable, bench, "--json"], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(json.dumps(found, indent=1))
    files = found["metrics.jsonl, MB"] + found["samples.jsonl, MB"]
    assert files > 150
    # No file is held in memory: the columns of the curves are, which are some of it.
    assert found["memory of the server at its peak, MB"] < files
