"""Preference losses by hand, by finite differences and by their properties."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from lockstep.algorithms import preference as transport
from lockstep.algorithms.preference import LOSSES, RANKED, REFERENCE_FREE, Pairs, preference_loss, shared_length_weights
from lockstep.errors import Refusal
from lockstep.recipe.keys_offline import Preference

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
    "exo_pair": {"label_smoothing": SMOOTHING},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.4},
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


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


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


# Log-ratios of the example's pairs: (1, -1), (-1, 1), (1, 1); beta 0.5.
SCORES = [(1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)]


def by_hand(loss) -> float:
    return sum(loss(chosen, rejected) for chosen, rejected in SCORES)


def test_further_losses_by_hand():
    def exo(c, r):
        won = sigmoid(0.5 * (c - r))
        return won * (math.log(won) - math.log(0.9)) + (1 - won) * (math.log(1 - won) - math.log(0.1))

    def nca(c, r):
        return -log_sigmoid(0.5 * c) - 0.5 * log_sigmoid(-0.5 * c) - 0.5 * log_sigmoid(-0.5 * r)

    def disco(c, r):
        share = sigmoid(0.5 * (c - r) / 0.4)
        return -(1 - share) * log_sigmoid(0.5 * (c - r)) + share * math.exp(-0.5 * (c - r))

    assert loss_of("exo_pair", label_smoothing=0.1) == pytest.approx(by_hand(exo))
    assert loss_of("nca_pair") == pytest.approx(by_hand(nca))
    bco = by_hand(lambda c, r: -log_sigmoid(0.5 * c) - log_sigmoid(-0.5 * r))
    assert loss_of("bco_pair") == pytest.approx(bco)
    # 1 / (2 beta) = 1: (1 - 1)^2 + (-1 + 1)^2, (-1 - 1)^2 + (1 + 1)^2, 0 + (1 + 1)^2
    assert loss_of("sppo_hard") == pytest.approx(0 + 8 + 4)
    assert loss_of("apo_zero") == pytest.approx(by_hand(lambda c, r: 1 - sigmoid(0.5 * c) + sigmoid(0.5 * r)))
    assert loss_of("apo_down") == pytest.approx(by_hand(lambda c, r: sigmoid(0.5 * c) + 1 - sigmoid(0.5 * (c - r))))
    assert loss_of("discopop", discopop_tau=0.4) == pytest.approx(by_hand(disco))


@pytest.mark.parametrize(
    ("divergence", "alpha", "slope"),
    [
        ("reverse_kl", 0.5, lambda u: u),
        ("forward_kl", 0.5, lambda u: 1 - math.exp(-u)),
        ("js", 0.5, lambda u: math.log(2 * math.exp(u) / (1 + math.exp(u)))),
        ("alpha", 0.3, lambda u: (1 - math.exp(u) ** -0.3) / 0.3),
    ],
)
def test_divergences_by_hand(divergence, alpha, slope):
    """f'(e^u) in place of the log-ratio u; a mean is taken of it, not of u."""
    found = loss_of("sigmoid", divergence=divergence, alpha=alpha)
    assert found == pytest.approx(by_hand(lambda c, r: -log_sigmoid(0.5 * (slope(c) - slope(r)))))
    averaged = sum(
        -log_sigmoid(0.5 * (slope(c) / m - slope(r) / n))
        for (c, r), m, n in zip(SCORES, CHOSEN_LENGTH, REJECTED_LENGTH, strict=True)
    )
    assert loss_of("sigmoid", divergence=divergence, alpha=alpha, average=True) == pytest.approx(averaged)


def test_alpha_joins_the_two_kls():
    assert loss_of("ipo", divergence="alpha", alpha=1.0) == loss_of("ipo", divergence="forward_kl")
    assert loss_of("ipo", divergence="alpha", alpha=1e-7) == pytest.approx(loss_of("ipo"), rel=1e-6)


def test_ranks_by_hand():
    """Policy margins 1, -3, 3 are ranked 2nd, 1st, 3rd; the reference's -1, -1, 3 in order 1st, 2nd, 3rd."""
    pairs = example()
    partners = transport.paired_partners(*map(tensor, [CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED]))
    expected = sum(smoothed(0.5 * h, 0.1) for h in [1 - -1, -3 - -1, 3 - 3])
    found = preference_loss(pairs, kind="aot", beta=BETA, label_smoothing=0.1, partners=partners)
    assert found.loss.item() == pytest.approx(expected)
    # Chosen ratios 1, -1, 1 sorted -1, 1, 1; rejected ratios -1, 1, 1 the same: every difference is 0.
    partners = transport.unpaired_partners(tensor([1.0, -1.0, 1.0]), tensor([-1.0, 1.0, 1.0]))
    found = preference_loss(pairs, kind="aot_unpaired", beta=BETA, partners=partners)
    assert found.loss.item() == pytest.approx(3 * math.log(2))
    # The metrics are of the pairs themselves.
    assert found.metrics["accuracy"].item() == 1.5


