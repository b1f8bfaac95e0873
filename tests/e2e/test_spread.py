"""Responses stay on a rank until the rank that trains on them has them: the numbers of one place, no more memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import spread_ranks
from commands import torchrun

pytestmark = pytest.mark.torchrun
OWN = "def advantage(signals):\n    return signals.scores_S - signals.rewards_K.mean()\n"


def spread(folder: Path, ranks: int) -> list[int]:
    """Bytes of responses that each rank holds, after all checks of `spread_ranks.py`."""
    (folder / "own.py").write_text(OWN)
    done = torchrun(folder, program=Path(spread_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stderr
    told = [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
    return [sum(one.values()) for one in told]


def test_the_numbers_are_those_of_one_place_and_memory_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """Twice the ranks with twice the prompts: each holds what it held."""
    two, four = spread(tmp_path, 2), spread(tmp_path, 4)
    assert max(four) <= 1.15 * max(two)
    # All of it is somewhere: no rank is nearly empty.
    assert min(four) >= 0.5 * max(four)


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    spread(tmp_path, 3)
