"""The verdict on real runs of the tiny GRPO: repeats are not different, a ruined run is (data/verdict/README.md)."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from parity_curves import judged

FILE = Path(__file__).parents[1] / "data" / "verdict" / "grpo_repeats.json"


@pytest.fixture(scope="module")
def real() -> dict[str, np.ndarray]:
    return {kind: np.array(curves) for kind, curves in json.loads(FILE.read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize(("every", "comparisons"), [(29, 35), pytest.param(1, 1008, marks=pytest.mark.slow)])
def test_other_seeds_are_repeats(real: dict[str, np.ndarray], every: int, comparisons: int) -> None:
    """Each run against every choice of 1 to 6 of the others; at most 5 % may be false alarms. With 32 responses a
    step the noise is 13 %, far beyond the bar, so 40 steps are too few for another verdict than `cannot tell`."""
    runs = real["seeds"]
    choices = [
        (b, others)
        for b in range(8)
        for count in range(1, 7)
        for others in combinations([i for i in range(8) if i != b], count)
    ]
    verdicts = [judged(runs[list(others)], runs[[b]])[0].verdict for b, others in choices[::every]]
    assert len(verdicts) == comparisons
    assert verdicts.count("out of step") <= 0.05 * len(verdicts)
    assert verdicts.count("cannot tell") >= 0.95 * len(verdicts)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_broken_run_is_found_with_any_repeats(real: dict[str, np.ndarray], every: int) -> None:
    runs, broken = real["seeds"], real["broken"]
    for count in range(1, 7):
        choices = list(combinations(range(8), count))[::every]
        verdicts = [judged(runs[list(chosen)], broken)[0].verdict for chosen in choices]
        assert set(verdicts) <= {"out of step", "cannot tell"}
        assert verdicts.count("out of step") >= (0.85 if count == 2 else 0.95) * len(verdicts), count


def test_other_micro_batches_give_the_same_rewards(real: dict[str, np.ndarray]) -> None:
    """Sampling noise depends on prompt and position alone: in fp32 the rewards are bit-identical."""
    runs = real["micro_batches"]
    judgement, examined = judged(runs[:3], runs[3:])
    assert (judgement.verdict, judgement.explanation) == ("in step", "A and B are equal at all 40 steps")
    assert examined.power is not None
    assert examined.power.noise_sd == 0
