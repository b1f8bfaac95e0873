"""A replay whose rounding clamps the KL estimate of one target: no fault. The same difference elsewhere: a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lockstep.parity.replay.replay_checks import Check
from lockstep.parity.replay.stage_checks import _Update
from lockstep.parity.replay.tolerances import tolerance_of
from lockstep.tape.tape_format import StepRecord

TARGETS, COEFFICIENT = 40, 0.2
# e^x - x - 1 = 10, solved by bisection: the distance below the reference at which k3 reaches its bound.
BOUND = 2.610869


def test_the_distance_of_the_bound() -> None:
    assert math.exp(BOUND) - BOUND - 1 == pytest.approx(10, abs=1e-5)


def recorded(distance: float, *, clamped: bool) -> StepRecord:
    """A step whose targets are 1 below the reference, and target 7 `distance`. Their gradients are those of k3."""
    below = torch.ones(TARGETS)
    below[7] = distance
    slopes = COEFFICIENT * (1 - below.exp()) / TARGETS
    if clamped:
        slopes[7] = 0.0
    reference = torch.full((TARGETS,), -2.0)
    tensors = {
        "actor/0/answers": reference - below,
        "actor/0/pulls": slopes,
        "step/reference": reference,
        "fed/targets": torch.tensor([TARGETS]),
    }
    update = {"learner": "actor", "targets": TARGETS}
    return StepRecord(2, {"updates": [update]}, tensors)


def check(one: StepRecord, other: StepRecord, dtype: str = "bf16", **kl: Any) -> Check:
    update = _Update(one, other, "actor", 0, ({}, {}), tolerance_of(dtype))
    recipe: Mapping[str, Any] = {"algorithm": {"kl": {"where": "loss", "estimator": "k3", **kl}}}
    [found] = update.checks({"recipe": recipe}, [], restored=True)
    assert found.what == "actor, update 1: gradient with respect to each target's log-prob"
    return found


def test_one_rounding_clamps_a_target() -> None:
    below, above = recorded(BOUND - 0.02, clamped=False), recorded(BOUND + 0.02, clamped=True)
    assert check(below, above).passed
    assert check(above, below).passed
    assert check(below, above).error == 0.0


@pytest.mark.parametrize("kl", [{"where": "reward"}, {"estimator": "k3+"}, {"estimator": "k2"}])
def test_without_a_bound_it_is_a_fault(kl: dict[str, str]) -> None:
    assert not check(recorded(BOUND - 0.02, clamped=False), recorded(BOUND + 0.02, clamped=True), **kl).passed


def test_a_target_on_one_side_of_the_bound_is_judged() -> None:
    near = BOUND - 0.02, BOUND - 0.01
    assert not check(recorded(near[0], clamped=False), recorded(near[1], clamped=True)).passed
    far = BOUND + 0.01, BOUND + 0.02
    assert not check(recorded(far[0], clamped=False), recorded(far[1], clamped=True)).passed


def test_a_log_prob_that_differs_by_more_than_rounding_is_judged() -> None:
    below, above = recorded(BOUND - 0.02, clamped=False), recorded(BOUND + 0.02, clamped=True)
    assert not check(below, above, "fp32").passed
    assert check(recorded(BOUND - 5e-5, clamped=False), recorded(BOUND + 5e-5, clamped=True), "fp32").passed


def test_the_other_targets_are_still_judged() -> None:
    below, above = recorded(BOUND - 0.02, clamped=False), recorded(BOUND + 0.02, clamped=True)
    above.tensors["actor/0/pulls"][3] *= 3
    assert not check(below, above).passed


@pytest.mark.parametrize("clamps", [True, False])
def test_the_gradient_of_the_parameters_inherits_the_difference(clamps: bool) -> None:
    """A norm that differs as much as the gradients of the log-probs is a fault if no target explains it."""
    below, above = recorded(BOUND - 5e-5, clamped=False), recorded(BOUND + 5e-5, clamped=clamps)
    update = _Update(below, above, "actor", 0, ({"grad_norm": 1.0}, {"grad_norm": 1.3}), tolerance_of("fp32"))
    recipe = {"algorithm": {"kl": {"where": "loss", "estimator": "k3"}}}
    norm = list(update.checks({"recipe": recipe}, [], restored=True))[-1]
    assert (norm.what, norm.passed) == ("actor, update 1: norm", clamps)
