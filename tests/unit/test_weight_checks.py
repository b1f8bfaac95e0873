"""Weights after an update: a gradient that is only rounding may move a weight in the opposite direction."""

from __future__ import annotations

import torch

from lockstep.parity.replay.optimizer_checks import _weights
from lockstep.parity.replay.tolerances import tolerance_of
from lockstep.tape.digest import digest
from lockstep.tape.tape_format import StepRecord
from lockstep.tape.tape_recorder import sampled

SHAPE = [256]
MANIFEST = {"parameters": {"train": {"bias": SHAPE}}}


def record(gradient: torch.Tensor, start: torch.Tensor, after: torch.Tensor) -> StepRecord:
    picked = sampled(start.numel())
    tensors = {
        "train/0/gradient/bias": digest(gradient),
        "train/0/start/bias": digest(start),
        "train/0/weights/bias": digest(after),
        "train/0/sample/bias/before": start[picked],
        "train/0/sample/bias/after": after[picked],
    }
    return StepRecord(1, {}, tensors)


def test_a_movement_by_the_sign_of_rounding_is_judged_by_the_gradients_share_of_it() -> None:
    torch.manual_seed(0)
    start, noise, other_noise = (torch.randn(SHAPE) for _ in range(3))
    rate = 1e-2
    here = record(noise, start, start - rate * noise.sign())
    # Signs of two independent draws agree by half: the weights lie sqrt(2) movements apart.
    there = record(other_noise, start, start - rate * other_noise.sign())
    tolerance = tolerance_of("bf16", "bf16")
    [found] = [check for check in _weights(MANIFEST, here, there, "train", tolerance) if "bias" in check.what]
    assert found.passed
    assert found.error > 0.5
    # The same weights with gradients that agree: nothing but the update is left to blame.
    alike = record(noise, start, start - rate * other_noise.sign())
    [found] = [check for check in _weights(MANIFEST, here, alike, "train", tolerance) if "bias" in check.what]
    assert not found.passed
