"""Responses stay on a rank until the rank that trains on them has them: the numbers of one place, no more memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import spread_ranks
from commands import torchrun

pytestmark = pytest.mark.torchrun
OWN = "def advantage(signals):\n    return signals.scores_S - signals.rewards_K.mean()\n"


# What every rank knows of every response; of the tokens of responses there is nothing in it.
EVERYWHERE = re.compile(r"(prompts|summaries|learned\.\w+\.\w+_S)\b.*")


def spread(folder: Path, ranks: int) -> list[dict[str, dict[str, int]]]:
    """Bytes of the step that each rank holds by their field, for short and for long responses, after all checks of
    `spread_ranks.py`."""
    (folder / "own.py").write_text(OWN)
    done = torchrun(folder, program=Path(spread_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


def most(told: list[dict[str, dict[str, int]]]) -> dict[str, int]:
    """The most that any rank holds of each field of its share."""
    fields = {name for one in told for name in one["short"] if not EVERYWHERE.fullmatch(name)}
    return {name: max(one["short"].get(name, 0) for one in told) for name in fields}


def assert_length_is_unknown(told: list[dict[str, dict[str, int]]]) -> None:
    """What is everywhere does not know how long responses are."""
    for one in told:
        known = {name for name in one["short"] if EVERYWHERE.fullmatch(name)}
        assert "learned.experience.num_response_tokens_S" in known
        assert {name: one["short"][name] for name in known} == {name: one["long"].get(name) for name in known}


def assert_even(told: list[dict[str, dict[str, int]]]) -> None:
    """All of it is somewhere: no rank is nearly empty."""
    own = [sum(size for name, size in one["short"].items() if name in most(told)) for one in told]
    assert min(own) >= 0.5 * max(own)


@pytest.mark.slow
def test_the_numbers_are_those_of_one_place(tmp_path: Path) -> None:
    two = spread(tmp_path, 2)
    assert_even(two)
    assert_length_is_unknown(two)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """Twice the ranks with twice the prompts: each holds what it held, of each field."""
    two, four = spread(tmp_path, 2), spread(tmp_path, 4)
    before, after = most(two), most(four)
    # Some bytes for how many numbers there are; shares are never quite even.
    grown = {name: (before.get(name, 0), size) for name, size in after.items() if size > 1.2 * before.get(name, 0) + 64}
    assert grown == {}
    assert sum(after.values()) <= 1.15 * sum(before.values())
    assert_even(four)
    assert_length_is_unknown(four)


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    spread(tmp_path, 3)
