"""Divergences in chunks from hidden states, against whole logits and autograd."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.logit_divergence import Likeliest, TeacherDivergence, Whole, compared_scores, likeliest
from lockstep.kernels.logprob import Head

PLACES, HIDDEN, WORDS = 23, 12, 40


def student(*, bias: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(PLACES, HIDDEN, requires_grad=True)
    weight = torch.randn(WORDS, HIDDEN, requires_grad=True)
    extra = torch.randn(WORDS, requires_grad=True) if bias else None
    return hidden, weight, extra, torch.randint(WORDS, (PLACES,))


def teacher(*, bias: bool = False) -> Whole:
    """Of another width than the student: a larger model."""
    torch.manual_seed(1)
    return Whole(torch.randn(PLACES, 7), Head(torch.randn(WORDS, 7) * 0.7, torch.randn(WORDS) if bias else None))


def distributions(whole: Whole, temperature: float) -> torch.Tensor:
    logits = whole.hidden_KH.double() @ whole.head.weight_VH.double().T
    if whole.head.bias_V is not None:
        logits = logits + whole.head.bias_V.double()
    return (logits / temperature).softmax(-1)


def by_hand(p: torch.Tensor, q: torch.Tensor, kind: str, mix: float) -> torch.Tensor:
    """Of the student's p and the teacher's q, as probabilities."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    if kind == "forward":
        return kl(q, p)
    if kind == "reverse":
        return kl(p, q)
    between = mix * q + (1 - mix) * p
    return mix * kl(q, between) + (1 - mix) * kl(p, between)


KINDS = [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.2)]


@pytest.mark.daily
@pytest.mark.parametrize(("kind", "mix"), KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_equal_those_of_whole_logits(kind, mix, temperature, positions, bias) -> None:
    hidden, weight, extra, targets = student(bias=bias)
    taught = teacher(bias=bias)
    ours = compared_scores(
        hidden,
        Head(weight, extra),
        targets,
        taught,
        TeacherDivergence(kind, mix, temperature),
        chunk_bytes=4 * WORDS * positions,
    )
    inputs = [tensor for tensor in (hidden, weight, extra) if tensor is not None]
    logits = hidden.double() @ weight.double().T + (extra.double() if extra is not None else 0)
    # The likelihood of the row's own words is that of the model itself, at no temperature.
    logprobs = logits.log_softmax(-1)[torch.arange(PLACES), targets]
    p, q = (logits / temperature).softmax(-1), distributions(taught, temperature)
    apart = by_hand(p, q, kind, mix) * temperature**2
    assert ours.divergences_K is not None
    torch.testing.assert_close(ours.logprobs_K.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.divergences_K.double(), apart, rtol=1e-4, atol=1e-5)
    one, two = torch.randn(2, PLACES)
    found = torch.autograd.grad((ours.logprobs_K * one + ours.divergences_K * two).sum(), inputs)
    wanted = torch.autograd.grad((logprobs * one + apart * two).sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_the_same_distribution_is_no_distance_apart() -> None:
    hidden, weight, _, targets = student()
    taught = Whole(hidden.detach(), Head(weight.detach()))
    for kind in ("forward", "reverse", "jsd"):
        scores = compared_scores(hidden, Head(weight), targets, taught, TeacherDivergence(kind))
        assert scores.divergences_K is not None
        assert scores.divergences_K.abs().max() < 1e-6
        # Its smallest value: no way leads down from there.
        (gradient,) = torch.autograd.grad(scores.divergences_K.sum(), hidden)
        assert gradient.abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("positions", [1, 5, 1000])
def test_the_likeliest_words_and_the_rest_as_one(temperature, positions) -> None:
    taught = teacher(bias=True)
    top = likeliest(taught, 3, temperature, chunk_bytes=4 * WORDS * positions)
    q = distributions(taught, temperature)
    order = q.argsort(-1, descending=True)
    assert top.ids_Kk.tolist() == order[:, :3].tolist()
    kept = q.gather(-1, order[:, :3])
    torch.testing.assert_close(top.logprobs_Kk1[:, :3].double(), kept.log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.logprobs_Kk1[:, 3].double(), (1 - kept.sum(-1)).log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "mix"), KINDS)
@pytest.mark.parametrize("positions", [4, 1000])
def test_a_teacher_of_few_words_compares_folded_distributions(kind, mix, positions) -> None:
    temperature, k = 1.7, 4
    hidden, weight, _, targets = student()
    taught = teacher()
    top = likeliest(taught, k, temperature)
    ours = compared_scores(
        hidden,
        Head(weight),
        targets,
        top,
        TeacherDivergence(kind, mix, temperature),
        chunk_bytes=4 * WORDS * positions,
    )
    q = distributions(taught, temperature)
    p = (hidden.double() @ weight.double().T / temperature).softmax(-1)
    order = q.argsort(-1, descending=True)

    def fold(probabilities: torch.Tensor) -> torch.Tensor:
        sorted_ = probabilities.gather(-1, order)
        return torch.cat([sorted_[:, :k], sorted_[:, k:].sum(-1, keepdim=True)], -1)

    apart = by_hand(fold(p), fold(q), kind, mix) * temperature**2
    assert ours.divergences_K is not None
    torch.testing.assert_close(ours.divergences_K.double(), apart, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(ours.divergences_K.sum(), [hidden, weight])
    for a, b in zip(found, torch.autograd.grad(apart.sum(), [hidden, weight]), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize(("kind", "mix"), KINDS)
def test_all_words_are_the_whole_distribution(kind, mix) -> None:
    hidden, weight, _, targets = student()
    taught = teacher()
    comparison = TeacherDivergence(kind, mix, 1.3)
    whole = compared_scores(hidden, Head(weight), targets, taught, comparison).divergences_K
    top = compared_scores(hidden, Head(weight), targets, likeliest(taught, WORDS, 1.3), comparison).divergences_K
    assert whole is not None
    assert top is not None
    torch.testing.assert_close(top, whole, rtol=1e-5, atol=1e-5)


def test_no_position_at_all() -> None:
    """The share of a device in an update may be empty."""
    weight = torch.randn(WORDS, HIDDEN, requires_grad=True)
    hidden, none = torch.zeros(0, HIDDEN), torch.zeros(0, dtype=torch.long)
    for taught in (
        Whole(torch.zeros(0, 7), Head(torch.randn(WORDS, 7))),
        Likeliest(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 4)),
    ):
        scores = compared_scores(hidden, Head(weight), none, taught, TeacherDivergence("forward"))
        assert scores.divergences_K is not None
        assert scores.logprobs_K.shape == scores.divergences_K.shape == (0,)
    assert likeliest(Whole(torch.zeros(0, 7), Head(torch.randn(WORDS, 7))), 3, 1.0).ids_Kk.shape == (0, 3)
