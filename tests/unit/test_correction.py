"""Rollout correction by hand: weights, masks and what is reported."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.algorithms.correction import Band, correct
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
    with pytest.raises(Refusal, match=rf"algorithm\.rollout_correction\.{key}"):
        corrected(**{key: "geometric"})


LOGS = [math.log(ratio) for ratio in RATIOS]
K2 = [0.5 * log * log for log in LOGS]  # 0.082, 0.240, 0.961, 0, 0.240, 2.651
K3 = [ratio - log - 1 for ratio, log in zip(RATIOS, LOGS, strict=True)]  # 0.095, 0.193, 1.614, 0, 0.307, 1.403


def coin(engine: float, trainer: float) -> float:
    return engine * math.log(engine / trainer) + (1 - engine) * math.log((1 - engine) / (1 - trainer))


@pytest.mark.parametrize(
    ("band", "kept"),
    [
        (Band("token", "ratio", 2.5, 0.4), [1, 1, 0, 1, 1, 0]),
        (Band("token", "ratio", 2.5), [1, 1, 0, 1, 1, 1]),
        (Band("token", "k2", 0.2), [1, 0, 0, 1, 0, 0]),
        (Band("token", "k3", 0.2), [1, 1, 0, 1, 0, 0]),
        # Products 0.75, 8, 0.1; geometric means 0.866, 2, 0.1; largest 1.5, 4, 0.1.
        (Band("sum", "ratio", 7.9, 0.2), [1, 1, 0, 0, 0, 0]),
        (Band("sum", "ratio", 8.1, 0.05), [1, 1, 1, 1, 1, 1]),
        (Band("mean", "ratio", 1.9, 0.2), [1, 1, 0, 0, 0, 0]),
        (Band("max", "ratio", 3.9), [1, 1, 0, 0, 0, 1]),
        # Sums of k2: 0.322, 1.201, 2.651; of k3: 0.288, 1.921, 1.403.
        (Band("sum", "k2", 1.3), [1, 1, 1, 1, 1, 0]),
        (Band("mean", "k2", 0.41), [1, 1, 1, 1, 1, 0]),
        (Band("max", "k2", 0.9), [1, 1, 0, 0, 0, 0]),
        (Band("max", "k3", 1.5), [1, 1, 0, 0, 0, 1]),
        (Band("mean", "k3", 0.2), [1, 1, 0, 0, 0, 0]),
    ],
)
def test_bands_by_hand(band, kept):
    assert corrected(reject=[band]).keep_K.tolist() == kept


def test_bands_of_the_probabilities_alone():
    engine = torch.tensor([0.5, 0.9, 0.01, 0.3, 0.5, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.6, 0.9, 0.02, 0.1, 0.5, 0.25], dtype=torch.float64)
    coins = [coin(p, q) for p, q in zip(engine.tolist(), trainer.tolist(), strict=True)]
    assert coins == pytest.approx([0.0204, 0.0, 0.0031, 0.1537, 0.0, 0.0070], abs=1e-4)

    def kept(band: Band) -> list[float]:
        found = correct(trainer.log(), engine.log(), SEQUENCE, 4, **OFF, reject=[band])
        return found.keep_K.tolist()

    assert kept(Band("token", "binary_kl", 0.005)) == [0, 1, 1, 0, 1, 0]
    assert kept(Band("mean", "binary_kl", 0.04)) == [1, 1, 0, 0, 0, 1]  # means 0.0102, 0.0523, 0.0070
    assert kept(Band("token", "tv", 0.06)) == [0, 1, 1, 0, 1, 1]
    assert kept(Band("mean", "tv", 0.06)) == [1, 1, 0, 0, 0, 1]  # means 0.05, 0.07, 0.05


def test_all_bands_must_hold_and_the_mask_is_one_of_them():
    both = [Band("token", "ratio", 1.9), Band("sum", "k2", 1.3)]
    assert corrected(reject=both).keep_K.tolist() == [1, 1, 0, 1, 0, 0]
    assert corrected(reject=both, mask="token", low=0.6, high=9.0).keep_K.tolist() == [1, 0, 0, 1, 0, 0]


def test_what_is_rejected_may_count_in_the_means_with_nothing():
    result = corrected(weight="token", cap=None, mask="token", low=0.4, high=2.5, rejected="zero")
    assert result.weights_K.tolist() == pytest.approx([1.5, 0.5, 0.0, 1.0, 2.0, 0.0])
    assert result.keep_K.tolist() == [1] * 6
    assert result.metrics["rollout_corr/masked_share"] == pytest.approx(2 / 6)


def test_weights_have_a_floor_and_no_cap():
    assert corrected(weight="token", cap=None, floor=0.6).weights_K.tolist() == pytest.approx([1.5, 0.6, 4, 1, 2, 0.6])
    assert corrected(weight="none", cap=0.1, floor=3.0).weights_K.tolist() == [1] * 6


def test_weights_are_normalised_over_tokens_or_sequences():
    tokens = corrected(weight="token", normalize=True)  # 1.5, 0.5, 3, 1, 2, 0.1 have the mean 1.35
    assert tokens.weights_K.tolist() == pytest.approx([w / 1.35 for w in [1.5, 0.5, 3.0, 1.0, 2.0, 0.1]])
    rows = corrected(weight="sequence", cap=5.0, normalize=True)  # 0.75, 5 and 0.1: the empty one has no part
    assert rows.weights_K.tolist() == pytest.approx([w * 3 / 5.85 for w in [0.75, 0.75, 5, 5, 5, 0.1]])


def test_a_product_of_many_ratios_does_not_overflow():
    many = torch.full((200,), 5.0)
    found = correct(
        many, torch.zeros(200), torch.zeros(200, dtype=torch.long), 1, **OFF, reject=[Band("sum", "ratio", 2)]
    )
    assert found.keep_K.tolist() == [0] * 200


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ({"reject": [Band("row", "k2", 1.0)]}, "reject"),
        ({"reject": [Band("token", "k4", 1.0)]}, "reject"),
        ({"rejected": "kept"}, "rejected"),
    ],
)
def test_unknown_choices_of_bands_are_refused(choice, key):
    with pytest.raises(Refusal, match=rf"algorithm\.rollout_correction\.{key}"):
        corrected(**choice)


def test_the_effective_share_of_no_weight_is_missing():
    nothing = corrected(weight="token", cap=0.0)
    assert nothing.metrics["rollout_corr/weight_mean"] == 0.0
    assert "rollout_corr/effective_share" not in nothing.metrics
