"""The loss of judged steps by hand, by finite differences and by its properties."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.algorithms.token_losses import good_probability, step_loss

# Two words in a large vocabulary: at each place they hold only a part of the probability.
PROBABILITIES = [[0.3, 0.1], [0.05, 0.15], [0.2, 0.2], [0.4, 0.1]]
LABELS = [[1.0, 0.0], [0.9, 0.1], [1.0, 0.0], [0.5, 0.5]]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_loss_and_metrics_by_hand():
    # Restricted to the two words: 0.75, 0.25, 0.5, 0.8.
    expected = (
        -math.log(0.75)
        - (0.9 * math.log(0.25) + 0.1 * math.log(0.75))
        - math.log(0.5)
        - (0.5 * math.log(0.8) + 0.5 * math.log(0.2))
    )
    sums = step_loss(tensor(PROBABILITIES).log().requires_grad_(), tensor(LABELS))
    assert sums.loss.item() == pytest.approx(expected)
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(
        {
            "accuracy": 1 + 0 + 0.5 + 0.5,
            "positive": 0.75 + 0.25 + 0.5 + 0.8,
            "label_positive": 1 + 0.9 + 1 + 0.5,
        }
    )
    assert not any(value.requires_grad for value in sums.metrics.values())


def test_soft_labels_count_by_their_side():
    labels = tensor([[0.51, 0.49], [0.49, 0.51]])
    assert step_loss(tensor([[-1.0, -2.0], [-1.0, -2.0]]), labels).metrics["accuracy"].item() == 1


def test_more_than_two_words():
    sums = step_loss(tensor([[0.2, 0.1, 0.1], [0.1, 0.2, 0.1]]).log(), tensor([[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]))
    assert sums.loss.item() == pytest.approx(-0.2 * math.log(0.5) - 0.8 * math.log(0.25) - math.log(0.5))
    assert sums.metrics["accuracy"].item() == 1
    assert sums.metrics["positive"].item() == pytest.approx(0.75)


def test_good_probability():
    assert good_probability(tensor(PROBABILITIES).log()).tolist() == pytest.approx([0.75, 0.25, 0.5, 0.8])


def test_gradient_by_finite_differences():
    logprobs = tensor(PROBABILITIES).log().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: step_loss(x, tensor(LABELS)).loss, (logprobs,))


def test_agrees_with_torch_cross_entropy():
    draw = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(30, 100, generator=draw, dtype=torch.float64)
    words = logits.log_softmax(-1)[:, [7, 50, 3]]
    hard = torch.randint(0, 3, (30,), generator=draw)
    expected = torch.nn.functional.cross_entropy(logits[:, [7, 50, 3]], hard, reduction="sum")
    sums = step_loss(words, torch.nn.functional.one_hot(hard, 3).double())
    assert sums.loss.item() == pytest.approx(expected.item())
    assert sums.metrics["accuracy"].item() == (logits[:, [7, 50, 3]].argmax(-1) == hard).sum()


def test_extreme_numbers_stay_numbers():
    logprobs = torch.tensor([[-1e4, -1.0], [-1.0, -1e4], [-1.0, -math.inf]], requires_grad=True)
    sums = step_loss(logprobs, torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(9999)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1, 1], [0, 0], [0, 0]]


def test_micro_batches_add_up():
    logprobs, labels = tensor(PROBABILITIES).log(), tensor(LABELS)
    whole = step_loss(logprobs, labels)
    parts = [step_loss(logprobs[part], labels[part]) for part in (slice(0, 3), slice(3, 3), slice(3, 4))]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item())