@pytest.mark.parametrize("kind", RANKED)
def test_ranks_of_an_update_in_micro_batches(kind):
    """Against sorting everything in one graph; each micro-batch sees the others' responses as constants only."""
    draw = torch.Generator().manual_seed(5)
    columns = [-9 * torch.rand(7, generator=draw, dtype=torch.float64) for _ in range(4)]
    chosen, rejected = columns[0].requires_grad_(), columns[1].requires_grad_()
    reference = columns[2:]
    if kind == "aot":
        delta = (chosen - rejected).sort().values - (reference[0] - reference[1]).sort().values
        partners = transport.paired_partners(chosen.detach(), rejected.detach(), *reference)
    else:
        delta = (chosen - reference[0]).sort().values - (rejected - reference[1]).sort().values
        partners = transport.unpaired_partners((chosen - reference[0]).detach(), (rejected - reference[1]).detach())
    whole = -torch.nn.functional.logsigmoid(BETA * delta).sum()
    expected = torch.autograd.grad(whole, (chosen, rejected))
    parts = []
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        one = torch.ones(len(chosen[part]))
        pairs = Pairs(chosen[part], rejected[part], one, one, reference[0][part], reference[1][part])
        own = replace(partners, chosen_P=partners.chosen_P[part], rejected_P=partners.rejected_P[part])
        parts.append(preference_loss(pairs, kind=kind, beta=BETA, partners=own).loss)
    assert sum(parts).item() == pytest.approx(whole.item())
    for found, wanted in zip(torch.autograd.grad(sum(parts), (chosen, rejected)), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12)


def test_ranks_need_the_update():
    for kind in RANKED:
        with pytest.raises(Refusal, match="pairs of an update"):
            loss_of(kind)


def test_weights_of_the_surplus_by_hand():
    """Pairs of 3 and 1, then of 2 and 2 tokens: the first response's second and third token are its surplus."""
    lengths = torch.tensor([3, 1, 2, 2])
    sequence = torch.repeat_interleave(torch.arange(4), lengths)
    assert shared_length_weights(sequence, lengths, 0.25).tolist() == [1, 0.25, 0.25, 1, 1, 1, 1, 1]


def test_the_likelihood_term_counts_every_token():
    pairs = example(chosen_P=tensor([-1.0, -1.0, -1.0]), likelihood_P=tensor(CHOSEN))
    found = preference_loss(pairs, kind="sigmoid", beta=BETA, nll=1.0)
    assert found.metrics["nll"].item() == pytest.approx(4.5)


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
    plain = preference_loss(example(), kind=kind, beta=BETA, **SETTINGS[kind])
    added = preference_loss(example(), kind=kind, beta=BETA, nll=0.7, **SETTINGS[kind])
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


@pytest.mark.daily
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
        columns = [getattr(example(), field.name)[part] for field in fields(Pairs)[:6]]
        parts.append(preference_loss(Pairs(*columns), kind=kind, beta=BETA, nll=0.7, **SETTINGS[kind]))
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item())


@pytest.mark.parametrize("kind", LOSSES)
def test_no_pairs_keep_the_graph(kind):
    none = torch.zeros(0, requires_grad=True)
    sums = preference_loss(Pairs(none, none, *[torch.zeros(0)] * 4), kind=kind, beta=BETA, nll=1.0, **SETTINGS[kind])
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
    own, other = 0.3 * (chosen - reference_chosen), 0.3 * (rejected - reference_rejected)
    good, bad = torch.sigmoid(own), torch.sigmoid(other)
    share = torch.sigmoid(0.3 * h / 0.4)
    expected = {
        "exo_pair": win * (win / 0.9).log() + lose * (lose / 0.1).log(),
        "nca_pair": -good.log() - 0.5 * (1 - good).log() - 0.5 * (1 - bad).log(),
        "bco_pair": -good.log() - (1 - bad).log(),
        "sppo_hard": (own / 0.3 - 1 / 0.6) ** 2 + (other / 0.3 + 1 / 0.6) ** 2,
        "apo_zero": 1 - good + bad,
        "apo_down": good + 1 - win,
        "discopop": -(1 - share) * win.log() + share * (-0.3 * h).exp(),
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
    assert {*LOSSES, *RANKED} == set(get_args(Preference.model_fields["loss"].annotation))


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("dpo", {}, "preference.loss"),
        ("ipo", {"label_smoothing": 0.1}, "preference.label_smoothing"),
        ("sigmoid", {"gamma": 0.1}, "preference.gamma"),
        ("exo_pair", {}, "preference.label_smoothing"),
        ("nca_pair", {"divergence": "js"}, "preference.divergence"),
    ],
)
def test_what_a_loss_does_not_look_at_is_refused(kind, settings, key):
    with pytest.raises(Refusal) as refused:
        loss_of(kind, **settings)
    assert refused.value.problems[0].where == key


def test_a_missing_reference_is_refused():
    with pytest.raises(Refusal, match="compares with a reference"):
        loss_of("sigmoid", example(reference_rejected_P=None))
