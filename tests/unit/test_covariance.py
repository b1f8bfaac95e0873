"""Which tokens the covariance losses hold back, by hand."""

from __future__ import annotations

import pytest
import torch

from lockstep.algorithms.token_selection import select_clip_cov, select_kl_cov

# Kept: A mean 0, log p mean -2. Covariances: 2*1 = 2, -2*1 = -2, 1*-1 = -1, -1*-1 = 1; the last token is not kept.
ADVANTAGES = torch.tensor([2.0, -2.0, 1.0, -1.0, 1000.0])
OLD = torch.tensor([-1.0, -1.0, -3.0, -3.0, 500.0])
KEEP = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clip_held(share: float, low: float, high: float, seed: int = 0) -> list[float]:
    return select_clip_cov(OLD, ADVANTAGES, KEEP, share=share, low=low, high=high, generator=seeded(seed)).tolist()


@pytest.mark.parametrize(
    ("share", "held"),
    [(0.0, []), (0.01, [0]), (0.5, [0, 3]), (0.75, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_kl_cov_takes_the_highest(share, held):
    result = select_kl_cov(OLD, ADVANTAGES, KEEP, share=share)
    assert result.nonzero().flatten().tolist() == held


def test_kl_cov_takes_the_earlier_of_equals():
    equal = torch.zeros(6)
    assert select_kl_cov(equal, equal, torch.tensor([0, 1, 1, 1, 1, 1]), share=0.4).tolist() == [0, 1, 1, 0, 0, 0]


def test_clip_cov_stays_in_the_band():
    assert clip_held(1.0, 0.5, 5.0) == [1, 0, 0, 1, 0]
    assert clip_held(1.0, 1.0, 2.0) == [1, 0, 0, 1, 0]  # both ends belong to it
    assert clip_held(1.0, 1.5, 5.0) == [1, 0, 0, 0, 0]
    assert clip_held(1.0, 3.0, 5.0) == [0, 0, 0, 0, 0]
    assert clip_held(1.0, -5.0, 5.0) == [1, 1, 1, 1, 0]


def test_clip_cov_draws_its_share_and_at_least_one():
    assert sum(clip_held(0.5, -5.0, 5.0)) == 2
    assert sum(clip_held(0.0002, -5.0, 5.0)) == 1
    assert sum(clip_held(0.0, -5.0, 5.0)) == 0
    assert clip_held(0.5, -5.0, 5.0, seed=3) == clip_held(0.5, -5.0, 5.0, seed=3)
    assert len({tuple(clip_held(0.25, -5.0, 5.0, seed)) for seed in range(40)}) == 4  # any of the four can be drawn


def test_nothing_kept_holds_nothing():
    none = torch.zeros(5)
    assert select_kl_cov(OLD, ADVANTAGES, none, share=1.0).tolist() == [0] * 5
    assert select_clip_cov(OLD, ADVANTAGES, none, share=1.0, low=-9, high=9, generator=seeded()).tolist() == [0] * 5
    assert len(select_kl_cov(OLD[:0], ADVANTAGES[:0], KEEP[:0], share=1.0)) == 0


def test_a_masked_token_cannot_poison_the_means():
    odd = OLD.clone()
    odd[-1] = float("-inf")
    assert torch.equal(select_kl_cov(odd, ADVANTAGES, KEEP, share=0.5), select_kl_cov(OLD, ADVANTAGES, KEEP, share=0.5))
