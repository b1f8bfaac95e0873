"""Policy filtration: how often responses are drawn, against the weights they are drawn by."""

from __future__ import annotations

import pytest
import torch

from lockstep.algorithms.token_selection import draw_repeats
from lockstep.errors import Refusal
from lockstep.run.runtime import generator_of


def shares(scores: list[float], method: str, power: float = 2.0) -> list[float]:
    """Over many steps, the share of the draws that each response gets."""
    rounds = 400
    total = sum(draw_repeats(torch.tensor(scores), method, power, generator_of((7, step))) for step in range(rounds))
    assert isinstance(total, torch.Tensor)
    return (total / (rounds * len(scores))).tolist()


@pytest.mark.parametrize(
    ("method", "power", "weights"),
    [
        ("pow", 2.0, [1.0, 9.0, 0.0, 4.0, 9.0]),
        ("pow", 1.0, [1.0, 3.0, 0.0, 2.0, 3.0]),
        ("max_min", 2.0, [0.0, 1.0, 0.0, 0.0, 1.0]),  # the best 3, and the worst -3
        ("max_random", 2.0, [0.1, 0.4, 0.1, 0.1, 0.1]),
    ],
)
def test_shares_follow_the_weights(method: str, power: float, weights: list[float]) -> None:
    found = shares([1.0, 3.0, 0.0, 2.0, -3.0], method, power)
    assert found == pytest.approx([weight / sum(weights) for weight in weights], abs=0.04)
    assert [share == 0 for share in found] == [weight == 0 for weight in weights]


def test_a_step_keeps_its_number_of_responses_and_ranks_draw_the_same() -> None:
    scores = torch.rand(40, generator=torch.Generator().manual_seed(1))
    first, second = (draw_repeats(scores, "pow", 2.0, generator_of((3, 5))) for _ in range(2))
    assert first.sum() == 40
    assert torch.equal(first, second)
    assert not torch.equal(first, draw_repeats(scores, "pow", 2.0, generator_of((3, 6))))


def test_a_step_without_any_score_is_drawn_evenly() -> None:
    assert shares([0.0] * 4, "pow") == pytest.approx([0.25] * 4, abs=0.05)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(Refusal, match=r"algorithm\.pf_ppo\.method"):
        draw_repeats(torch.ones(2), "best", 2.0, generator_of((0,)))
