"""Weights after an update: a gradient that is only rounding may move a weight in the opposite direction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.parity.replay.optimizer_checks import check_weights
from lockstep.parity.replay.replay_checks import Check
from lockstep.parity.replay.tolerances import tolerance_of
from lockstep.tape.digest import digest
from lockstep.tape.tape_format import StepRecord
from lockstep.tape.tape_recorder import sampled

SHAPE = [256]
RATE = 1e-2
OPTIM = {"betas": [0.9, 0.95], "eps": 1e-12, "clip": None, "weight_decay": 0.0}
MANIFEST = {"parameters": {"train": {"bias": SHAPE}}, "recipe": {"optim": OPTIM}}
INFO = {"lr": RATE, "grad_norm": 1.0}
BF16 = tolerance_of("bf16", "bf16")


def record(gradient: torch.Tensor, start: torch.Tensor, after: torch.Tensor) -> StepRecord:
    picked = sampled(start.numel())
    tensors = {
        "train/0/gradient/bias": digest(gradient),
        "train/0/start/bias": digest(start),
        "train/0/weights/bias": digest(after),
        "train/0/sample/bias/gradient": gradient[picked],
        "train/0/sample/bias/count": torch.zeros(()),
        "train/0/sample/bias/before": start[picked],
        "train/0/sample/bias/after": after[picked],
    }
    return StepRecord(1, {}, tensors)


def first_step(gradient: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """AdamW's first step is the learning rate with the sign of the gradient."""
    return start - RATE * gradient.sign()


def checks(one: StepRecord, other: StepRecord) -> list[Check]:
    return list(check_weights(MANIFEST, one, other, "train", (INFO, INFO), BF16))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("common", [-1.0, -0.5, 0.0, 0.5])
def test_a_step_by_the_sign_of_rounding_is_no_fault(common: float, seed: int) -> None:
    """Gradients with nothing in common, or with opposite signs: their steps may be two movements apart."""
    torch.manual_seed(seed)
    start, noise, rest = (torch.randn(SHAPE) for _ in range(3))
    other = common * noise + (1 - abs(common)) * rest
    here, there = record(noise, start, first_step(noise, start)), record(other, start, first_step(other, start))
    assert all(check.passed for check in checks(here, there))


def test_small_entries_may_change_their_sign_although_the_gradients_agree() -> None:
    """A few large entries are the norm of the gradient. All others are rounding, and move as far as the large ones."""
    torch.manual_seed(0)
    start, large = torch.randn(SHAPE), torch.zeros(SHAPE)
    large[:8] = 100.0
    one, other = (large + torch.randn(SHAPE) for _ in range(2))
    assert float((one - other).norm() / one.norm()) < 0.1
    here, there = record(one, start, first_step(one, start)), record(other, start, first_step(other, start))
    assert all(check.passed for check in checks(here, there))


def test_the_same_weights_with_gradients_that_agree_are_a_wrong_update() -> None:
    torch.manual_seed(0)
    start, noise, other = (torch.randn(SHAPE) for _ in range(3))
    here = record(noise, start, first_step(noise, start))
    found, movement = checks(here, record(noise, start, first_step(other, start)))
    assert not found.passed
    assert not movement.passed
    lost = checks(here, record(noise, start, start))
    assert not all(check.passed for check in lost)


def test_wrong_moments_explain_nothing() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(SHAPE), torch.randn(SHAPE)
    here = record(gradient, start, first_step(gradient, start))
    there = record(gradient, start, first_step(-gradient, start))
    there = replace(there, tensors={**there.tensors, "train/0/sample/bias/exp_avg": -9 * gradient[sampled(256)]})
    assert not all(check.passed for check in checks(here, there))
