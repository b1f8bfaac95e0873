"""Divergence estimators by hand, their gradients by finite differences, and the adapted coefficient."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.divergence import adapt_coefficient, divergence
from lockstep.errors import Refusal
from lockstep.recipe.keys_online import Kl

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -1.0, -0.5, -2.25], dtype=torch.float64)
D = [0.5, -1.0, 0.0, -0.75]
BY_HAND = {
    "k1": D,
    "abs": [0.5, 1.0, 0.0, 0.75],
    "k2": [0.125, 0.5, 0.0, 0.28125],
    "k3": [math.exp(-d) + d - 1 for d in D],
}
# d/d(logprob), by hand.
GRADIENTS = {"k1": [1.0] * 4, "abs": [1.0, -1.0, 0.0, -1.0], "k2": D, "k3": [1 - math.exp(-d) for d in D]}


def gradient(estimator: str) -> list[float]:
    logprobs = LOGPROBS.clone().requires_grad_()
    (result,) = torch.autograd.grad(divergence(estimator, logprobs, REFERENCE).sum(), logprobs)
    return result.tolist()


@pytest.mark.parametrize("estimator", BY_HAND)
def test_values_and_gradients_by_hand(estimator):
    assert divergence(estimator, LOGPROBS, REFERENCE).tolist() == pytest.approx(BY_HAND[estimator], abs=1e-15)
    assert gradient(estimator) == pytest.approx(GRADIENTS[estimator], abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_by_finite_differences(estimator):
    logprobs = LOGPROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence(estimator, x, REFERENCE), (logprobs,))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k3"])
def test_straight_through_has_its_value_and_the_gradient_of_k2(estimator):
    assert divergence(estimator + "+", LOGPROBS, REFERENCE).tolist() == pytest.approx(BY_HAND[estimator], abs=1e-15)
    assert gradient(estimator + "+") == pytest.approx(D, abs=1e-15)


def test_k3_is_bounded_and_finite():
    logprobs = torch.tensor([-50.0, -3.0, -1.0])
    reference = torch.tensor([-1.0, -0.5, -50.0])
    # e^20 and e^2.5 - 2.5 - 1 = 8.68; at d = 49 the exponent is held at -20: 20 - 1 + e^-20, over 10.
    assert divergence("k3", logprobs, reference).tolist() == pytest.approx([10.0, 8.682494, 10.0])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_vanish_when_equal(pairs):
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    for estimator in ("abs", "k2", "k3"):
        assert bool((divergence(estimator, logprobs, reference) >= -1e-15).all())
        assert divergence(estimator, logprobs, logprobs).tolist() == [0.0] * len(pairs)


def test_means_over_a_distribution_are_the_divergence():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)
    for estimator in ("k1", "k3"):
        assert float((p * divergence(estimator, p.log(), q.log())).sum()) == pytest.approx(exact, rel=1e-12)


def test_the_weighted_gradient_is_that_of_the_divergence_off_policy():
    """Tokens of p_old with the weight p / p_old: the mean gradient is that of KL(p, q), whatever the estimator."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for estimator in ("k1+", "k3+"):
        found = divergence(estimator, logprobs, reference, old)
        assert torch.equal(found, divergence(estimator, logprobs, reference))  # the value is the same
        (gradient,) = torch.autograd.grad((old.exp() * found).sum(), logits, retain_graph=True)
        assert torch.allclose(gradient, wanted, rtol=1e-10)


def test_the_weight_of_a_gradient_is_bounded():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    found = divergence("k2+", logprobs, torch.tensor([-1.5]), torch.tensor([-9.0]))
    assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(10 * 0.5)


def test_adapted_coefficient_by_hand():
    assert adapt_coefficient(0.1, measured=1.1, target=1.0, horizon=100, sequences=50) == pytest.approx(
        0.1 * (1 + 0.1 * 0.5)
    )
    assert adapt_coefficient(0.1, measured=9.0, target=1.0, horizon=100, sequences=50) == pytest.approx(
        0.1 * (1 + 0.2 * 0.5)
    )
    assert adapt_coefficient(0.1, measured=0.0, target=1.0, horizon=100, sequences=50) == pytest.approx(
        0.1 * (1 - 0.2 * 0.5)
    )
    assert adapt_coefficient(0.1, measured=1.0, target=1.0, horizon=100, sequences=50) == 0.1


def test_every_estimator_of_the_recipe_is_there():
    for estimator in get_args(Kl.model_fields["estimator"].annotation):
        assert len(divergence(estimator, LOGPROBS, REFERENCE)) == 4


def test_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(Refusal, match=r"algorithm\.kl\.estimator.*(?s:.*)k3\+"):
        divergence("k4", LOGPROBS, REFERENCE)
