"""The verdict on real runs of the tiny GRPO: repeats are not told apart, a ruined run is (data/parity/README.md)."""

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


def test_other_seeds_are_repeats(real: dict[str, np.ndarray]) -> None:
    """Each run against every choice of 1 to 6 of the others: 1,008 comparisons; 5 % may be false alarms. With 32
    responses a step the noise is 13 %, far beyond the bar, so that 40 steps cannot tell; and this is what is said."""
    runs = real["seeds"]
    verdicts = [
        judged(runs[list(others)], runs[[b]])[0].verdict
        for b in range(8)
        for count in range(1, 7)
        for others in combinations([i for i in range(8) if i != b], count)
    ]
    assert len(verdicts) == 1008
    assert verdicts.count("out of step") <= 0.05 * len(verdicts)
    assert verdicts.count("cannot tell") >= 0.95 * len(verdicts)


def test_a_ruined_run_is_found_beside_any_repeats(real: dict[str, np.ndarray]) -> None:
    runs, broken = real["seeds"], real["broken"]
    for count in range(1, 7):
        verdicts = [judged(runs[list(chosen)], broken)[0].verdict for chosen in combinations(range(8), count)]
        assert set(verdicts) <= {"out of step", "cannot tell"}
        assert verdicts.count("out of step") >= (0.85 if count == 2 else 0.95) * len(verdicts), count


def test_other_micro_batches_earn_the_same(real: dict[str, np.ndarray]) -> None:
    """Sampling noise belongs to prompt and position: in fp32 the rewards are the same to the last bit."""
    runs = real["micro_batches"]
    judgement, examined = judged(runs[:3], runs[3:])
    assert (judgement.verdict, judgement.explanation) == ("in step", "the same at all 40 steps")
    assert examined.power is not None
    assert examined.power.noise_sd == 0
