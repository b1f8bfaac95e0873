"""docs/verl-keys.md and docs/openrlhf-keys.md show the maps that the converters run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_of_keys_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "migration_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in ("verl-keys.md", "openrlhf-keys.md"):
        assert (ROOT / "docs" / page).read_text(encoding="utf-8").count("\n| `") > 100
