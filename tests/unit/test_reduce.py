"""Sums by sequence and the weights of each aggregation, by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from lockstep.algorithms.reduce import AGGREGATIONS, aggregation_weights, sequence_mean, sum_by
from lockstep.errors import Refusal
from lockstep.recipe.keys_online import Aggregation

# Five sequences: 3 tokens (one masked), 1 token, no token, 2 tokens (both masked), 2 tokens.
SEQUENCE = torch.tensor([0, 0, 0, 1, 3, 3, 4, 4])
KEEP = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])
LOSS = torch.tensor([1.0, 100.0, 3.0, 5.0, 100.0, 100.0, 7.0, 9.0], dtype=torch.float64)


def test_sum_by_takes_any_order_of_keys_and_absent_keys():
    assert sum_by(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0]), 4).tolist() == [10, 0, 5, 0]
    assert sum_by(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0]


def test_sequence_mean_is_over_kept_tokens_and_stands_at_every_token():
    assert sequence_mean(LOSS, KEEP, SEQUENCE, 5).tolist() == [2, 2, 2, 5, 0, 0, 8, 8]


def test_sequence_mean_carries_gradients_to_kept_tokens_only():
    values = LOSS.clone().requires_grad_()
    sequence_mean(values, KEEP, SEQUENCE, 5).sum().backward()
    # Three places hold the mean of two tokens of sequence 0; each kept token is a half of each.
    assert values.grad is not None
    assert values.grad.tolist() == [1.5, 0, 1.5, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("token_mean", (1 + 3 + 5 + 7 + 9) / 5),
        ("token_sum", 1 + 3 + 5 + 7 + 9),
        ("seq_mean_token_sum", (4 + 5 + 16) / 3),
        ("seq_mean_token_mean", (2 + 5 + 8) / 3),
        ("seq_mean_token_sum_norm", (4 + 5 + 16) / (3 * 10)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_aggregations_by_hand(kind, loss, dtype):
    weights, divisor = aggregation_weights(kind, SEQUENCE, KEEP.to(dtype), 5, max_tokens=10)
    assert float((weights * LOSS).sum() / divisor) == pytest.approx(loss, rel=1e-7)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("token_mean", (2 * 4 + 0 + 3 * 16) / (2 * 2 + 3 * 2)),
        ("token_sum", 2 * 4 + 0 + 3 * 16),
        ("seq_mean_token_sum", (2 * 4 + 0 + 3 * 16) / 5),
        ("seq_mean_token_mean", (2 * 2 + 0 + 3 * 8) / 5),
        ("seq_mean_token_sum_norm", (2 * 4 + 0 + 3 * 16) / (5 * 10)),
    ],
)
def test_sequences_that_count_several_times_are_as_many_copies(kind, loss):
    """The first one twice, the second never, the last three times; what masked ones would count does not matter."""
    times = torch.tensor([2, 0, 9, 9, 3])
    weights, divisor = aggregation_weights(kind, SEQUENCE, KEEP, 5, max_tokens=10, repeats_S=times)
    assert float((weights * LOSS).sum() / divisor) == pytest.approx(loss, rel=1e-7)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_nothing_kept_is_a_loss_of_zero(kind):
    weights, divisor = aggregation_weights(kind, SEQUENCE, torch.zeros(8), 5, max_tokens=10)
    assert float((weights * LOSS).sum() / divisor) == 0.0
    weights, divisor = aggregation_weights(kind, SEQUENCE[:0], torch.zeros(0), 0, max_tokens=10)
    assert len(weights) == 0
    assert divisor > 0


def test_the_recipe_knows_these_aggregations():
    assert set(AGGREGATIONS) == set(get_args(Aggregation))


def test_unknown_aggregation_is_refused_with_the_known_ones():
    with pytest.raises(Refusal, match=r"algorithm\.aggregation.*(?s:.*)token_mean"):
        aggregation_weights("mean", SEQUENCE, KEEP, 5, max_tokens=10)
