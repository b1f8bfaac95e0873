"""Heads whose logits are scaled and soft-capped, against plain logits and autograd in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.kernels.logit_divergence import TeacherDivergence, Whole, compared_scores, likeliest
from lockstep.kernels.logprob import Head, plain_token_scores, row_gradients_, row_logprobs, token_scores
from lockstep.kernels.sampling import LEFT_OUT, Truncation

PLACES, HIDDEN, WORDS = 23, 12, 90
HEADS = [(0.25, None), (1.0, 3.0), (0.3, 2.0), (1.7, 4.0)]


def parts(bias: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(PLACES, HIDDEN), (WORDS, HIDDEN), *[(WORDS,)] * bias]
    return [torch.randn(*size, requires_grad=True) for size in sizes]


def targets() -> torch.Tensor:
    return torch.randint(WORDS, (PLACES,), generator=torch.Generator().manual_seed(1))


def logits_by_hand(hidden, weight, bias, scale: float, softcap: float | None) -> torch.Tensor:
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is None:
        return logits
    grown, shrunk = (logits / softcap).exp(), (-logits / softcap).exp()
    return softcap * (grown - shrunk) / (grown + shrunk)


def assert_same(found, wanted) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm()


@pytest.mark.daily
@pytest.mark.parametrize(("scale", "softcap"), HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_equal_those_of_plain_logits(scale, softcap, temperature, positions, bias) -> None:
    tensors = parts(bias)
    head = Head(tensors[1], tensors[2] if bias else None, scale, softcap)
    ours = token_scores(
        tensors[0], head, targets(), temperature=temperature, entropy=True, chunk_bytes=4 * WORDS * positions
    )
    logits = logits_by_hand(tensors[0], head.weight_VH, head.bias_V, scale, softcap)
    theirs = torch.distributions.Categorical(logits=logits / temperature)
    assert ours.entropies_K is not None
    torch.testing.assert_close(ours.logprobs_K.double(), theirs.log_prob(targets()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropies_K.double(), theirs.entropy(), rtol=1e-5, atol=1e-5)
    twin = plain_token_scores(tensors[0], head, targets(), temperature=temperature)
    torch.testing.assert_close(twin.logprobs_K, ours.logprobs_K, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(twin.entropies_K, ours.entropies_K, rtol=1e-5, atol=1e-5)
    one, two = torch.randn(2, PLACES)
    for first, second in ((one, 0 * one), (0 * one, two), (one, two)):
        mine = (ours.logprobs_K * first + ours.entropies_K * second).sum()
        plain = (theirs.log_prob(targets()) * first + theirs.entropy() * second).sum()
        assert_same(
            torch.autograd.grad(mine, tensors, retain_graph=True),
            torch.autograd.grad(plain, tensors, retain_graph=True),
        )
    assert_same(
        torch.autograd.grad((twin.logprobs_K * one).sum(), tensors),
        torch.autograd.grad((theirs.log_prob(targets()) * one).sum(), tensors),
    )


@pytest.mark.daily
@pytest.mark.parametrize("truncation", [Truncation(top_k=7), Truncation(top_p=0.6), Truncation(min_p=0.2)])
@pytest.mark.parametrize(("scale", "softcap"), HEADS)
@pytest.mark.parametrize("positions", [7, 1000])
def test_truncation_is_of_the_distribution_that_is_sampled_from(truncation, scale, softcap, positions) -> None:
    """What is left out has no probability and no gradient, although a soft cap bounds every logit from below."""
    tensors, chosen, temperature = parts(bias=True), targets(), 0.7
    head = Head(tensors[1], tensors[2], scale, softcap)
    ours = token_scores(
        tensors[0],
        head,
        chosen,
        temperature=temperature,
        truncation=truncation,
        entropy=True,
        chunk_bytes=4 * WORDS * positions,
    )
    logits = logits_by_hand(*tensors, scale, softcap) / temperature
    stay = torch.zeros(PLACES, WORDS, dtype=torch.bool)
    for row, shares in enumerate(logits.softmax(-1).tolist()):
        order = sorted(range(WORDS), key=lambda word: -shares[word])
        before = 0.0
        for rank, word in enumerate(order):
            stay[row, word] = (
                (not truncation.top_k or rank < truncation.top_k)
                and (truncation.top_p == 1 or before < truncation.top_p)
                and shares[word] >= truncation.min_p * shares[order[0]]
            )
            before += shares[word]
        stay[row, chosen[row]] = True
    assert 0 < (~stay).sum() < stay.numel()
    left = logits.masked_fill(~stay, -math.inf).log_softmax(-1)
    wanted = left.gather(-1, chosen[:, None])[:, 0]
    spread = -(left.exp() * left.masked_fill(~stay, 0)).sum(-1)
    assert ours.entropies_K is not None
    torch.testing.assert_close(ours.logprobs_K.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropies_K.double(), spread, rtol=1e-5, atol=1e-5)
    one, two = torch.randn(2, PLACES)
    assert_same(
        torch.autograd.grad((ours.logprobs_K * one + ours.entropies_K * two).sum(), tensors),
        torch.autograd.grad((wanted * one + spread * two).sum(), tensors),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_left_out_of_a_row_is_known_in_every_precision(dtype) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 4.0]]).to(dtype)
    logits[0, 1] = max(LEFT_OUT, torch.finfo(dtype).min)
    target = torch.tensor([0])
    normalisers, logprobs, entropies = row_logprobs(logits, target, 1.0, True, 2.0)
    three = torch.tensor([2 * math.tanh(x / 2) for x in (1.0, 0.5, 4.0)])
    torch.testing.assert_close(logprobs, three.log_softmax(-1)[:1], rtol=1e-5, atol=1e-5)
    one = torch.ones(1)
    gradient = row_gradients_(logits.clone(), target, normalisers, one, 1.0, entropies, one, 2.0)
    assert gradient[0, 1] == 0
    assert gradient.isfinite().all()


def test_a_cap_by_hand() -> None:
    """Logits (0, x) with x capped at ln 3: the larger x, the nearer the probabilities are to 1/4 and 3/4."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    head = Head(torch.tensor([[0.0], [100.0]]), softcap=math.log(3.0))
    scores = token_scores(hidden, head, torch.tensor([1]))
    assert scores.logprobs_K.item() == pytest.approx(-0.287682, abs=1e-6)
    (gradient,) = torch.autograd.grad(scores.logprobs_K.sum(), hidden)
    assert gradient.item() == pytest.approx(0, abs=1e-6)


