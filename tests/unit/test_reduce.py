"""Sums by sequence and the weights of each aggregation, by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from lockstep.algorithms.reduce import (
    AGGREGATIONS,
    LEAST_SUM,
    SINGLE_PROCESS,
    StepReduce,
    aggregation_weights,
    floor_logprobs,
    log_ratio,
    log_rest,
    sequence_mean,
    sum_by,
)
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


def test_values_of_masked_tokens_do_not_matter():
    values = torch.tensor([2.0, math.nan, math.inf, 4.0])
    assert sequence_mean(values, torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 1, 1]), 2).tolist() == [2, 2, 4, 4]


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


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", ([1, 1], 2)),
        ("token_sum", ([1, 1], 1)),
        ("seq_mean_token_sum", ([1, 1], 1)),
        ("seq_mean_token_mean", ([0.5, 0.5], 1)),
        ("seq_mean_token_sum_norm", ([1, 1], 10)),
    ],
)
def test_weights_of_one_sequence(kind, expected):
    weights, divisor = aggregation_weights(kind, torch.tensor([0, 0]), torch.ones(2), 1, max_tokens=10)
    assert (weights.tolist(), divisor) == expected
    one_token = aggregation_weights(kind, torch.tensor([0]), torch.ones(1), 1, max_tokens=10)
    assert (one_token[0].tolist(), one_token[1]) == ([1], 10 if kind.endswith("norm") else 1)


def test_the_recipe_knows_these_aggregations():
    assert set(AGGREGATIONS) == set(get_args(Aggregation))


def test_unknown_aggregation_is_refused_with_the_known_ones():
    with pytest.raises(Refusal, match=r"^algorithm\.aggregation\b.*(?s:.*)token_mean"):
        aggregation_weights("mean", SEQUENCE, KEEP, 5, max_tokens=10)


def test_impossible_tokens_have_the_least_log_prob_and_no_gradient():
    logprobs = torch.tensor([-1.0, -30.0, -math.inf, -2e4, math.nan], dtype=torch.float64, requires_grad=True)
    floored = floor_logprobs(logprobs)
    assert floored.tolist()[:4] == [-1.0, -30.0, -1e4, -1e4]
    assert floored[4].isnan()
    floored[:4].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1, 1, 0, 1, 0]
    assert floor_logprobs(logprobs.detach(), -20.0).tolist()[:4] == [-1.0, -20.0, -20.0, -20.0]


def test_log_ratio_of_impossible_tokens_is_finite():
    ours, others = torch.tensor([-1.0, -math.inf, -math.inf, -3.0]), torch.tensor([-2.5, -math.inf, -1.0, -math.inf])
    assert log_ratio(ours, others).tolist() == [1.5, 0.0, -9999.0, 9997.0]
    assert log_ratio(ours, others, -50.0).tolist() == [1.5, 0.0, -49.0, 47.0]
    # Sums over responses of many tokens stay below this.
    assert log_ratio(ours, others, LEAST_SUM).tolist() == [1.5, 0.0, -999_999.0, 999_997.0]


def test_log_rest_by_hand():
    probabilities = torch.tensor([0.75, 0.5, 0.25], dtype=torch.float64)
    expected = [math.log(0.25), math.log(0.5), math.log(0.75)]
    assert log_rest(probabilities.log()).tolist() == pytest.approx(expected, rel=1e-14)
    # Near 0, log(1 - e^x) is -e^x; near 1 it is log(-x), and the probability is at most 1 - 1e-6.
    extremes = torch.tensor([-40.0, -1e-4, 0.0], dtype=torch.float64)
    nearly_certain = [-math.exp(-40), math.log(-math.expm1(-1e-4)), math.log(-math.expm1(-1e-6))]
    assert log_rest(extremes).tolist() == pytest.approx(nearly_certain, rel=1e-14)


def test_a_step_of_two_ranks_is_reduced():
    """The other rank has the sum 10 and the maximum 7 in every call."""
    reduce = StepReduce(sum_tensor=lambda local: local + 10, max_tensor=lambda local: local.clamp(min=7))
    values = torch.tensor([1.0, 2.0, 6.0])
    assert reduce.count(3) == 13
    assert float(reduce.sum(values)) == 19.0
    assert reduce.sum(values).dtype == torch.float64
    assert reduce.mean(values) == 19 / 13
    assert reduce.max(values) == 7.0
    assert reduce.max(torch.zeros(0)) == 7.0
    assert reduce.sum_by(values, torch.tensor([1, 0, 1]), 2).tolist() == [12, 17]


def test_a_step_of_one_process():
    assert SINGLE_PROCESS.mean(torch.tensor([1.0, 2.0, 6.0])) == 3.0
    assert SINGLE_PROCESS.mean(torch.tensor([5.0])) == 5.0
    assert SINGLE_PROCESS.mean(torch.zeros(0)) == 0.0
    assert SINGLE_PROCESS.max(torch.tensor([-3.0, -2.0])) == -2.0
    assert SINGLE_PROCESS.max(torch.zeros(0)) == -math.inf
