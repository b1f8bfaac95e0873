"""Soft-capped scores and attention sinks against attention written out in double precision, a query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.kernels.attention import explicit
from lockstep.kernels.attention.flash import flash_with_sinks
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import Chunks, DecodePass, make_layout
from lockstep.kernels.attention.paged import PrefillPass, gathered_decode, paged_attention
from lockstep.kernels.attention.varlen import varlen_attention
from work import bytes_held

CPU = torch.device("cpu")
KINDS = st.sampled_from([(None, True), (2.0, False), (2.0, True)])


def one_query(q_HD, k_KGD, v_KGD, scale, softcap, sinks_H):
    """Each head by itself. A sink is one more logit in the softmax, whose probability goes nowhere."""
    heads = []
    for head, query in enumerate(q_HD):
        group = head * k_KGD.shape[1] // len(q_HD)
        scores = k_KGD[:, group] @ query * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H[head : head + 1]])
        shares = scores.exp() / scores.exp().sum()
        heads.append(shares[: len(k_KGD)] @ v_KGD[:, group])
    return torch.stack(heads)


def by_hand(query, key, value, lengths, scale, window, softcap, sinks):
    outputs, start = [], 0
    for length in lengths:
        for place in range(start, start + length):
            low = max(start, place + 1 - window) if window else start
            outputs.append(one_query(query[place], key[low : place + 1], value[low : place + 1], scale, softcap, sinks))
        start += length
    return torch.stack(outputs)


def inputs(tokens: int, groups: int, sinks: bool, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(tokens, heads, 8, dtype=dtype) * 2 for heads in (4, groups, groups)]
    made += [torch.randn(4, dtype=dtype) * 2] * sinks
    return [tensor.requires_grad_() for tensor in made]


def assert_same_gradients(ours, theirs, tensors, tolerance=1e-10) -> None:
    upstream = torch.randn_like(ours)
    found, wanted = (torch.autograd.grad(out, tensors, upstream) for out in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[400, 2**30], ids=["blocks of few queries", "one block"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(explicit, "SCORE_BYTES", request.param)
    return request.param


@settings(deadline=None, max_examples=draws(12, 25))
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 4]),
    groups=st.sampled_from([1, 2, 4]),
    kind=KINDS,
    score_bytes=st.sampled_from([400, 2**30]),
)
def test_packed_attention_and_gradients_equal_each_query_alone(lengths, window, groups, kind, score_bytes) -> None:
    softcap, with_sinks = kind
    tensors = inputs(sum(lengths), groups, with_sinks)
    sinks = tensors[3] if with_sinks else None
    layout = make_layout(lengths, CPU, "sdpa")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explicit, "SCORE_BYTES", score_bytes)
        ours = varlen_attention(*tensors[:3], layout, scale=0.3, window=window, softcap=softcap, sinks_H=sinks)
        theirs = by_hand(*tensors[:3], lengths, 0.3, window, softcap, sinks)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert_same_gradients(ours, theirs, tensors)


@pytest.mark.daily
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, True), (2.0, False), (2.0, True)])
@pytest.mark.usefixtures("block_bytes")
def test_a_shared_beginning_counts_once(window, softcap, with_sinks) -> None:
    """Three sequences of 5 tokens with 2 or 4 more; two of them share their first 5 tokens on the line."""
    packed_index_E = torch.tensor([*range(7), 0, 1, 2, 3, 4, 7, 8, 9, 10, *range(11, 20)])
    lengths = [7, 9, 9]
    tensors = inputs(20, 2, with_sinks)
    sinks = tensors[3] if with_sinks else None
    ours = varlen_attention(
        *tensors[:3],
        make_layout(lengths, CPU, "sdpa", packed_index_E),
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks_H=sinks,
    )
    first_T = torch.tensor([*range(7), *range(12, 16), *range(16, 25)])
    whole = (rows[packed_index_E] for rows in tensors[:3])
    theirs = by_hand(*whole, lengths, 0.3, window, softcap, sinks)[first_T]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert_same_gradients(ours, theirs, tensors)


def test_a_sink_by_hand() -> None:
    """One token: its own score is 0, so a sink of ln 3 leaves it a quarter, and the gradient is -3/4 * 1/4 * value."""
    query, value = torch.zeros(1, 1, 8), torch.full((1, 1, 8), 8.0)
    sinks = torch.tensor([math.log(3.0)], requires_grad=True)
    out = varlen_attention(query, query, value, make_layout([1], CPU, "sdpa"), scale=1.0, sinks_H=sinks)
    torch.testing.assert_close(out, torch.full((1, 1, 8), 2.0))
    (gradient,) = torch.autograd.grad(out[0, 0, 0], sinks)
    assert gradient.item() == pytest.approx(-1.5, rel=1e-6)


def test_a_sink_far_below_and_a_cap_far_above_change_nothing() -> None:
    query, key, value = inputs(9, 2, sinks=False, dtype=torch.float32)
    layout = make_layout([4, 5], CPU, "sdpa")
    plain = varlen_attention(query, key, value, layout, scale=0.3)
    sunk = varlen_attention(query, key, value, layout, scale=0.3, sinks_H=torch.full((4,), -1e4))
    capped = varlen_attention(query, key, value, layout, scale=0.3, softcap=1e5)
    torch.testing.assert_close(sunk, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(capped, plain, rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_at_the_end_alone() -> None:
    """Scores of hundreds in bf16 would be off by whole units."""
    query, key, value, sinks = (tensor.detach().bfloat16() for tensor in inputs(12, 2, sinks=True))
    query, sinks = query * 20, sinks * 20
    out = varlen_attention(query, key, value, make_layout([12], CPU, "sdpa"), scale=0.3, softcap=300.0, sinks_H=sinks)
    right = by_hand(query.double(), key.double(), value.double(), [12], 0.3, None, 300.0, sinks.double())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), right, rtol=8e-3, atol=1e-3)


@pytest.mark.usefixtures("block_bytes")
def test_dropout_drops_shares_and_repeats_itself_on_the_way_back() -> None:
    """Values are ones, so an output is what is left of 1: on average 1, and its gradient is what was drawn."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 200, 2, 8)
    value = torch.ones(200, 2, 8, requires_grad=True)
    layout = make_layout([200], CPU, "sdpa")
    out = varlen_attention(query, key, value, layout, scale=0.3, dropout=0.25, softcap=5.0)
    assert out.std() > 0.01
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    # Of each query, the gradients of all values add up to its output: they saw the same shares dropped.
    for place in (3, 77, 199):
        (back,) = torch.autograd.grad(out[place, 1, 2], value, retain_graph=True)
        torch.testing.assert_close(back.sum(), out[place, 1, 2].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_scores_of_a_long_sequence_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 heads of 768 tokens, all scores take 8 * 768 * 768 * 4 = 18,874,368 bytes.

    A block of 512 KiB has 524,288 / (4 * 8 * 768) = 21 queries; the last whole one ends at token 36 * 21 = 756,
    so its scores take 8 * 21 * 756 * 4 = 508,032 bytes. The way back needs six times that at once: the tanh, the
    masked scores and the shares, kept for it, and a gradient that comes in, one that goes out and one that is added.
    Besides there are inputs, outputs and gradients, 768 * 8 * 8 * 4 = 196,608 bytes each, of which eight do.
    """
    rows = [torch.randn(768, 8, 8, requires_grad=True) for _ in range(3)]
    sinks, layout = torch.randn(8, requires_grad=True), make_layout([768], CPU, "sdpa")

    def step() -> None:
        varlen_attention(*rows, layout, scale=0.3, softcap=5.0, sinks_H=sinks).sum().backward()

    monkeypatch.setattr(explicit, "SCORE_BYTES", 2**19)
    in_blocks = bytes_held(step)
    assert in_blocks.largest == 508_032
    assert in_blocks.peak <= 6 * 508_032 + 8 * 196_608
    # What is counted is there where it should be: all scores in one block.
    monkeypatch.setattr(explicit, "SCORE_BYTES", 2**40)
    at_once = bytes_held(step)
    assert at_once.largest == 18_874_368
    assert at_once.peak >= 3 * 18_874_368


def slots_of(blocks: Sequence[int], block: int, tokens: int) -> torch.Tensor:
    return torch.tensor([blocks[i // block] * block + i % block for i in range(tokens)])


@pytest.mark.daily
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, True), (2.0, False), (2.0, True)])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.usefixtures("block_bytes")
@torch.inference_mode()
def test_a_sequence_in_pieces_is_the_sequence_as_a_whole(block, window, softcap, with_sinks) -> None:
    """Two sequences as the engine runs them: prefilled, continued by chunks, then token by token."""
    with torch.inference_mode(False):
        tensors = [tensor.detach() for tensor in inputs(22, 2, with_sinks)]
    lengths = (13, 9)
    sinks = tensors[3] if with_sinks else None
    right = by_hand(*tensors[:3], lengths, 0.3, window, softcap, sinks).split(lengths)
    parts = list(zip(*(rows.split(lengths) for rows in tensors[:3]), strict=True))
    cache = KVCache(uniform_layout(1, 2, 8), 40, block, tensors[0])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[:13], order[13:26]]

    def check(pieces: list[tuple[int, int]], decode: bool = False) -> None:
        q, k, v = (torch.cat([part[i][a:b] for part, (a, b) in zip(parts, pieces, strict=True)]) for i in range(3))
        slots = [slots_of(table, block, b) for table, (_, b) in zip(tables, pieces, strict=True)]
        into = torch.cat([s[a:] for s, (a, _) in zip(slots, pieces, strict=True)])
        step: PrefillPass | DecodePass
        if decode:
            step = DecodePass(cache, "gather", into, torch.tensor(tables), torch.tensor([b for _, b in pieces]))
        elif not any(a for a, _ in pieces):
            step = PrefillPass(cache, into, make_layout([b for _, b in pieces], CPU, "sdpa"))
        else:
            chunks = Chunks.of(pieces, [s.numpy() for s in slots], "sdpa", torch.device("cpu"))
            step = PrefillPass(cache, into, chunks)
        out = paged_attention(q, k, v, step, 0, scale=0.3, window=window, softcap=softcap, sinks_H=sinks)
        wanted = torch.cat([whole[a:b] for whole, (a, b) in zip(right, pieces, strict=True)])
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)

    check([(0, 2), (0, 3)])
    check([(2, 8), (3, 4)])
    for done in range(5):
        check([(8 + done, 9 + done), (4 + done, 5 + done)], decode=True)


def test_decoding_in_half_precision() -> None:
    query, key, value, sinks = (tensor.detach().bfloat16() for tensor in inputs(7, 2, sinks=True))
    table = torch.tensor([[0, 1]])
    keys, values = torch.zeros(2, 8, 2, 8, dtype=torch.bfloat16)
    keys[:7], values[:7] = key, value
    out = gathered_decode(query[6:], keys, values, table, torch.tensor([7]), 4, 0.3, 5, 2.0, sinks)
    right = one_query(query[6].double(), key[2:].double(), value[2:].double(), 0.3, 2.0, sinks.double())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].double(), right, rtol=8e-3, atol=1e-3)


def test_kernels_that_know_neither_leave_them_to_the_twin() -> None:
    """Any of these kernels would fail here: the host has none of them."""
    query, key, value, sinks = (tensor.detach().bfloat16() for tensor in inputs(16, 2, sinks=True))
    asked = {"npu_fusion": [(2.0, None), (None, sinks), (2.0, sinks)], "flash_varlen": [(2.0, None), (2.0, sinks)]}
    for kernel, kinds in asked.items():
        for softcap, sunk in kinds:
            found, twin = (
                varlen_attention(
                    query, key, value, make_layout([16], CPU, name), scale=0.3, softcap=softcap, sinks_H=sunk
                )
                for name in (kernel, "sdpa")
            )
            assert torch.equal(found, twin)
    # The normalisers of single tokens come in another order from flash attention.
    varlen_attention(query, key, value, make_layout([1] * 16, CPU, "flash_varlen"), scale=0.3, sinks_H=sinks)
    cache = KVCache(uniform_layout(1, 2, 8), 1, 16, query)
    for softcap, sunk in asked["npu_fusion"]:
        steps = (
            DecodePass(cache, name, torch.tensor([3]), torch.tensor([[0]]), torch.tensor([4]))
            for name in ("npu_infer", "gather")
        )
        found, twin = (
            paged_attention(
                query[:1], key[:1], value[:1], step, 0, scale=0.3, window=None, softcap=softcap, sinks_H=sunk
            )
            for step in steps
        )
        assert torch.equal(found, twin)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "with sinks"])
def test_flash_attention_is_asked_up_to_its_largest_head_and_not_beyond(with_sinks) -> None:
    """The host has no flash attention: asking for it fails, and the twin answers."""
    layout, twin = (make_layout([3, 5], CPU, name) for name in ("flash_varlen", "sdpa"))
    sinks = torch.randn(2, dtype=torch.bfloat16) if with_sinks else None
    rows = torch.randn(3, 8, 2, 512).bfloat16()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attention(*rows[..., :256], layout, scale=0.3, sinks_H=sinks)
    for size in (264, 320, 512):
        found, wanted = (
            varlen_attention(*rows[..., :size], where, scale=0.3, sinks_H=sinks) for where in (layout, twin)
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("window", [None, 4])
def test_the_correction_of_flash_attention_for_sinks(window) -> None:
    """The operator's own contract, in double precision on the host, stands in for the kernel: an output and a
    normaliser forward; backward, gradients from whatever output and normaliser it is given."""
    lengths = [6, 1, 9]
    seen = torch.zeros(16, 16, dtype=torch.bool)
    for start, stop in ((0, 6), (6, 7), (7, 16)):
        for place in range(start, stop):
            seen[place, max(start, place + 1 - (window or 16)) : place + 1] = True

    def scores(query, key, scale):
        repeated = key.repeat_interleave(2, 1)
        every = torch.einsum("qhd,khd->hqk", query, repeated) * scale
        return every.masked_fill(~seen, -math.inf)

    def forward(query, key, value, q_bounds, k_bounds, q_most, k_most, dropout, causal, debug, **more):
        assert (q_bounds.tolist(), k_bounds.tolist(), q_most, k_most) == ([0, 6, 7, 16], [0, 6, 7, 16], 9, 9)
        assert (dropout, causal, debug) == (0.0, True, False)
        left, right = (window - 1, 0) if window else (-1, -1)
        assert (more["window_size_left"], more["window_size_right"]) == (left, right)
        every = scores(query, key, more["scale"])
        out = torch.einsum("hqk,khd->qhd", every.softmax(-1), value.repeat_interleave(2, 1))
        return out, every.logsumexp(-1), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def backward(upstream, query, key, value, out, lse, *rest, scale, **more):
        shares = (scores(query, key, scale) - lse[:, :, None]).exp()
        into = torch.einsum("qhd,khd->hqk", upstream, value.repeat_interleave(2, 1))
        along = (upstream * out).sum(-1).t()[:, :, None]
        slopes = shares * (into - along) * scale
        fold = lambda rows: rows.unflatten(1, (2, 2)).sum(2)  # noqa: E731
        return (
            torch.einsum("hqk,khd->qhd", slopes, key.repeat_interleave(2, 1)),
            fold(torch.einsum("hqk,qhd->khd", slopes, query)),
            fold(torch.einsum("hqk,qhd->khd", shares, upstream)),
        )

    tensors = inputs(16, 2, sinks=True)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        ours = flash_with_sinks(*tensors[:3], make_layout(lengths, CPU, "flash_varlen"), 0.3, window, tensors[3])
        theirs = by_hand(*tensors[:3], lengths, 0.3, window, None, tensors[3])
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert_same_gradients(ours, theirs, tensors, 1e-5)
    finally:
        library._destroy()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("lengths", [[5, 130, 64, 1, 77], [1, 1, 1]])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_flash_with_sinks_equals_its_twin(window, lengths, sink_dtype) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    tensors = [torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    # From sinks that take nearly everything to such that take nearly nothing.
    tensors.append(torch.linspace(-4, 6, 8, device=device).to(sink_dtype))
    for tensor in tensors:
        tensor.requires_grad_()
    fast, twin = (
        varlen_attention(
            *tensors[:3], make_layout(lengths, device, kernel), scale=0.125, window=window, sinks_H=tensors[3]
        )
        for kernel in ("flash_varlen", "sdpa")
    )
    torch.testing.assert_close(fast, twin, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, tensors, upstream), torch.autograd.grad(twin, tensors, upstream), strict=True
    ):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("kernel", ["flash_varlen", "sdpa"])
def test_soft_caps_on_a_device_equal_those_on_the_host(kernel) -> None:
    lengths = [5, 130, 64]
    host = inputs(sum(lengths), 2, sinks=True, dtype=torch.float32)
    there = [tensor.detach().cuda().requires_grad_() for tensor in host]
    outputs = [
        varlen_attention(
            *tensors[:3],
            make_layout(lengths, tensors[0].device, kind),
            scale=0.3,
            window=40,
            softcap=2.0,
            sinks_H=tensors[3],
        )
        for tensors, kind in ((host, "sdpa"), (there, kernel))
    ]
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(outputs[0])
    wanted = torch.autograd.grad(outputs[0], host, upstream)
    for a, b in zip(torch.autograd.grad(outputs[1], there, upstream.cuda()), wanted, strict=True):
        assert (a.cpu() - b).norm() <= 1e-4 * b.norm()
