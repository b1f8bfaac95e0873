"""Losses of ranked responses by hand, by finite differences and by their properties."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch

from lockstep.algorithms.ranking import PAIR_LOSSES, RANKINGS, pair_loss, ranking_loss
from lockstep.errors import Refusal
from lockstep.recipe.keys_offline import RewardModelSettings

# A pair with a margin, a ranking of three, a tied pair.
SCORES = [2.0, 0.5, 1.0, 3.0, -1.0, 0.7, 0.7]
RANKING = [0, 0, 1, 1, 1, 2, 2]
MARGINS = [0.25, 0.0, 0.0]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(scores=None, ranking_of=RANKING, margins=MARGINS, **settings):
    scores_S = tensor(SCORES) if scores is None else scores
    return ranking_loss(scores_S, torch.tensor(ranking_of, dtype=torch.int64), tensor(margins), **settings)


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


def test_pair_losses_by_hand():
    chosen, rejected, margin = tensor([2.0, 0.0]), tensor([0.5, 1.0]), tensor([0.25, 0.0])
    expected = [math.log(1 + math.exp(-1.25)), math.log(1 + math.exp(1.0))]
    for kind in PAIR_LOSSES:
        assert pair_loss(chosen, rejected, margin, kind).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_the_mean_over_pairs_by_hand(kind):
    three = (minus_log_sigmoid(-2.0) + minus_log_sigmoid(2.0) + minus_log_sigmoid(4.0)) / 3
    expected = minus_log_sigmoid(1.25) + three + math.log(2)
    assert run(kind=kind).loss.item() == pytest.approx(expected)


def test_plackett_luce_by_hand():
    e = math.exp
    three = (-math.log(e(1) / (e(1) + e(3) + e(-1))) - math.log(e(3) / (e(3) + e(-1)))) / 2
    expected = minus_log_sigmoid(1.25) + three + math.log(2)
    assert run(ranking="plackett_luce").loss.item() == pytest.approx(expected)


def test_plackett_luce_is_a_likelihood():
    """Over all the orders of four responses the probabilities add up to 1."""
    scores = [0.3, -1.2, 2.0, 0.9]
    total = 0.0
    for order in itertools.permutations(scores):
        loss = run(tensor(order), [0] * 4, [0.0], ranking="plackett_luce").loss.item()
        total += math.exp(-3 * loss)
    assert total == pytest.approx(1.0)


def test_plackett_luce_of_pairs_is_the_sigmoid_loss():
    draw = torch.Generator().manual_seed(2)
    scores, margins = torch.randn(20, generator=draw), torch.rand(10, generator=draw)
    numbers = torch.arange(10).repeat_interleave(2)
    pairs = ranking_loss(scores, numbers, margins, ranking="pairs")
    choices = ranking_loss(scores, numbers, margins, ranking="plackett_luce")
    assert choices.loss.item() == pytest.approx(pairs.loss.item(), rel=1e-6)


@pytest.mark.parametrize("ranking", RANKINGS)
def test_centring_by_hand(ranking):
    plain, centred = run(ranking=ranking), run(ranking=ranking, centre=0.1)
    # Twice the means: 2.5, 2, 1.4.
    assert centred.loss.item() - plain.loss.item() == pytest.approx(0.1 * (6.25 + 4.0 + 1.96))


@pytest.mark.parametrize("ranking", RANKINGS)
def test_metrics_by_hand(ranking):
    metrics = run(tensor(SCORES).requires_grad_(), ranking=ranking).metrics
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "accuracy": 1 + 2 / 3 + 0.5,
            "margin": 1.5 + (-2 + 2 + 4) / 3 + 0,
            "chosen": 2.0 + 1.0 + 0.7,
            "rejected": 0.5 - 1.0 + 0.7,
        }
    )
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_gradients_by_finite_differences(ranking, kind):
    scores = tensor(SCORES).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: run(x, kind=kind, ranking=ranking, centre=0.1).loss, (scores,))


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_extreme_scores_stay_numbers(ranking, kind):
    scores = torch.tensor([1e4, -1e4, -1e4, 1e4, 0.0, 1e4, 1e4], requires_grad=True)
    sums = run(scores, kind=kind, ranking=ranking)
    sums.loss.backward()
    assert math.isfinite(sums.loss.item())
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("ranking", RANKINGS)
def test_micro_batches_add_up(ranking):
    whole = run(ranking=ranking, centre=0.1)
    parts = [
        run(tensor(SCORES[:2]), [0, 0], MARGINS[:1], ranking=ranking, centre=0.1),
        run(tensor(SCORES[2:]), [0, 0, 0, 1, 1], MARGINS[1:], ranking=ranking, centre=0.1),
    ]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item())


@pytest.mark.parametrize("ranking", RANKINGS)
def test_agrees_with_a_plain_loop(ranking):
    draw = torch.Generator().manual_seed(6)
    sizes = [2, 5, 2, 3, 7, 2]
    scores = torch.randn(sum(sizes), generator=draw, dtype=torch.float64)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    expected = 0.0
    for own in scores.split(sizes):
        if ranking == "pairs":
            terms = [-torch.sigmoid(a - b).log() for a, b in itertools.combinations(own, 2)]
        else:
            terms = [-torch.softmax(own[i:], 0)[0].log() for i in range(len(own) - 1)]
        expected += sum(terms).item() / len(terms)
    assert run(scores, numbers, [0.0] * 6, ranking=ranking).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("ranking", RANKINGS)
def test_no_rankings_keep_the_graph(ranking):
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    sums = run(none, [], [], ranking=ranking, centre=0.1)
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert all(value.item() == 0 for value in sums.metrics.values())


def test_a_lone_response_is_no_ranking():
    with pytest.raises(ValueError, match="ranking 1 has fewer than two"):
        run(tensor([1.0, 2.0, 3.0]), [0, 0, 1], [0.0, 0.0])


def test_unknown_names_are_refused():
    with pytest.raises(Refusal, match=r"rm\.ranking"):
        run(ranking="listwise")
    with pytest.raises(Refusal, match=r"rm\.loss"):
        run(kind="hinge")


def test_the_recipe_knows_these_names():
    assert set(PAIR_LOSSES) == set(get_args(RewardModelSettings.model_fields["loss"].annotation))
    assert set(RANKINGS) == set(get_args(RewardModelSettings.model_fields["ranking"].annotation))
