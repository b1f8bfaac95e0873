"""Optimizers of several ranks: the updates and states of one process, and files that any number of ranks reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import optimizer_ranks
from commands import torchrun

pytestmark = pytest.mark.torchrun


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_optimizers_update_as_one_process(tmp_path: Path, ranks: int) -> None:
    done = torchrun(tmp_path / "state", program=Path(optimizer_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("lion") == ranks
