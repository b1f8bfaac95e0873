"""tools/first_hour.sh, as a newcomer would run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from first_hours import run_hour


@pytest.mark.slow
@pytest.mark.parametrize("hour", ["first", "migration", "agents"])
def test_the_first_hour(tmp_path: Path, hour: str) -> None:
    run_hour(hour, tmp_path / "hour")
