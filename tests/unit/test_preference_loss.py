"""Preference losses by hand, by finite differences and by their properties."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from lockstep.algorithms.preference import LOSSES, REFERENCE_FREE, Pairs, preference_loss
from lockstep.errors import Refusal
from lockstep.recipe.offline import Preference

CHOSEN, REJECTED = [-4.0, -6.0, -3.0], [-5.0, -3.0, -6.0]
CHOSEN_LENGTH, REJECTED_LENGTH = [2, 4, 3], [5, 3, 6]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-5.0, -5.0, -4.0], [-4.0, -4.0, -7.0]
# Log-ratios: chosen 1, -1, 1; rejected -1, 1, 1.
SUMMED = [2.0, -2.0, 0.0]
AVERAGED = [1 / 2 + 1 / 5, -1 / 4 - 1 / 3, 1 / 3 - 1 / 6]
MEANS_CHOSEN, MEANS_REJECTED = [-2.0, -1.5, -1.0], [-1.0, -1.0, -1.0]
BETA, GAMMA, SMOOTHING = 0.5, 0.3, 0.1
SETTINGS = {
    "sigmoid": {"label_smoothing": SMOOTHING},
    "ipo": {},
    "hinge": {},
    "robust": {"label_smoothing": SMOOTHING},
    "simpo": {"label_smoothing": SMOOTHING, "gamma": GAMMA},
    "orpo": {},
    "cpo": {"label_smoothing": SMOOTHING},
}


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def example(**changes) -> Pairs:
    columns = [CHOSEN, REJECTED, CHOSEN_LENGTH, REJECTED_LENGTH, REFERENCE_CHOSEN, REFERENCE_REJECTED]
    return replace(Pairs(*map(tensor, columns)), **changes)


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def smoothed(x: float, share: float) -> float:
    return -(1 - share) * log_sigmoid(x) - share * log_sigmoid(-x)


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def loss_of(kind: str, pairs: Pairs | None = None, **settings) -> float:
    return preference_loss(pairs or example(), kind=kind, beta=BETA, **settings).loss.item()


@pytest.mark.parametrize(("average", "differences"), [(False, SUMMED), (True, AVERAGED)])
def test_losses_with_a_reference_by_hand(average, differences):
    for share in (0.0, 0.1):
        expected = sum(smoothed(BETA * h, share) for h in differences)
        assert loss_of("sigmoid", label_smoothing=share, average=average) == pytest.approx(expected)
    expected = sum((h - 1.0) ** 2 for h in differences)
    assert loss_of("ipo", average=average) == pytest.approx(expected)
    expected = sum(max(0.0, 1 - 0.5 * h) for h in differences)
    assert loss_of("hinge", average=average) == pytest.approx(expected)
    expected = sum((-0.9 * log_sigmoid(0.5 * h) + 0.1 * log_sigmoid(-0.5 * h)) / 0.8 for h in differences)
    assert loss_of("robust", label_smoothing=0.1, average=average) == pytest.approx(expected)


def test_well_known_values():
    # h = 2, -2, 0 with beta 0.5: log(1 + 1/e) = 0.3133, log(1 + e) = 1.3133, log 2 = 0.6931.
    assert loss_of("sigmoid") == pytest.approx(2.319671, abs=1e-6)
    assert loss_of("ipo") == pytest.approx(1 + 9 + 1)
    assert loss_of("hinge") == pytest.approx(0 + 2 + 1)


def test_reference_free_losses_by_hand():
    differences = [chosen - rejected for chosen, rejected in zip(MEANS_CHOSEN, MEANS_REJECTED, strict=True)]
    expected = sum(smoothed(0.5 * h - 0.3, 0.1) for h in differences)
    assert loss_of("simpo", label_smoothing=0.1, gamma=0.3) == pytest.approx(expected)
    expected = sum(
        -0.5 * log_sigmoid(log_odds(chosen) - log_odds(rejected))
        for chosen, rejected in zip(MEANS_CHOSEN, MEANS_REJECTED, strict=True)
    )
    assert loss_of("orpo") == pytest.approx(expected)
    expected = sum(smoothed(0.5 * h, 0.1) for h in [1.0, -3.0, 3.0])
    assert loss_of("cpo", label_smoothing=0.1) == pytest.approx(expected)
    assert loss_of("cpo", average=True) == pytest.approx(sum(-log_sigmoid(0.5 * h) for h in differences))


@pytest.mark.parametrize("kind", REFERENCE_FREE)
def test_reference_free_losses_do_not_look_at_a_reference(kind):
    without = example(reference_chosen_P=None, reference_rejected_P=None)
    assert loss_of(kind, without) == loss_of(kind)


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_simpo_and_orpo_always_take_means(kind):
    assert loss_of(kind, average=True) == loss_of(kind, average=False)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_likelihood_term_is_a_mean_of_each_response(kind):
    plain = preference_loss(example(), kind=kind, beta=BETA)
    added = preference_loss(example(), kind=kind, beta=BETA, nll=0.7)
    assert added.loss.item() - plain.loss.item() == pytest.approx(0.7 * (2.0 + 1.5 + 1.0))
    assert added.metrics["nll"].item() == pytest.approx(4.5)
    assert "nll" not in plain.metrics


@pytest.mark.parametrize(
    ("kind", "average", "chosen", "rejected", "accuracy"),
    [
        ("sigmoid", False, 0.5 * (1 - 1 + 1), 0.5 * (-1 + 1 + 1), 1.5),
        ("hinge", True, 0.5 * (1 / 2 - 1 / 4 + 1 / 3), 0.5 * (-1 / 5 + 1 / 3 + 1 / 6), 2.0),
        ("simpo", False, 0.5 * -4.5, 0.5 * -3.0, 0.5),
        ("orpo", False, 0.5 * -4.5, 0.5 * -3.0, 0.5),
        ("cpo", False, 0.5 * -13.0, 0.5 * -14.0, 2.0),
        ("cpo", True, 0.5 * -4.5, 0.5 * -3.0, 0.5),
    ],
)
def test_metrics_by_hand(kind, average, chosen, rejected, accuracy):
    pairs = example(chosen_P=tensor(CHOSEN).requires_grad_())
    metrics = preference_loss(pairs, kind=kind, beta=BETA, average=average, nll=1.0).metrics
    assert metrics["chosen"].item() == pytest.approx(chosen)
    assert metrics["rejected"].item() == pytest.approx(rejected)
    assert metrics["margin"].item() == pytest.approx(chosen - rejected)
    assert metrics["accuracy"].item() == accuracy
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("average", [False, True])
def test_gradients_by_finite_differences(kind, average):
    # Away from the corner of the hinge.
    chosen, rejected = tensor([-4.1, -6.2, -3.3]).requires_grad_(), tensor(REJECTED).requires_grad_()

    def loss(chosen_P, rejected_P):
        pairs = example(chosen_P=chosen_P, rejected_P=rejected_P)
        return preference_loss(pairs, kind=kind, beta=BETA, average=average, nll=0.7, **SETTINGS[kind]).loss

    assert torch.autograd.gradcheck(loss, (chosen, rejected))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("chosen", "rejected"), [(-1e4, -1.0), (-1.0, -1e4), (-1e4, -1e4), (0.0, 0.0), (0.0, -1e4)])
def test_extreme_numbers_stay_numbers(kind, chosen, rejected):
    for chosen_value, rejected_value in [(chosen, rejected), (rejected, chosen)]:
        leaves = [torch.tensor([value], requires_grad=True) for value in (chosen_value, rejected_value)]
        one, zero = torch.ones(1), torch.zeros(1)
        settings = {**SETTINGS[kind], "beta": 1.0}
        loss = preference_loss(Pairs(*leaves, one, one, zero, zero), kind=kind, **settings).loss
        gradients = torch.autograd.grad(loss, leaves)
        assert math.isfinite(loss.item())
        assert all(math.isfinite(gradient.item()) for gradient in gradients)


def test_saturated_pairs_have_the_right_slopes():
    chosen = tensor([1e4, -1e4]).requires_grad_()
    none = tensor([0.0, 0.0])
    sums = preference_loss(Pairs(chosen, none, none + 1, none + 1, none, none), kind="sigmoid", beta=1.0)
    (gradient,) = torch.autograd.grad(sums.loss, chosen)
    assert sums.loss.item() == pytest.approx(1e4)
    assert gradient.tolist() == [0.0, -1.0]


def test_orpo_of_a_certain_response():
    # m = 0 counts as -1e-6: log odds = -1e-6 - log(1e-6 - 5e-13) = 13.8155; a response at log 0.5 has log odds 0.
    one = torch.ones(1)
    for certain, other, loss in [(0.0, math.log(0.5), 1e-6), (math.log(0.5), 0.0, 13.81551)]:
        pairs = Pairs(torch.tensor([certain]), torch.tensor([other]), one, one, None, None)
        assert preference_loss(pairs, kind="orpo", beta=1.0).loss.item() == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_add_up(kind):
    whole = preference_loss(example(), kind=kind, beta=BETA, nll=0.7, **SETTINGS[kind])
    parts = []
    for part in (slice(0, 1), slice(1, 3)):
        columns = [getattr(example(), field.name)[part] for field in fields(Pairs)]
        parts.append(preference_loss(Pairs(*columns), kind=kind, beta=BETA, nll=0.7, **SETTINGS[kind]))
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item())


@pytest.mark.parametrize("kind", LOSSES)
def test_no_pairs_keep_the_graph(kind):
    none = torch.zeros(0, requires_grad=True)
    sums = preference_loss(Pairs(none, none, *[torch.zeros(0)] * 4), kind=kind, beta=BETA, nll=1.0)
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert all(value.item() == 0 for value in sums.metrics.values())


@pytest.mark.parametrize("kind", LOSSES)
def test_agrees_with_plain_torch(kind):
    draw = torch.Generator().manual_seed(3)
    columns = [-20 * torch.rand(50, generator=draw, dtype=torch.float64) for _ in range(4)]
    lengths = [torch.randint(1, 30, (50,), generator=draw) for _ in range(2)]
    chosen, rejected, reference_chosen, reference_rejected = columns
    sums = preference_loss(
        Pairs(chosen, rejected, *lengths, reference_chosen, reference_rejected), kind=kind, beta=0.3, **SETTINGS[kind]
    )
    h = (chosen - rejected) - (reference_chosen - reference_rejected)
    means = chosen / lengths[0], rejected / lengths[1]
    if kind == "cpo":
        h = chosen - rejected
    elif kind == "simpo":
        h = means[0] - means[1] - GAMMA / 0.3
    elif kind == "orpo":
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        h = (odds[0] / odds[1]).log() / 0.3
    win, lose = torch.sigmoid(0.3 * h), torch.sigmoid(-0.3 * h)
    expected = {
        "sigmoid": -0.9 * win.log() - 0.1 * lose.log(),
        "simpo": -0.9 * win.log() - 0.1 * lose.log(),
        "cpo": -0.9 * win.log() - 0.1 * lose.log(),
        "robust": (-0.9 * win.log() + 0.1 * lose.log()) / 0.8,
        "orpo": -0.3 * win.log(),
        "ipo": (h - 1 / 0.6) ** 2,
        "hinge": torch.clamp(1 - 0.3 * h, min=0),
    }
    assert sums.loss.item() == pytest.approx(expected[kind].sum().item())


def test_the_recipe_knows_these_losses():
    assert set(LOSSES) == set(get_args(Preference.model_fields["loss"].annotation))


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("dpo", {}, "preference.loss"),
        ("ipo", {"label_smoothing": 0.1}, "preference.label_smoothing"),
        ("sigmoid", {"gamma": 0.1}, "preference.gamma"),
    ],
)
def test_what_a_loss_does_not_look_at_is_refused(kind, settings, key):
    with pytest.raises(Refusal) as refused:
        loss_of(kind, **settings)
    assert refused.value.problems[0].where == key


def test_a_missing_reference_is_refused():
    with pytest.raises(Refusal, match="compares with a reference"):
        loss_of("sigmoid", example(reference_rejected_P=None))
