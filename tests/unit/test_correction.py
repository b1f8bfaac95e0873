"""Rollout correction by hand: weights, masks and what is reported."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.algorithms.correction import correct
from lockstep.errors import Refusal

# Sequences of 2, 0, 3 and 1 tokens; the ratios trainer/engine of each token.
SEQUENCE = torch.tensor([0, 0, 2, 2, 2, 3])
RATIOS = [1.5, 0.5, 4.0, 1.0, 2.0, 0.1]
ENGINE = torch.tensor([-1.0, -2.0, -3.0, -0.5, -1.5, -2.5], dtype=torch.float64)
TRAINER = ENGINE + torch.tensor(RATIOS, dtype=torch.float64).log()
OFF = {"weight": "none", "cap": 3.0, "mask": "none", "low": 0.5, "high": 2.0}


def corrected(**choices):
    return correct(TRAINER, ENGINE, SEQUENCE, 4, **{**OFF, **choices})


def test_off_changes_nothing_and_still_reports():
    result = corrected()
    assert result.weights_K.tolist() == [1] * 6
    assert result.keep_K.tolist() == [1] * 6
    logs = [math.log(ratio) for ratio in RATIOS]
    assert result.metrics["rollout_corr/ratio_mean"] == pytest.approx(sum(RATIOS) / 6)
    assert result.metrics["rollout_corr/ratio_max"] == pytest.approx(4.0)
    assert result.metrics["rollout_corr/kl"] == pytest.approx(-sum(logs) / 6)
    assert result.metrics["rollout_corr/k3"] == pytest.approx(
        sum(r - d - 1 for r, d in zip(RATIOS, logs, strict=True)) / 6
    )
    assert result.metrics["rollout_corr/capped_share"] == 0
    assert result.metrics["rollout_corr/masked_share"] == 0
    assert result.metrics["rollout_corr/effective_share"] == pytest.approx(1)
    assert all(type(value) is float for value in result.metrics.values())


def test_token_weights_are_truncated():
    result = corrected(weight="token")
    expected = [1.5, 0.5, 3.0, 1.0, 2.0, 0.1]
    assert result.weights_K.tolist() == pytest.approx(expected)
    assert result.metrics["rollout_corr/capped_share"] == pytest.approx(1 / 6)
    assert result.metrics["rollout_corr/weight_mean"] == pytest.approx(8.1 / 6)
    squares = sum(w * w for w in expected)
    assert result.metrics["rollout_corr/effective_share"] == pytest.approx(8.1**2 / squares / 6)


def test_sequence_weights_are_the_product_and_one_for_all_tokens():
    result = corrected(weight="sequence", cap=5.0)
    assert result.weights_K.tolist() == pytest.approx([0.75, 0.75, 5.0, 5.0, 5.0, 0.1])  # the product 8 is capped
    assert result.metrics["rollout_corr/capped_share"] == pytest.approx(0.5)


def test_token_mask_keeps_the_band():
    result = corrected(mask="token", low=0.4, high=2.5)
    assert result.keep_K.tolist() == [1, 1, 0, 1, 1, 0]
    assert result.weights_K.tolist() == [1] * 6
    assert result.metrics["rollout_corr/masked_share"] == pytest.approx(2 / 6)
    assert result.metrics["rollout_corr/masked_sequence_share"] == pytest.approx(1 / 3)


def test_sequence_mask_judges_the_geometric_mean():
    # sqrt(0.75) = 0.866, 8^(1/3) = 2, 0.1
    assert corrected(mask="sequence", low=0.9, high=2.1).keep_K.tolist() == [0, 0, 1, 1, 1, 0]
    assert corrected(mask="sequence", low=0.8, high=1.9).keep_K.tolist() == [1, 1, 0, 0, 0, 0]


def test_weight_and_mask_together():
    result = corrected(weight="sequence", cap=100.0, mask="token", low=0.4, high=2.5)
    assert result.weights_K.tolist() == pytest.approx([0.75, 0.75, 8.0, 8.0, 8.0, 0.1])
    assert result.keep_K.tolist() == [1, 1, 0, 1, 1, 0]


def test_extremes_stay_finite_and_no_gradient_flows():
    trainer = torch.tensor([-300.0, -1.0, float("-inf")], requires_grad=True)
    engine = torch.tensor([-1.0, -300.0, -1.0])
    for weight in ("token", "sequence"):
        result = correct(trainer, engine, torch.tensor([0, 1, 2]), 3, **{**OFF, "weight": weight, "cap": 1e30})
        assert result.weights_K.tolist() == pytest.approx([math.exp(-20), math.exp(20), math.exp(-20)], rel=1e-5)
        assert not result.weights_K.requires_grad
        assert all(math.isfinite(value) for value in result.metrics.values())


def test_the_product_of_a_sequence_is_bounded():
    trainer, engine = torch.tensor([-1.0, -1.0]), torch.tensor([-16.0, -16.0])
    result = correct(trainer, engine, torch.tensor([0, 0]), 1, **{**OFF, "weight": "sequence", "cap": 1e30})
    assert result.weights_K.tolist() == pytest.approx([math.exp(20)] * 2)


def test_agreement_is_exactly_one():
    result = correct(ENGINE, ENGINE, SEQUENCE, 4, **{**OFF, "weight": "sequence", "mask": "sequence"})
    assert result.weights_K.tolist() == [1] * 6
    assert result.keep_K.tolist() == [1] * 6
    assert result.metrics["rollout_corr/kl"] == 0


def test_no_tokens():
    result = correct(ENGINE[:0], ENGINE[:0], SEQUENCE[:0], 2, **{**OFF, "weight": "sequence", "mask": "sequence"})
    assert len(result.weights_K) == len(result.keep_K) == 0
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_token_without_a_log_probability_is_refused():
    engine = ENGINE.clone()
    engine[1] = float("nan")
    with pytest.raises(Refusal, match="1 of 6 tokens"):
        correct(TRAINER, engine, SEQUENCE, 4, **OFF)


@pytest.mark.parametrize("key", ["weight", "mask"])
def test_unknown_choices_are_refused(key):
    with pytest.raises(Refusal, match=rf"algorithm\.correction\.{key}"):
        corrected(**{key: "geometric"})
