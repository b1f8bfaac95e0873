"""The critic's loss by hand, its gradient by finite differences, and independence of the micro-batches."""

from __future__ import annotations

import pytest
import torch

from lockstep.algorithms.token_losses import value_loss

# token 0: moved 1.0 towards the return, the held value (0.5) is worse: 0.5 * 1.5^2
# token 1: moved within the bound: 0.5 * 0.75^2
# token 2: moved away past the bound, itself is worse: 0.5 * 3^2
# token 3: weight 0
VALUES = torch.tensor([1.0, 0.25, -2.0, 9.0], dtype=torch.float64)
OLD = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
RETURNS = torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64)


def test_clipped_by_hand():
    result = value_loss(VALUES, OLD, RETURNS, WEIGHTS, clip=0.5)
    assert float(result.loss) == pytest.approx(0.5 * (1.5**2 + 2 * 0.75**2 + 0.5 * 3**2))
    assert float(result.metrics["vf_clipfrac"]) == 1
    assert float(result.metrics["vpred"]) == pytest.approx(1.0 + 0.25 - 2.0)


def test_plain_by_hand():
    result = value_loss(VALUES, OLD, RETURNS, WEIGHTS, clip=None)
    assert float(result.loss) == pytest.approx(0.5 * (1 + 2 * 0.75**2 + 0.5 * 9))
    assert float(result.metrics["vf_clipfrac"]) == 0


@pytest.mark.parametrize("clip", [0.5, None])
def test_gradient_by_finite_differences(clip):
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, OLD, RETURNS, WEIGHTS, clip=clip).loss, (values,))


def test_gradient_by_hand():
    values = VALUES.clone().requires_grad_()
    value_loss(values, OLD, RETURNS, WEIGHTS, clip=0.5).loss.backward()
    assert values.grad is not None
    # Where the bound decided there is none; elsewhere weight * (v - R).
    assert values.grad.tolist() == pytest.approx([0.0, 2 * -0.75, 0.5 * -3.0, 0.0])


def test_a_token_of_weight_zero_cannot_poison():
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    result = value_loss(
        values, torch.tensor([0.0, 1e38]), torch.tensor([2.0, -1e38]), torch.tensor([1.0, 0.0]), clip=2.0
    )
    result.loss.backward()
    assert result.loss.item() == 0.5
    assert float(result.metrics["vpred"]) == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [-1.0, 0.0]


def test_micro_batches_add_up_and_none_at_all_keeps_the_graph():
    values = VALUES.clone().requires_grad_()
    whole = value_loss(values, OLD, RETURNS, WEIGHTS, clip=0.5)
    parts = [value_loss(values[s], OLD[s], RETURNS[s], WEIGHTS[s], clip=0.5) for s in (slice(0, 1), slice(1, 4))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-14)
    nothing = value_loss(values[:0], OLD[:0], RETURNS[:0], WEIGHTS[:0], clip=0.5)
    nothing.loss.backward()
    assert nothing.loss.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 0, 0]