def test_a_plain_head_gives_its_projection_as_it_is() -> None:
    hidden, weight = torch.randn(3, HIDDEN).bfloat16(), torch.randn(WORDS, HIDDEN).bfloat16()
    plain = Head(weight).logits(hidden)
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain, torch.nn.functional.linear(hidden, weight))
    # What is done to it is done in fp32: in bf16 two words of like logits would become one.
    assert Head(weight, scale=0.3).logits(hidden).dtype == torch.float32
    capped = Head(weight, softcap=2.0).logits(hidden)
    torch.testing.assert_close(capped, 2 * torch.tanh(plain.float() / 2))


@pytest.mark.parametrize(("scale", "softcap"), HEADS)
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_divergences_are_of_the_same_distributions(scale, softcap, kind) -> None:
    """The teacher's head has a cap and a scale of its own."""
    hidden, weight, bias = parts(bias=True)
    torch.manual_seed(3)
    taught_hidden, taught_weight = torch.randn(PLACES, 7), torch.randn(WORDS, 7)
    teacher, temperature = Whole(taught_hidden, Head(taught_weight, None, 0.8, 1.5)), 1.3
    comparison = TeacherDivergence(kind, 0.3, temperature)
    head = Head(weight, bias, scale, softcap)
    ours = compared_scores(hidden, head, targets(), teacher, comparison, chunk_bytes=4 * WORDS * 7)
    logits = logits_by_hand(hidden, weight, bias, scale, softcap)
    p = (logits / temperature).softmax(-1)
    q = (logits_by_hand(taught_hidden, taught_weight, None, 0.8, 1.5) / temperature).softmax(-1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(-1)

    between = 0.3 * q + 0.7 * p
    apart = {"forward": kl(q, p), "reverse": kl(p, q), "jsd": 0.3 * kl(q, between) + 0.7 * kl(p, between)}[kind]
    apart = apart * temperature**2
    assert ours.divergences_K is not None
    torch.testing.assert_close(ours.divergences_K.double(), apart, rtol=1e-4, atol=1e-5)
    logprobs = logits.log_softmax(-1).gather(-1, targets()[:, None])[:, 0]
    torch.testing.assert_close(ours.logprobs_K.double(), logprobs, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(PLACES)
    tensors = [hidden, weight, bias]
    found = torch.autograd.grad((ours.divergences_K * upstream).sum(), tensors)
    for a, b in zip(found, torch.autograd.grad((apart * upstream).sum(), tensors), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    top = likeliest(teacher, 3, temperature)
    torch.testing.assert_close(top.logprobs_Kk1[:, :3].double(), q.topk(3).values.log(), rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("words", "temperature", "softcap"), [(5000, 1.0, 30.0), (151936, 0.7, 1.5)])
def test_fused_capped_log_softmax_equals_its_twin(dtype, words, temperature, softcap) -> None:
    from lockstep.kernels import logprob_triton as triton_logprob

    torch.manual_seed(0)
    logits = (torch.randn(33, words, device="cuda") * 5).to(dtype)
    targets = torch.randint(words, (33,), device="cuda")
    left_out = (torch.rand(logits.shape, device="cuda") < 0.3).scatter_(1, targets[:, None], False)
    logits.masked_fill_(left_out, max(LEFT_OUT, torch.finfo(dtype).min))
    upstream, spread = torch.randn(2, 33, device="cuda")
    twins = row_logprobs(logits, targets, temperature, True, softcap)
    for fused, twin in zip(
        triton_logprob.row_logprobs(logits, targets, temperature, True, softcap), twins, strict=True
    ):
        torch.testing.assert_close(fused, twin, rtol=1e-4, atol=1e-4)
    for more in ((None, None), (twins[2], spread)):
        given = (targets, twins[0], upstream, temperature, *more, softcap)
        twin = row_gradients_(logits.clone(), *given)
        fused = triton_logprob.row_gradients_(logits.clone(), *given)
        assert (fused == 0)[left_out].all()
        assert (fused.float() - twin.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * twin.float().norm()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize(("scale", "softcap"), HEADS)
def test_scores_on_a_device_equal_those_on_the_host(scale, softcap) -> None:
    host = parts(bias=True)
    there = [tensor.detach().cuda().requires_grad_() for tensor in host]
    found = []
    for tensors in (host, there):
        head = Head(tensors[1], tensors[2], scale, softcap)
        scores = token_scores(
            tensors[0],
            head,
            targets().to(tensors[0].device),
            temperature=0.7,
            truncation=Truncation(top_k=20),
            entropy=True,
        )
        assert scores.entropies_K is not None
        total = scores.logprobs_K.sum() + scores.entropies_K.sum()
        found.append([scores.logprobs_K, scores.entropies_K, *torch.autograd.grad(total, tensors)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-4, atol=1e-4)
