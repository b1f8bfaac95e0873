"""The examples run as a user runs them, and each learns what it says."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest

from commands import warm_python
from hang import HANG

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, model: Path, pattern: str) -> list[float]:
    """The numbers that an example prints, line by line."""
    command = [*warm_python(), str(EXAMPLES / name), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(pattern, done.stdout)]


@pytest.mark.slow
def test_sft_learns_its_rows_by_heart(tiny_folder: Path) -> None:
    assert printed("sft.py", tiny_folder, r"(\d+) of 9 answers are right") == [9.0]


def test_grpo_raises_its_own_reward(tiny_folder: Path) -> None:
    rewards = printed("grpo.py", tiny_folder, r"reward ([\d.]+)")
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
    assert len((EXAMPLES / "grpo.py").read_text().splitlines()) <= 40


def test_dpo_starts_at_log_2_and_comes_to_prefer_the_chosen(tiny_folder: Path) -> None:
    losses = printed("dpo.py", tiny_folder, r"loss ([\d.]+)")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[-1] < 0.3


@pytest.mark.slow
def test_best_of_n_makes_the_mean_what_the_best_was(tiny_folder: Path) -> None:
    scores = printed("best_of_n.py", tiny_folder, r"mean score ([\d.]+)")
    assert scores[0] < 0.1
    assert scores[-1] > 0.4


def test_every_example_is_run_here() -> None:
    tested = set(re.findall(r'printed\("([\w.]+)"', Path(__file__).read_text()))
    assert tested == {file.name for file in EXAMPLES.glob("*.py")}
