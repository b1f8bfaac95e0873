"""Divergences of two distributions over words, and folded vocabularies, by hand and by their properties."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from lockstep.algorithms.divergence import DIVERGENCES, fold_rest
from lockstep.algorithms.divergence import distribution_divergence as divergence
from lockstep.algorithms.reduce import log_rest
from lockstep.errors import Refusal
from lockstep.recipe.keys_offline import Distill

STUDENT, TEACHER = [0.5, 0.25, 0.25], [0.25, 0.7, 0.05]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kl(p, q) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def of(kind: str, student, teacher, mix: float = 0.3) -> float:
    (value,) = divergence(tensor([student]).log(), tensor([teacher]).log(), kind=kind, mix=mix).tolist()
    return value


def test_divergences_by_hand():
    assert of("forward", STUDENT, TEACHER) == pytest.approx(kl(TEACHER, STUDENT))
    assert of("reverse", STUDENT, TEACHER) == pytest.approx(kl(STUDENT, TEACHER))
    middle = [0.3 * t + 0.7 * s for s, t in zip(STUDENT, TEACHER, strict=True)]
    assert of("jsd", STUDENT, TEACHER) == pytest.approx(0.3 * kl(TEACHER, middle) + 0.7 * kl(STUDENT, middle))
    assert of("forward", [0.5, 0.5], [1.0, 0.0]) == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_distributions_do_not_diverge(kind):
    assert of(kind, TEACHER, TEACHER) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("mix", [1e-4, 1 - 1e-4])
def test_jsd_becomes_the_plain_divergences_at_its_ends(mix):
    """JSD / mix -> KL(teacher, student) as mix -> 0, and / (1 - mix) -> KL(student, teacher) as mix -> 1."""
    scaled = of("jsd", STUDENT, TEACHER, mix) / min(mix, 1 - mix)
    assert scaled == pytest.approx(of("forward" if mix < 0.5 else "reverse", STUDENT, TEACHER), rel=1e-3)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_gradients_by_finite_differences(kind):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 6, generator=draw, dtype=torch.float64).requires_grad_()

    def loss(x):
        return divergence(x[0].log_softmax(-1), x[1].log_softmax(-1), kind=kind, mix=0.3)

    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_agrees_with_torch(kind):
    draw = torch.Generator().manual_seed(9)
    student, teacher = (3 * torch.randn(2, 8, 50, generator=draw, dtype=torch.float64)).log_softmax(-1)
    middle = (0.3 * teacher.exp() + 0.7 * student.exp()).log()

    def plain(p, q):
        return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    expected = {
        "forward": plain(teacher, student),
        "reverse": plain(student, teacher),
        "jsd": 0.3 * plain(teacher, middle) + 0.7 * plain(student, middle),
    }
    assert torch.allclose(divergence(student, teacher, kind=kind, mix=0.3), expected[kind])


def test_words_that_the_teacher_never_says():
    student, teacher = [0.5, 0.25, 0.25], [0.6, 0.4, 0.0]
    assert of("forward", student, teacher) == pytest.approx(kl(teacher, student))
    # The third word adds the student's probability of it to the reverse divergence, which would be infinite.
    rest = 0.5 * math.log(0.5 / 0.6) + 0.25 * math.log(0.25 / 0.4)
    assert rest < 0
    assert of("reverse", student, teacher) == pytest.approx(rest + 0.25)
    middle = [0.3 * t + 0.7 * s for s, t in zip(student, teacher, strict=True)]
    assert of("jsd", student, teacher) == pytest.approx(0.3 * kl(teacher, middle) + 0.7 * kl(student, middle))


def test_the_reverse_divergence_draws_the_student_off_words_that_the_teacher_never_says():
    logits = tensor([[0.3, -0.2, 0.4]]).requires_grad_()
    teacher = tensor([[0.6, 0.4, 0.0]]).log()
    (gradient,) = torch.autograd.grad(divergence(logits.log_softmax(-1), teacher, kind="reverse").sum(), logits)
    assert gradient[0, 2] > 0  # downhill is a smaller logit
    fitting = tensor([[0.6, 0.4, 1e-12]]).log()
    assert divergence(fitting, teacher, kind="reverse").item() == pytest.approx(0, abs=1e-11)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_impossible_words_and_extreme_logits_have_finite_gradients(kind):
    impossible = -math.inf
    logits = torch.tensor([[0.0, 1.0, impossible, 1e4], [1e4, -1e4, 0.0, impossible]], requires_grad=True)
    teacher = torch.tensor([[0.0, impossible, impossible, 2.0], [-1e4, 1e4, 0.0, impossible]]).log_softmax(-1)
    values = divergence(logits.log_softmax(-1), teacher, kind=kind, mix=0.3)
    assert values.isfinite().all()
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert gradient.isfinite().all()


def test_folded_by_hand():
    logprobs = tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2]]).log()
    ids = torch.tensor([[0, 2], [1, 3]])
    expected = tensor([[0.5, 0.2, 0.3], [0.6, 0.2, 0.2]]).log()
    assert torch.allclose(fold_rest(logprobs, ids), expected)


def test_folded_gradients_by_finite_differences():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=draw, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[0, 2], [5, 1], [3, 4]])
    assert torch.autograd.gradcheck(lambda x: fold_rest(x.log_softmax(-1), ids), (logits,))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_folding_can_only_bring_distributions_nearer(kind):
    draw = torch.Generator().manual_seed(9)
    student, teacher = (3 * torch.randn(2, 8, 50, generator=draw, dtype=torch.float64)).log_softmax(-1)
    ids = teacher.topk(5).indices
    whole = divergence(student, teacher, kind=kind)
    cut = divergence(fold_rest(student, ids), fold_rest(teacher, ids), kind=kind)
    assert (cut < whole).all()
    assert (cut > 0).all()
    nearly_all = teacher.topk(49).indices  # one word is left: as many words as before
    same = divergence(fold_rest(student, nearly_all), fold_rest(teacher, nearly_all), kind=kind)
    assert torch.allclose(same, whole)


def test_a_tiny_rest_and_its_gradient_are_right_in_float32():
    logits = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True)
    rest = fold_rest(logits.log_softmax(-1), torch.tensor([[0]]))[0, 1]
    assert rest.item() == pytest.approx(math.log(2) - 30, rel=1e-6)
    (gradient,) = torch.autograd.grad(rest, logits)
    assert gradient[0].tolist() == pytest.approx([-1.0, 0.5, 0.5])


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_nothing_left_of_the_vocabulary(kind):
    logits = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    teacher = torch.tensor([[0.3, 0.1, 0.9]]).log_softmax(-1)
    ids = torch.tensor([[2, 0, 1]])
    student = logits.log_softmax(-1)
    cut = divergence(fold_rest(student, ids), fold_rest(teacher, ids), kind=kind)
    whole = divergence(student, teacher, kind=kind)
    assert cut.item() == pytest.approx(whole.item(), abs=1e-6)
    gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (cut, whole)]
    assert torch.allclose(*gradients, atol=1e-5)
    assert fold_rest(student, ids)[0, 3].item() == pytest.approx(-100, abs=2)


def test_log_rest_keeps_its_digits():
    values = torch.tensor([-1e-5, -0.01, -0.6931, -0.6932, -5.0, -20.0, -1e4])
    expected = [math.log(-math.expm1(value)) if value > -700 else 0.0 for value in values.double().tolist()]
    assert log_rest(values).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)
    certain = torch.tensor([0.0, 1e-3], requires_grad=True)
    rest = log_rest(certain)
    assert rest.tolist() == pytest.approx([math.log(1e-6)] * 2, rel=1e-6)
    assert torch.autograd.grad(rest.sum(), certain)[0].tolist() == [0, 0]


def test_unknown_divergences_are_refused():
    with pytest.raises(Refusal, match=r"distill\.divergence"):
        of("js", STUDENT, TEACHER)


def test_the_recipe_knows_these_divergences():
    assert set(DIVERGENCES) == set(get_args(Distill.model_fields["divergence"].annotation))
