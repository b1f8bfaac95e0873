"""Operators of generation: attention over whole and paged keys, and the writes to the pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu

from .attention_twin import attend_plainly, causal_from_the_end, packed_plainly

pytestmark = pytest.mark.ascend

HEADS, KEY_HEADS, SIZE = 4, 2, 16
SCALE = SIZE**-0.5
PAGE = 128
LENGTHS = [300, 0, 129]
# Three pages, none, two: out of order, and with a number in the unused places that would be out of range.
TABLE = torch.tensor([[4, 0, 2], [99, 99, 99], [1, 5, 99]], dtype=torch.int32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def infer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "scale": SCALE, **more}
    on_device = {name: x.to("npu") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    out, sums = torch_npu.npu_fused_infer_attention_score(query.to("npu"), key.to("npu"), value.to("npu"), **on_device)
    return out.cpu(), sums.cpu()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, atol=2e-3, rtol=2e-3)


def plain_sequence(cache: torch.Tensor, row: int) -> torch.Tensor:
    """[1, key heads, length, size] of one row of the table, read slot by slot from [pages, page, heads x size]."""
    tokens = [cache[TABLE[row, place // PAGE], place % PAGE] for place in range(LENGTHS[row])]
    return torch.stack(tokens).float().unflatten(-1, (KEY_HEADS, SIZE)).transpose(0, 1)[None]


@pytest.fixture
def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return random(6, PAGE, KEY_HEADS * SIZE), random(6, PAGE, KEY_HEADS * SIZE, seed=1)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_a_new_token_over_pages(layout: str, caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    query = random(3, HEADS, 1, SIZE, seed=2)
    given = {"BSH": query.reshape(3, 1, -1), "BSND": query.transpose(1, 2), "BNSD": query}[layout]
    paged: dict[str, Any] = {"block_table": TABLE, "block_size": PAGE, "actual_seq_lengths_kv": LENGTHS}
    out, _ = infer(given.contiguous(), *caches, input_layout=layout, **paged)
    for row in (0, 2):
        keys, values = (plain_sequence(cache, row) for cache in caches)
        expected = attend_plainly(query[row][None].float(), keys, values, SCALE, None)
        close(out[row].flatten(), expected.flatten())
    assert out[1].abs().sum() == 0


def test_pages_with_heads_first(caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    query = random(3, HEADS, 1, SIZE, seed=2)
    paged: dict[str, Any] = {"block_table": TABLE, "block_size": PAGE, "actual_seq_lengths_kv": LENGTHS}
    paged["input_layout"] = "BNSD"
    heads_first = [cache.unflatten(-1, (KEY_HEADS, SIZE)).transpose(1, 2).contiguous() for cache in caches]
    assert torch.equal(infer(query, *heads_first, **paged)[0], infer(query, *caches, **paged)[0])


def test_packed_queries_over_pages(caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Running sums for the queries, plain lengths for the paged keys; causal from the end."""
    query = random(9, HEADS, SIZE, seed=3)
    out, sums = infer(
        query,
        *caches,
        input_layout="TND",
        block_table=TABLE[[0, 2]],
        block_size=PAGE,
        actual_seq_lengths=[1, 9],
        actual_seq_lengths_kv=[300, 129],
        sparse_mode=3,
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        softmax_lse_flag=True,
    )
    keys, values = (torch.cat([plain_sequence(cache, row)[0].transpose(0, 1) for row in (0, 2)]) for cache in caches)
    bounds = [((0, 1), (0, 300)), ((1, 9), (300, 429))]
    close(out, packed_plainly(query.float(), keys, values, SCALE, bounds, causal_from_the_end))
    assert sums.shape == (9, HEADS, 1)
    first = query[0, 0].float() @ keys[:300, 0].T * SCALE
    torch.testing.assert_close(sums[0, 0, 0], first.logsumexp(0), atol=1e-4, rtol=1e-4)


def test_prompts_of_different_lengths_without_pages() -> None:
    query, key, value = (
        random(2, HEADS, 5, SIZE),
        random(2, KEY_HEADS, 5, SIZE, seed=1),
        random(2, KEY_HEADS, 5, SIZE, seed=2),
    )
    out, sums = infer(
        query,
        key,
        value,
        input_layout="BNSD_BSND",
        actual_seq_lengths=[5, 3],
        actual_seq_lengths_kv=[5, 3],
        sparse_mode=3,
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
    )
    for row, length in enumerate((5, 3)):
        q, k, v = (x[row : row + 1, :, :length].float() for x in (query, key, value))
        close(out[row, :length], attend_plainly(q, k, v, SCALE, causal_from_the_end(length, length))[0].transpose(0, 1))
    assert out.shape == (2, 5, HEADS, SIZE)
    assert sums.shape == (0,)


def test_a_single_token_obeys_its_mask_and_no_sparse_mode() -> None:
    query, key, value = (
        random(2, 1, HEADS * SIZE),
        random(2, 3, KEY_HEADS * SIZE, seed=1),
        random(2, 3, KEY_HEADS * SIZE, seed=2),
    )
    mask = torch.tensor([[False, False, True], [False, True, True]])
    out, _ = infer(query, key, value, atten_mask=mask, sparse_mode=1)
    # The second query sees one key, so it gets that key's value, once for each query head of the group.
    first_value = value[1, 0].unflatten(0, (KEY_HEADS, SIZE)).repeat_interleave(2, 0).flatten()
    close(out[1, 0], first_value.float())


