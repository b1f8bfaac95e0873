"""Fast kernels against a loop over sequences and plain cross entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import warm_python
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.logprob import (
    Head,
    plain_token_scores,
    token_scores,
    token_scores_with_grads,
    uniform_token_grads,
)

CPU = torch.device("cpu")


def one_by_one(query, key, value, lengths, scale, window):
    """Softmax attention written out, a sequence at a time."""
    outputs, start = [], 0
    repeat = query.shape[1] // key.shape[1]
    for length in lengths:
        q = query[start : start + length].transpose(0, 1)
        k = key[start : start + length].repeat_interleave(repeat, 1).transpose(0, 1)
        v = value[start : start + length].repeat_interleave(repeat, 1).transpose(0, 1)
        back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (back >= 0) & (back < (window or length))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 4]),
    groups=st.sampled_from([1, 2, 4]),
)
def test_packed_attention_and_gradients_equal_each_sequence_alone(lengths, window, groups):
    torch.manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, groups, groups)]
    ours = varlen_attention(*inputs, make_layout(lengths, CPU, "sdpa"), scale=0.3, window=window)
    theirs = one_by_one(*inputs, lengths, 0.3, window)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_layout_groups_like_lengths_and_bounds_padding():
    layout = make_layout([3, 100, 90, 4], CPU, "sdpa")
    assert [(bucket.count, bucket.width) for bucket in layout.buckets] == [(2, 100), (2, 4)]
    assert layout.bounds.tolist() == [0, 3, 103, 193, 197]
    # Token 0 opens the 3-token sequence, which stands last: after 2 x 100 slots and the 4-token one.
    assert layout.slots_of_tokens[0] == 204
    assert layout.slots_of_tokens[3] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_equal_plain_cross_entropy(temperature, positions, with_bias):
    torch.manual_seed(1)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    bias = torch.randn(300, requires_grad=True) if with_bias else None
    targets = torch.randint(300, (50,))
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    head = Head(weight, bias)
    chunked = token_scores(hidden, head, targets, temperature=temperature, chunk_bytes=4 * 300 * positions).logprobs_K
    logits = (hidden @ weight.T + (bias if with_bias else 0)) / temperature
    theirs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(chunked, theirs, rtol=1e-6, atol=1e-5)
    twin = plain_token_scores(hidden, head, targets, temperature=temperature).logprobs_K
    torch.testing.assert_close(twin, theirs, rtol=1e-6, atol=1e-5)
    upstream = torch.randn(50)
    for a, b in zip(
        torch.autograd.grad(chunked, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("positions", [1, 7, 1000])
def test_chunked_entropies_equal_plain_ones_with_their_gradients(temperature, positions):
    torch.manual_seed(2)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(300, (50,))
    chunk = 4 * 300 * positions
    ours = token_scores(hidden, Head(weight), targets, temperature=temperature, entropy=True, chunk_bytes=chunk)
    # Double precision: the reference's own rounding would be as large as ours.
    theirs = torch.distributions.Categorical(logits=hidden.double() @ weight.double().T / temperature)
    torch.testing.assert_close(ours.entropies_K.double(), theirs.entropy(), rtol=1e-5, atol=1e-5)
    twin = plain_token_scores(hidden, Head(weight), targets, temperature=temperature)
    torch.testing.assert_close(twin.entropies_K.double(), theirs.entropy(), rtol=1e-5, atol=1e-5)
    first, second = torch.randn(50), torch.randn(50)
    mine = (ours.logprobs_K * first).sum() + (ours.entropies_K * second).sum()
    plain = (theirs.log_prob(targets) * first).sum() + (theirs.entropy() * second).sum()
    for a, b in zip(
        torch.autograd.grad(mine, [hidden, weight]),
        torch.autograd.grad(plain, [hidden, weight], retain_graph=True),
        strict=True,
    ):
        assert (a - b).norm() <= 5e-6 * b.norm()
    alone = token_scores(
        hidden, Head(weight), targets, temperature=temperature, entropy=True, chunk_bytes=chunk
    ).entropies_K
    for a, b in zip(
        torch.autograd.grad(alone.sum(), [hidden, weight]),
        torch.autograd.grad(theirs.entropy().sum(), [hidden, weight]),
        strict=True,
    ):
        assert (a - b).norm() <= 5e-6 * b.norm()


def test_chunked_logprobs_can_be_differentiated_twice():
    """The first backward uses up the logits that the forward kept; a second one computes them again."""
    hidden, weight = torch.randn(10, 4, requires_grad=True), torch.randn(30, 4, requires_grad=True)
    logprobs = token_scores(hidden, Head(weight), torch.randint(30, (10,)), chunk_bytes=4 * 30 * 5).logprobs_K.sum()
    first = torch.autograd.grad(logprobs, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(logprobs, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize(("with_bias", "softcap", "temperature"), [(False, None, 1.0), (True, 2.0, 0.7)])
def test_gradients_taken_in_the_forward_pass_equal_plain_ones(positions, with_bias, softcap, temperature):
    torch.manual_seed(1)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    bias = torch.randn(300, requires_grad=True) if with_bias else None
    targets, inputs = torch.randint(300, (50,)), [t for t in (hidden, weight, bias) if t is not None]
    head = Head(weight, bias, softcap=softcap)
    ours = token_scores_with_grads(
        hidden, head, targets, uniform_token_grads, temperature=temperature, chunk_bytes=4 * 300 * positions
    )
    theirs = plain_token_scores(hidden, head, targets, temperature=temperature).logprobs_K
    torch.testing.assert_close(ours.logprobs_K, theirs, rtol=1e-6, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours.logprobs_K.sum() * -0.3, inputs, retain_graph=True),
        torch.autograd.grad(theirs.sum() * -0.3, inputs),
        strict=True,
    ):
        assert (a - b).norm() <= 2e-6 * b.norm()
    # Factors that differ are no such loss: the gradient says so, where a wrong one would pass unseen.
    for gradient in torch.autograd.grad((ours.logprobs_K * torch.randn(50)).sum(), inputs):
        assert gradient.isnan().all()


@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_token_grads_of_a_tokenwise_loss(positions, softcap):
    """Factors that depend on each log-probability, and on the entropies; the whole loss has one more factor."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets, given = torch.randint(300, (50,)), torch.randn(50)
    head = Head(weight, softcap=softcap)

    def loss(scores):
        return -0.3 * (given * scores.logprobs_K.exp() - 0.1 * given.square() * scores.entropies_K).sum()

    def token_grads(logprobs, entropies, part):
        assert len(logprobs) == len(entropies) == len(given[part])
        return given[part] * logprobs.exp(), -0.1 * given[part].square()

    chunk = 4 * 300 * positions
    ours = token_scores_with_grads(hidden, head, targets, token_grads, entropy=True, chunk_bytes=chunk)
    theirs = plain_token_scores(hidden, head, targets)
    torch.testing.assert_close(ours.entropies_K, theirs.entropies_K, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(loss(ours), [hidden, weight], retain_graph=True),
        torch.autograd.grad(loss(theirs), [hidden, weight]),
        strict=True,
    ):
        assert (a - b).norm() <= 5e-6 * b.norm()
    # Without the entropies the loss differs from its token_grads.
    for gradient in torch.autograd.grad((given * ours.logprobs_K.exp()).sum(), [hidden, weight], retain_graph=True):
        assert gradient.isnan().all()
    # One token alone that differs by more than a rounding is seen too.
    other = torch.ones(50)
    other[(given * ours.logprobs_K.exp()).abs().argmax()] = 1.05
    wrong = (other * given * ours.logprobs_K.exp() - 0.1 * given.square() * ours.entropies_K).sum()
    assert torch.autograd.grad(wrong, hidden)[0].isnan().all()


