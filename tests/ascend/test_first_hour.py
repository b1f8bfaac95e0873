"""The first hour on an NPU: a first run, two devices, the usual mistakes, and the proof of docs/to-ascend.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from first_hours import run_hour


@pytest.mark.ascend
@pytest.mark.slow
def test_the_first_hour(tmp_path: Path) -> None:
    run_hour("ascend", tmp_path / "hour")