def test_second_version_and_incremental_attention_agree(caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    query = random(3, 1, HEADS * SIZE, seed=2).to("npu")
    key, value = (cache.to("npu") for cache in caches)
    pages: dict[str, Any] = {"block_table": TABLE.to("npu"), "block_size": PAGE, "num_key_value_heads": KEY_HEADS}
    first, _ = torch_npu.npu_fused_infer_attention_score(
        query, key, value, num_heads=HEADS, scale=SCALE, actual_seq_lengths_kv=LENGTHS, **pages
    )
    second, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query, key, value, num_query_heads=HEADS, softmax_scale=SCALE, actual_seq_kvlen=LENGTHS, **pages
    )
    third = torch_npu.npu_incre_flash_attention(
        query, key, value, num_heads=HEADS, scale_value=SCALE, actual_seq_lengths=LENGTHS, **pages
    )
    assert torch.equal(first.cpu(), second.cpu())
    assert torch.equal(first.cpu(), third.cpu())


def test_outputs_have_the_shapes_of_the_meta_function() -> None:
    for lse in (False, True):
        more: dict[str, Any] = {"num_heads": HEADS, "softmax_lse_flag": lse}
        query = random(2, 1, HEADS * SIZE)
        real = torch_npu.npu_fused_infer_attention_score(query.to("npu"), query.to("npu"), query.to("npu"), **more)
        meta = torch_npu.npu_fused_infer_attention_score(*(query.to("meta") for _ in range(3)), **more)
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in meta]


WRONG: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "float32": ({}, torch.float32, "float16"),
    "a page size that is no multiple of 16": ({"block_size": 100}, torch.float16, "multiple of 16"),
    "a table of int64": ({"block_table": TABLE.long()}, torch.float16, "int32"),
    "too few pages": ({"actual_seq_lengths_kv": [400, 0, 129]}, torch.float16, "too few"),
    "a page that is not there": ({"actual_seq_lengths_kv": [300, 1, 129]}, torch.float16, "block_table names pages"),
    "no lengths": ({"actual_seq_lengths_kv": None}, torch.float16, "lengths"),
    "heads that do not divide": ({"num_key_value_heads": 3}, torch.float16, "cannot share"),
    "quantised output": ({"quant_scale2": torch.ones(1)}, torch.float16, "quant_scale2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_documented_limits_are_kept(case: str, caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    change, dtype, message = WRONG[case]
    good: dict[str, Any] = {"block_table": TABLE, "block_size": PAGE, "actual_seq_lengths_kv": LENGTHS}
    query = random(3, 1, HEADS * SIZE, seed=2)
    infer(query, *caches, **good)
    with pytest.raises(Exception, match=message):
        infer(query.to(dtype), *(cache.to(dtype) for cache in caches), **{**good, **change})


@pytest.mark.parametrize(("tokens", "accepted"), [(1, True), (2, False)])
def test_prompts_need_larger_pages_than_single_tokens(tokens: int, accepted: bool) -> None:
    cache = random(2, 64, KEY_HEADS * SIZE)
    table = torch.tensor([[1]], dtype=torch.int32)
    more: dict[str, Any] = {"block_table": table, "block_size": 64, "actual_seq_lengths_kv": [9]}
    if accepted:
        infer(random(1, tokens, HEADS * SIZE), cache, cache, **more)
    else:
        with pytest.raises(RuntimeError, match="multiple of 128"):
            infer(random(1, tokens, HEADS * SIZE), cache, cache, **more)


# ---- writes ----


def test_scatter_by_index() -> None:
    x = torch.zeros(3, 2, 2).to("npu")
    indices = torch.tensor([[2, 0], [0, 1]]).to("npu")
    updates = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to("npu")
    expected = [[[0, 0], [3, 4]], [[0, 0], [0, 0]], [[1, 2], [0, 0]]]
    assert torch_npu.npu_scatter_nd_update(x, indices, updates).tolist() == expected
    assert x.abs().sum().item() == 0
    assert torch_npu.npu_scatter_nd_update_(x, indices, updates) is x
    assert x.tolist() == expected


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_new_keys_go_to_their_slots(mode: str) -> None:
    heads, size, tile = 2, 16, 8
    shape = (3, 4, heads, size) if mode == "Norm" else (3, heads * size // tile, 4, tile)
    key_cache, value_cache = torch.zeros(shape).to("npu"), torch.zeros(shape).to("npu")
    key, value = torch.randn(2, heads, size), torch.randn(2, heads, size)
    slots = torch.tensor([9, 2], dtype=torch.int32)
    torch_npu.npu_scatter_pa_kv_cache(
        key.to("npu"), value.to("npu"), key_cache, value_cache, slots.to("npu"), cache_mode=mode
    )
    for new, cache in ((key, key_cache.cpu()), (value, value_cache.cpu())):
        for token, (page, place) in enumerate([(2, 1), (0, 2)]):
            written = cache[page, place] if mode == "Norm" else cache[page, :, place]
            assert torch.equal(written.flatten(), new[token].flatten())
        assert int((cache != 0).sum()) == 2 * heads * size
