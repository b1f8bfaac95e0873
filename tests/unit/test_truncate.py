"""Which tokens a truncation leaves, by hand and against transformers' own filters."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lockstep.kernels.sampling import LEFT_OUT, Truncation, truncate_

# Probabilities 0.4, 0.3, 0.2, 0.1, in an order that is not theirs.
ROW = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


def left(how: Truncation, logits: torch.Tensor = ROW, keep: torch.Tensor | None = None) -> list[int]:
    return (truncate_(logits.clone(), how, keep)[0] != LEFT_OUT).nonzero()[:, 0].tolist()


def test_nothing_is_left_out_by_default() -> None:
    assert not Truncation().active
    assert torch.equal(truncate_(ROW.clone(), Truncation()), ROW)


@pytest.mark.parametrize(
    ("how", "stay"),
    [
        (Truncation(top_k=1), [1]),
        (Truncation(top_k=3), [1, 2, 3]),
        (Truncation(top_k=9), [0, 1, 2, 3]),
        (Truncation(top_p=0.35), [1]),
        (Truncation(top_p=0.45), [1, 3]),
        (Truncation(top_p=0.69), [1, 3]),
        (Truncation(top_p=0.71), [1, 2, 3]),
        (Truncation(top_p=1e-9), [1]),
        (Truncation(top_p=1e-300), [1]),
        (Truncation(min_p=0.6), [1, 3]),
        (Truncation(min_p=0.3), [1, 2, 3]),
        # Of the two likeliest, 0.4 is 4/7 = 0.571 of what is left.
        (Truncation(top_k=2, top_p=0.57), [1]),
        (Truncation(top_k=2, top_p=0.58), [1, 3]),
        # min-p 0.6 leaves two as well.
        (Truncation(min_p=0.6, top_p=0.57), [1]),
    ],
)
def test_what_stays(how: Truncation, stay: list[int]) -> None:
    assert how.active
    assert left(how) == stay


def test_what_stays_is_not_changed() -> None:
    kept = truncate_(ROW.clone(), Truncation(top_k=2))
    assert kept[0, [1, 3]].tolist() == ROW[0, [1, 3]].tolist()


def test_the_chosen_token_stays_whatever_happens() -> None:
    assert left(Truncation(top_k=1), keep=torch.tensor([0])) == [0, 1]


def test_ties() -> None:
    even = torch.zeros(1, 4)
    assert left(Truncation(top_k=2), even) == [0, 1, 2, 3]
    # Top-p takes of equals those with the lowest number.
    assert left(Truncation(top_p=0.5), even) == [0, 1]


def test_rows_are_truncated_apart() -> None:
    rows = torch.cat([ROW, ROW.flip(-1), torch.zeros(1, 4)])
    together = truncate_(rows.clone(), Truncation(top_p=0.6, min_p=0.1))
    for row in range(3):
        assert torch.equal(together[row : row + 1], truncate_(rows[row : row + 1].clone(), Truncation(0, 0.6, 0.1)))


@pytest.mark.parametrize("top_k", [0, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_top_k_then_top_p_as_transformers(top_k: int, top_p: float) -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * 3
    theirs = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    ours = truncate_(logits.clone(), Truncation(top_k, top_p))
    assert torch.equal(ours == LEFT_OUT, theirs == -float("inf"))


def test_min_p_as_transformers() -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)) * 3
    theirs = MinPLogitsWarper(0.07)(None, logits)
    assert torch.equal(truncate_(logits.clone(), Truncation(min_p=0.07)) == LEFT_OUT, theirs == -float("inf"))