def test_gradients_taken_in_the_forward_pass_without_targets_or_a_frozen_head():
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    none = torch.empty(0, dtype=torch.long)
    gradients = torch.autograd.grad(
        token_scores_with_grads(hidden[:0], Head(weight), none, uniform_token_grads).logprobs_K.sum(),
        [hidden, weight],
        allow_unused=True,
    )
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    targets, frozen = torch.randint(9, (4,)), Head(weight.detach())
    (ours,) = torch.autograd.grad(
        token_scores_with_grads(hidden, frozen, targets, uniform_token_grads).logprobs_K.sum(), [hidden]
    )
    (theirs,) = torch.autograd.grad(plain_token_scores(hidden, frozen, targets).logprobs_K.sum(), [hidden])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_logprob_by_hand():
    # Two words, logits (0, ln 3): probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [torch.log(torch.tensor(3.0))]])
    assert token_scores(hidden, Head(weight), torch.tensor([1])).logprobs_K.item() == pytest.approx(-0.287682, abs=1e-6)
    assert token_scores(hidden, Head(weight), torch.tensor([0])).logprobs_K.item() == pytest.approx(-1.386294, abs=1e-6)


@pytest.mark.slow
def test_large_vocabulary_never_holds_all_logits():
    """151,936 words x 512 positions are 297 MiB of fp32 logits; a chunk of 8 MiB must not let that appear."""
    import subprocess

    script = """
import torch
from lockstep.kernels.logprob import Head, token_scores, plain_token_scores
import sys
torch.set_num_threads(1)
hidden = torch.randn(512, 16, requires_grad=True); weight = torch.randn(151936, 16, requires_grad=True)
targets = torch.randint(151936, (512,))
token_scores(hidden[:4], Head(weight), targets[:4], chunk_bytes=2**20).logprobs_K.sum().backward()
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
# The peak from here on: what importing took at its highest must not hide it.
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
if sys.argv[1] == "chunked":
    token_scores(hidden, Head(weight), targets, chunk_bytes=8 * 2**20).logprobs_K.sum().backward()
else:
    plain_token_scores(hidden, Head(weight), targets).logprobs_K.sum().backward()
print((status("VmHWM:") - before) / 1024)
"""
    grown = {
        kind: float(
            subprocess.run([*warm_python(), "-c", script, kind], capture_output=True, text=True, check=True).stdout
        )
        for kind in ("chunked", "plain")
    }
    assert grown["chunked"] < 100, grown
    assert grown["plain"] > 297, grown


