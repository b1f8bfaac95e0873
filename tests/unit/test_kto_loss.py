"""KTO: the loss, the mismatched rows and the balance of the weights, by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lockstep.algorithms.kto import imbalance_note, kl_estimate, kto_loss, mismatched_rows, recommended_weights
from work import lines_run

LOGRATIOS = [2.0, -1.0, 0.5, 3.0, 0.5]
DESIRABLE = [True, True, False, False, True]
SETTINGS = {"kl": 0.5, "beta": 0.4, "desirable": 1.5, "undesirable": 0.8}


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_and_metrics_by_hand():
    logratios = tensor(LOGRATIOS).requires_grad_()
    sums = kto_loss(logratios, torch.tensor(DESIRABLE), **SETTINGS)
    expected = (
        1.5 * (1 - sigmoid(0.4 * 1.5))
        + 1.5 * (1 - sigmoid(0.4 * -1.5))
        + 0.8 * (1 - sigmoid(0.0))
        + 0.8 * (1 - sigmoid(0.4 * -2.5))
        + 1.5 * (1 - sigmoid(0.0))
    )
    assert sums.loss.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(sums.loss, logratios)
    slope = [0.4 * sigmoid(0.4 * (lr - 0.5)) * sigmoid(-0.4 * (lr - 0.5)) for lr in LOGRATIOS]
    signs = [-1.5, -1.5, 0.8, 0.8, -1.5]
    assert gradient.tolist() == pytest.approx([sign * size for sign, size in zip(signs, slope, strict=True)])
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(
        {
            "desirable": 3,
            "undesirable": 2,
            "reward_desirable": 0.4 * 1.5,
            "reward_undesirable": 0.4 * 3.5,
            "accuracy": 1 + 0 + 0.5 + 0 + 0.5,
        }
    )
    assert not any(value.requires_grad for value in sums.metrics.values())


def test_a_row_on_the_right_side_counts():
    sums = kto_loss(tensor([2.0, -2.0]), torch.tensor([True, False]), **SETTINGS)
    assert sums.metrics["accuracy"].item() == 2


def test_gradient_by_finite_differences():
    logratios = tensor(LOGRATIOS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kto_loss(x, torch.tensor(DESIRABLE), **SETTINGS).loss, (logratios,))


def test_extreme_numbers_stay_numbers_and_keep_their_digits():
    logratios = torch.tensor([1e4, -1e4, 1e4, -1e4, 75.5], requires_grad=True)
    sums = kto_loss(logratios, torch.tensor([True, True, False, False, True]), **SETTINGS)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(1.5 + 0.8)
    assert logratios.grad is not None
    assert logratios.grad[:4].tolist() == [0, 0, 0, 0]
    # 1 - sigmoid(30) is 9.4e-14, which float32 has only as sigmoid(-30).
    assert logratios.grad[4].item() == pytest.approx(-1.5 * 0.4 * math.exp(-30), rel=1e-4, abs=0)


def test_micro_batches_add_up():
    logratios, desirable = tensor(LOGRATIOS), torch.tensor(DESIRABLE)
    whole = kto_loss(logratios, desirable, **SETTINGS)
    parts = [kto_loss(logratios[part], desirable[part], **SETTINGS) for part in (slice(0, 2), slice(2, 2), slice(2, 5))]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item())


def test_the_divergence_is_a_mean_and_not_negative():
    assert kl_estimate(torch.tensor([3.0, -1.0, 1.0])) == 1.0
    assert kl_estimate(torch.tensor([-3.0, -1.0, 1.0])) == 0.0
    assert math.isnan(kl_estimate(torch.tensor([math.nan, 1.0])))
    with pytest.raises(ValueError, match="there are none"):
        kl_estimate(torch.zeros(0))


@pytest.mark.parametrize(
    ("prompts", "completions", "expected"),
    [
        ("abc", "xyz", [1, 2, 0]),
        # Rows 0 and 1 share a prompt; so do 0 and 3, around the end.
        ("aabab", "vwxyz", [2, 2, 3, 4, 0]),
        # Another prompt with the same completion does not help.
        ("abc", "xxy", [2, 2, 0]),
        # One prompt: the next other completion.
        ("aaa", "xxy", [2, 2, 0]),
        # Row 0's only other prompts have its own completion: it falls back to its prompt's other completion.
        ("abba", "xxxy", [3, 3, 3, 1]),
    ],
)
def test_mismatched_rows_by_hand(prompts, completions, expected):
    assert mismatched_rows([[ord(p)] for p in prompts], [[ord(c)] for c in completions]) == expected


def plainly_mismatched(prompts, completions):
    chosen = []
    for i in range(len(prompts)):
        others = [(i + step) % len(prompts) for step in range(1, len(prompts))]
        differ = [j for j in others if completions[j] != completions[i]]
        both = [j for j in differ if prompts[j] != prompts[i]]
        chosen.append((both or differ or [None])[0])
    return chosen


def test_mismatched_rows_agree_with_the_plain_search():
    draw = random.Random(4)
    for _ in range(300):
        count, kinds = draw.randrange(2, 9), draw.randrange(1, 4)
        prompts = [(draw.randrange(kinds), 7) for _ in range(count)]
        completions = [[draw.randrange(3)] for _ in range(count)]
        expected = plainly_mismatched(prompts, completions)
        if None in expected:
            with pytest.raises(ValueError, match=f"row {expected.index(None)} "):
                mismatched_rows(prompts, completions)
        else:
            assert mismatched_rows(prompts, completions) == expected


@pytest.mark.parametrize("completions", [[], [[1]], [[1], [1], [1]]])
def test_a_batch_without_another_completion_has_no_mismatch(completions):
    prompts = [[number] for number in range(len(completions))]
    if not completions:
        assert mismatched_rows(prompts, completions) == []
        return
    with pytest.raises(ValueError, match="row 0 has no mismatched completion"):
        mismatched_rows(prompts, completions)


def test_many_rows_of_one_prompt():
    count = 10_000
    assert mismatched_rows([[1]] * count, [[number] for number in range(count)]) == [*range(1, count), 0]
    half = mismatched_rows([[number // 5_000] for number in range(count)], [[number] for number in range(count)])
    assert half[:2] == [5_000, 5_000]
    assert half[-1] == 0


@pytest.mark.parametrize("prompts", [1, 2])
def test_twice_the_rows_of_a_prompt_are_twice_the_work(prompts):
    def work(count):
        rows = [[number * prompts // count] for number in range(count)], [[number] for number in range(count)]
        return lines_run(lambda: mismatched_rows(*rows))

    assert work(2_000) <= 2.1 * work(1_000)


def test_recommended_weights_by_hand():
    for_desirable, for_undesirable = recommended_weights(100, 400)
    assert for_desirable == pytest.approx((4.0, 16 / 3))
    assert for_undesirable == pytest.approx((3 / 16, 0.25))
    with pytest.raises(ValueError, match="two kinds"):
        recommended_weights(0, 3)


@pytest.mark.parametrize(
    ("desirable", "undesirable", "w_d", "w_u"), [(100, 100, 1, 1), (400, 300, 1, 1), (100, 400, 4, 1), (300, 100, 1, 3)]
)
def test_balanced_rows_need_no_note(desirable, undesirable, w_d, w_u):
    assert imbalance_note(desirable, undesirable, w_d, w_u) is None


@pytest.mark.parametrize(
    ("desirable", "undesirable", "w_d", "w_u", "said"),
    [
        (1000, 4000, 1, 1, ["1,000 desirable", "4,000 undes", "0.25 to 1", "preference.desirable between 4 and 5.33"]),
        (4000, 1000, 1, 1, ["4 to 1", "preference.undesirable between 3 and 4."]),
        (300, 400, 1, 1, ["0.75 to 1", "preference.desirable between 1.34 and 1.77"]),
        (110, 100, 1, 5, ["0.22 to 1", "set preference.desirable to 1 and preference.undesirable between 1 and 1.1."]),
        (12, 0, 1, 1, ["All 12 rows are desirable"]),
        (0, 12, 1, 1, ["All 12 rows are undesirable"]),
    ],
)
def test_an_imbalance_is_told(desirable, undesirable, w_d, w_u, said):
    note = imbalance_note(desirable, undesirable, w_d, w_u)
    assert note is not None
    for words in said:
        assert words in note


@pytest.mark.parametrize(("desirable", "undesirable"), [(7, 31), (31, 7), (300, 400), (3, 2), (999, 1000)])
def test_the_weights_that_a_note_names_are_balanced(desirable, undesirable):
    note = imbalance_note(desirable, undesirable, 1, 1)
    assert note is not None
    low, high = note.rstrip(".").split("between ")[1].split(" and ")
    for weight in (float(low), float(high)):
        weights = (weight, 1.0) if "preference.desirable between" in note else (1.0, weight)
        assert imbalance_note(desirable, undesirable, *weights) is None
