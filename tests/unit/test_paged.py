"""Attention over the paged cache against attention written out with loops."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.kernels.attention import paged
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import Chunks, DecodePass, make_layout
from lockstep.kernels.attention.paged import PrefillPass, gathered_decode, paged_attention
from lockstep.kernels.attention.partial import PLAIN

HEADS, GROUPS, SIZE = 6, 2, 8


def attend(query_HD: torch.Tensor, keys_LGD: torch.Tensor, values_LGD: torch.Tensor, scale: float) -> torch.Tensor:
    """One query over L keys, a head at a time, in float64."""
    heads = []
    for head, query in enumerate(query_HD.double()):
        group = head * keys_LGD.shape[1] // len(query_HD)
        shares = (keys_LGD[:, group].double() @ query * scale).softmax(0)
        heads.append(shares @ values_LGD[:, group].double())
    return torch.stack(heads).float()


def sequence(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS))


def expected(tokens: int, seed: int, window: int | None, scale: float) -> torch.Tensor:
    """Causal attention of every token of a sequence."""
    q, k, v = sequence(tokens, seed)
    starts = [max(0, i + 1 - window) if window else 0 for i in range(tokens)]
    return torch.stack([attend(q[i], k[s : i + 1], v[s : i + 1], scale) for i, s in enumerate(starts)])


def slots_of(blocks: list[int], block: int, tokens: int) -> torch.Tensor:
    return torch.tensor([blocks[i // block] * block + i % block for i in range(tokens)])


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_a_sequence_in_pieces_is_the_sequence_as_a_whole(
    block: int, window: int | None, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences: prefilled from their start, continued by chunks of unequal size, then token by token. A kernel for
    packed sequences gets all chunks in one call; here the plain version of that kernel."""
    monkeypatch.setattr(paged, "flash_part_fits", lambda query, value: joined)
    monkeypatch.setattr(paged, "flash_part", PLAIN.forward)
    lengths, scale, layer = (13, 9), 0.3, 1
    cache = KVCache(uniform_layout(2, GROUPS, SIZE), 40, block, torch.zeros(()))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[:13], order[13:26]]
    parts = [sequence(n, seed) for seed, n in enumerate(lengths)]
    outputs: list[list[torch.Tensor]] = [[], []]

    def feed(pieces: list[tuple[int, int]]) -> None:
        """Tokens start to stop of each sequence in one line."""
        q, k, v = (torch.cat([part[i][a:b] for part, (a, b) in zip(parts, pieces, strict=True)]) for i in range(3))
        slots = [slots_of(table, block, b) for table, (_, b) in zip(tables, pieces, strict=True)]
        into = torch.cat([s[a:] for s, (a, _) in zip(slots, pieces, strict=True)])
        first = pieces[0][1] - pieces[0][0]
        if not any(a for a, _ in pieces):
            step = PrefillPass(cache, into, make_layout([b for _, b in pieces], torch.device("cpu"), "sdpa"))
        else:
            chunks = Chunks.of(pieces, [s.numpy() for s in slots], "flash_varlen", torch.device("cpu"))
            step = PrefillPass(cache, into, chunks)
        out = paged_attention(q, k, v, step, layer, scale=scale, window=window)
        outputs[0].append(out[:first])
        outputs[1].append(out[first:])

    feed([(0, 2), (0, 3)])
    feed([(2, 7), (3, 4)])
    for done in range(5):
        at = (7 + done, 4 + done)
        q, k, v = (torch.stack([part[i][place] for part, place in zip(parts, at, strict=True)]) for i in range(3))
        slots = torch.stack([slots_of(table, block, 13)[place] for table, place in zip(tables, at, strict=True)])
        step = DecodePass(cache, "gather", slots, torch.tensor(tables), torch.tensor(at) + 1)
        out = paged_attention(q, k, v, step, layer, scale=scale, window=window)
        for which in range(2):
            outputs[which].append(out[which : which + 1])
    for which, count in enumerate((12, 9)):
        right = expected(lengths[which], which, window, scale)[:count]
        torch.testing.assert_close(torch.cat(outputs[which]), right, rtol=1e-5, atol=1e-5)


def test_layers_with_different_windows_share_a_pass() -> None:
    cache = KVCache(uniform_layout(2, GROUPS, SIZE), 4, 4, torch.zeros(()))
    q, k, v = sequence(10, 5)
    for layer in range(2):
        keys, values = cache.layer(layer)
        keys[:10], values[:10] = k, v
    step = DecodePass(cache, "gather", torch.tensor([9]), torch.tensor([[0, 1, 2]]), torch.tensor([10]))
    for layer, window in enumerate((None, 2)):
        out = paged_attention(q[9:], k[9:], v[9:], step, layer, scale=0.3, window=window)
        start = 8 if window else 0
        torch.testing.assert_close(out[0], attend(q[9], k[start:], v[start:], 0.3), rtol=1e-5, atol=1e-5)


def test_what_lies_beyond_a_sequence_is_not_seen() -> None:
    q, k, v = sequence(5, 3)
    keys, values = torch.full((12, GROUPS, SIZE), 1e4), torch.full((12, GROUPS, SIZE), 1e4)
    keys[4:9], values[4:9] = k, v
    out = gathered_decode(q[4:], keys, values, torch.tensor([[1, 2, 0]]), torch.tensor([5]), 4, 0.3, None)
    torch.testing.assert_close(out[0], attend(q[4], k, v, 0.3), rtol=1e-5, atol=1e-5)


def test_the_query_may_be_a_view() -> None:
    """Decoding hands over queries as they come out of a transposition."""
    q, k, v = sequence(4, 4)
    views = torch.stack([q[3], q[2]], 1).transpose(0, 1)
    keys, values = torch.cat([k, k]), torch.cat([v, v])
    out = gathered_decode(views, keys, values, torch.tensor([[0], [1]]), torch.tensor([4, 4]), 4, 0.3, None)
    torch.testing.assert_close(out[1], attend(q[2], k, v, 0.3), rtol=1e-5, atol=1e-5)


def test_bf16_stays_bf16() -> None:
    q, k, v = (tensor.bfloat16() for tensor in sequence(4, 6))
    out = gathered_decode(q[3:], k, v, torch.tensor([[0]]), torch.tensor([4]), 4, 1 / math.sqrt(SIZE), 2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].float(), attend(q[3], k[2:], v[2:], 1 / math.sqrt(SIZE)), rtol=0.02, atol=0.02)


def test_blocks_are_copied_in_every_layer_at_once() -> None:
    """A block that is copied from may be copied to in the same round: what counts is what was there before."""
    cache = KVCache(uniform_layout(3, GROUPS, SIZE), 4, 2, torch.zeros(()))
    (slots,) = cache.tensors
    slots.copy_(torch.randn(slots.shape, generator=torch.Generator().manual_seed(2)))
    before = slots.clone().unflatten(1, (5, 2))
    cache.copy_blocks([(0, 1), (1, 3), (0, 2)])
    after = slots.unflatten(1, (5, 2))
    for source, target in ((0, 0), (0, 1), (1, 3), (0, 2)):
        assert torch.equal(after[:, target], before[:, source])