def _cuda() -> bool:
    return torch.cuda.is_available()


@pytest.mark.cuda
@pytest.mark.skipif(not _cuda(), reason="no NVIDIA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("words", "temperature"), [(5000, 1.0), (151936, 0.7), (4096, 1.3)])
def test_fused_log_softmax_equals_its_twin(dtype, words, temperature):
    from lockstep.kernels import logprob
    from lockstep.kernels import logprob_triton as triton_logprob

    torch.manual_seed(0)
    logits = (torch.randn(33, words, device="cuda") * 5).to(dtype)
    targets = torch.randint(words, (33,), device="cuda")
    upstream = torch.randn(33, device="cuda")
    spread = torch.randn(33, device="cuda")
    normalisers, logprobs, entropies = logprob.row_logprobs(logits, targets, temperature, True)
    fused_normalisers, fused_logprobs, fused_entropies = triton_logprob.row_logprobs(logits, targets, temperature, True)
    torch.testing.assert_close(fused_entropies, entropies, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused_normalisers, normalisers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused_logprobs, logprobs, rtol=1e-5, atol=1e-5)
    for more in ((), (entropies, spread)):
        twin = logprob.row_gradients_(logits.clone(), targets, normalisers, upstream, temperature, *more)
        fused = triton_logprob.row_gradients_(logits.clone(), targets, normalisers, upstream, temperature, *more)
        assert (fused.float() - twin.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * twin.float().norm()


@pytest.mark.cuda
@pytest.mark.skipif(not _cuda(), reason="no NVIDIA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [100, 9000])
def test_fused_log_softmax_of_impossible_words_equals_its_twin(dtype, words):
    """Single words, whole blocks at the beginning and at the end, and some targets, all of logit -inf."""
    from lockstep.kernels import logprob
    from lockstep.kernels import logprob_triton as triton_logprob

    torch.manual_seed(0)
    logits = (torch.randn(33, words, device="cuda") * 5).to(dtype)
    logits[:, torch.rand(words, device="cuda") < 0.2] = -torch.inf
    logits[:11, : words // 2] = -torch.inf
    logits[11:22, words // 2 :] = -torch.inf
    targets = torch.randint(words, (33,), device="cuda")
    upstream = torch.randn(33, device="cuda")
    assert logits.gather(-1, targets[:, None]).isinf().any()
    found = logprob.row_logprobs(logits, targets, 0.7, True)
    fused = triton_logprob.row_logprobs(logits, targets, 0.7, True)
    assert found[2].isfinite().all()
    for one, two in zip(fused, found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    more = (found[0], upstream, 0.7, found[2], torch.randn(33, device="cuda"))
    twin = logprob.row_gradients_(logits.clone(), targets, *more)
    own = triton_logprob.row_gradients_(logits.clone(), targets, *more)
    assert twin.isfinite().all()
    assert own.isfinite().all()
    assert (own.float() - twin.float()).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * twin.float().norm()


@pytest.mark.cuda
@pytest.mark.skipif(not _cuda(), reason="no NVIDIA device")
@pytest.mark.parametrize("window", [None, 16])
def test_flash_varlen_equals_its_twin(window):
    torch.manual_seed(0)
    device = torch.device("cuda")
    lengths = [5, 130, 64, 1, 77]
    inputs = [
        torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    fast = varlen_attention(*inputs, make_layout(lengths, device, "flash_varlen"), scale=0.125, window=window)
    twin = varlen_attention(*inputs, make_layout(lengths, device, "sdpa"), scale=0.125, window=window)
    torch.testing.assert_close(fast, twin, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(twin, inputs, upstream), strict=True
    ):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()


@pytest.mark.cuda
@pytest.mark.skipif(not _cuda(), reason="no NVIDIA device")
@pytest.mark.parametrize("entropy", [False, True])
def test_the_head_on_the_device_equals_plain_logits(entropy):
    """bf16, several chunks: log-probs, entropies and both gradients against fp32 logits, and those taken in the forward
    pass."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(5000, 64, device="cuda") * 0.3).bfloat16().requires_grad_()
    targets = torch.randint(5000, (300,), device="cuda")
    wide = [hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    plain = plain_token_scores(wide[0], Head(wide[1]), targets)
    wanted = plain.logprobs_K.sum() + (plain.entropies_K.sum() if entropy else 0)
    known = torch.autograd.grad(wanted, wide)

    def ones(logprobs, entropies, part):
        return torch.ones_like(logprobs), torch.ones_like(logprobs) if entropy else None

    given = {"entropy": entropy, "chunk_bytes": 2 * 5000 * 70}
    for ours in (
        token_scores(hidden, Head(weight), targets, **given),
        token_scores_with_grads(hidden, Head(weight), targets, ones, **given),
    ):
        torch.testing.assert_close(ours.logprobs_K, plain.logprobs_K, rtol=2e-2, atol=3e-2)
        loss = ours.logprobs_K.sum() + (ours.entropies_K.sum() if entropy else 0)
        for a, b in zip(torch.autograd.grad(loss, [hidden, weight]), known, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a.float() - b).norm() <= 1e-2 * b.norm()
