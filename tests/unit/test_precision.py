"""Numbers that were kept in bf16 are told from finer ones."""

from __future__ import annotations

import pytest
import torch

from lockstep.parity.replay.stage_checks import bf16_share, check_precision

FINE = torch.randn(400, generator=torch.Generator().manual_seed(0))


def test_the_share_of_bf16_numbers() -> None:
    assert bf16_share(FINE) == pytest.approx(0.0, abs=0.01)
    assert bf16_share(FINE.bfloat16().float()) == 1.0
    half = torch.cat([FINE[:200], FINE[200:].bfloat16().float()])
    assert bf16_share(half) == pytest.approx(0.5, abs=0.01)


def test_zeros_and_few_numbers_prove_nothing() -> None:
    assert bf16_share(torch.zeros(1000)) is None
    assert bf16_share(FINE[:10]) is None


def test_only_the_replay_is_blamed_and_only_where_the_tape_is_finer() -> None:
    rounded = FINE.bfloat16().float()
    [check] = check_precision("gradient", 2, "train", FINE, rounded)
    assert not check.passed
    assert (check.stage, check.what) == ("gradient", "train: precision")
    [clean] = check_precision("gradient", 2, "train", FINE, FINE * 1.001)
    assert clean.passed
    assert list(check_precision("gradient", 2, "train", rounded, rounded)) == []
