"""KV caches of several sizes, shared planes, several calls per layer, latents, chunks and indexers.

The sweep compares one model of each kind with transformers. Here the cache layouts are checked by hand, and every
comparison is made to fail by breaking the layout or the mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.kernels.attention import interface, latent, rows, varlen
from lockstep.kernels.attention.kv_cache import CacheLayout, KVCache, Plane
from lockstep.kernels.attention.layout import Layout, make_layout
from lockstep.kernels.attention.masks import Seen
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.model.check import Miniature, build_miniature, packed_row, tokens, try_architecture
from lockstep.model.miniature import VOCABULARY, miniature_config
from lockstep.model.trials import Unfit
from lockstep.parallel.context_split import refuse_undivided
from lockstep.preflight.model_sizes import cached_elements, kv_bytes
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine_check import try_engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Request, Sampling

CPU = torch.device("cpu")
SHARED = {"num_kv_shared_layers": 4, "global_head_dim": 32, "num_global_key_value_heads": 1}
# One model of each kind, with the number of cached elements per token of its small copy, counted by hand.
KINDS: dict[str, int] = {
    "llama": 2 * 2 * 4 * 16,
    # Three layers with 2, 4 and 2 heads; keys of 16 and values of 8.
    "mimo_v2_flash": (2 + 4 + 2) * (16 + 8),
    # A latent of 16 and a rotary key of 8 in each of two layers.
    "deepseek_v3": 2 * (16 + 8),
    # Latents, rotary keys and indexer keys of 16 in each of three layers.
    "deepseek_v32": 3 * (16 + 8 + 16),
    # Keys once and values twice in each of two layers.
    "diffllama": 2 * (4 * 16) * 3,
}


@cache
def small(name: str) -> Miniature:
    return build_miniature(AutoConfig.for_model(name), "sdpa", CPU)


@pytest.mark.parametrize("name", KINDS)
def test_the_cache_holds_what_a_hand_counts_and_the_memory_plan_says_so(name: str) -> None:
    layout = small(name).policy.decoder.cache_layout()
    assert layout.token_elements == KINDS[name]
    assert sum(cached_elements(miniature_config(AutoConfig.for_model(name)))) == KINDS[name]
    cache = KVCache(layout, 3, 4, torch.zeros(()))
    assert cache.nbytes == 4 * 4 * 4 * layout.token_elements


def test_shared_keys_and_values_are_cached_once() -> None:
    config = AutoConfig.for_model("gemma4_text", **SHARED)
    policy = build_miniature(config, "sdpa", CPU).policy
    layout = policy.decoder.cache_layout()
    kinds = policy.causal_lm.config.layer_types
    last, source = layout.calls[-1], layout.calls[len(kinds) - 1 - kinds[-2::-1].index(kinds[-1]) - 1]
    assert (last.keys, last.values) == (source.keys, source.values)
    assert not last.writes_keys
    assert not last.writes_values
    assert {plane for call in layout.calls for plane in (call.keys, call.values)} == set(range(len(layout.planes)))
    assert len({plane.size for plane in layout.planes}) > 1
    assert sum(cached_elements(miniature_config(config))) == layout.token_elements


def broken_layout(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[CacheLayout], CacheLayout]) -> None:
    decoder = small(name).policy.decoder
    layout = change(decoder.cache_layout())
    monkeypatch.setattr(decoder, "cache_layout", lambda: layout)


def swapped(layout: CacheLayout) -> CacheLayout:
    """The layout in which the first call reads the values of the last call."""
    first, last = layout.calls[0], layout.calls[-1]
    return replace(layout, calls=(replace(first, values=last.values), *layout.calls[1:]))


def test_the_engine_check_finds_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    try_engine(small("diffllama"), Cpu())
    broken_layout(monkeypatch, "diffllama", swapped)
    with pytest.raises(Unfit, match="greedy tokens or log-probs"):
        try_engine(small("diffllama"), Cpu())


# -- latents


def test_the_engine_check_finds_a_wrong_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    try_engine(small("deepseek_v3"), Cpu())
    expanded = latent.expanded_output
    monkeypatch.setattr(latent, "expanded_output", lambda *given: expanded(*given) * 1.01)
    with pytest.raises(Unfit, match="greedy tokens or log-probs"):
        try_engine(small("deepseek_v3"), Cpu())


def test_a_module_that_fails_the_trial_caches_full_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    absorbed = latent.absorbed_query
    monkeypatch.setattr(latent, "absorbed_query", lambda *given: absorbed(*given) * 1.01)
    made = build_miniature(AutoConfig.for_model("deepseek_v3"), "sdpa", CPU)
    with pytest.warns(UserWarning, match="DeepseekV3Attention caches full keys and values: absorbed products have"):
        assert made.policy.decoder.cache_layout().planes[:2] == (Plane(4, 24), Plane(4, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_engine(made, Cpu())


def test_groups_and_preemption_keep_the_latents() -> None:
    policy = small("deepseek_v3").policy
    requests = [Request(tokens(length, VOCABULARY), key, 3) for key, length in enumerate((5, 11))]
    sampling = Sampling(max_tokens=14, seed=3)

    def made(**settings: Any) -> tuple[list[list[int]], int]:
        engine = NativeEngine(policy, Cpu(), RolloutSettings(block_tokens=4, **settings), lambda ids: "")
        found = sorted(engine.generate(requests, sampling), key=lambda c: (c.request, c.sample))
        return [completion.ids for completion in found], engine.preempted

    roomy, _ = made()
    # Ten blocks of four tokens with 48 elements of four bytes, and part of an eleventh.
    tight, preempted = made(cache_gb=10.5 * 4 * 48 * 4 / 1e9)
    assert preempted
    assert tight == roomy


class Adapted(torch.nn.Module):
    """A projection with an adapter."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.more(x)


def test_an_adapter_of_the_absorbed_projection_is_included() -> None:
    made = build_miniature(AutoConfig.for_model("deepseek_v3"), "sdpa", CPU)
    for module in made.policy.decoder.attentions:
        module.kv_b_proj = Adapted(module.kv_b_proj)
    assert made.policy.decoder.cache_layout().token_elements == KINDS["deepseek_v3"]
    try_engine(made, Cpu())


def test_tensor_parallel_ranks_all_hold_the_latents() -> None:
    assert kv_bytes(AutoConfig.for_model("deepseek_v3"), 2, 4) == 61 * (512 + 64) * 2
    config = AutoConfig.for_model("mimo_v2_flash")
    assert kv_bytes(config, 2, 4) == kv_bytes(config, 2) // 4


# -- keys and values of different sizes


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
def test_kernels_that_need_equal_sizes_get_them(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def equal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, *given: Any) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        asked.append(q.shape[-1])
        return varlen._buckets(q, k, v, layout, *given, 0.0, None, None)

    monkeypatch.setitem(varlen.KERNELS, "flash_varlen", varlen.Fused(equal, lambda *_: True))
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, size) for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1])))
    found, wanted = (
        varlen_attention(q, k, v, make_layout([5, 4], CPU, kernel), scale=0.3, window=3)
        for kernel in ("flash_varlen", "sdpa")
    )
    assert asked == [16]
    torch.testing.assert_close(found, wanted)


# -- training


@pytest.mark.parametrize("name", ["llama4_text", "deepseek_v32"])
def test_gradient_checkpointing_recomputes_positions_and_selections(name: str) -> None:
    """A layer that is run again in the backward pass scales its queries, and selects tokens, as it did before."""
    made = build_miniature(AutoConfig.for_model(name), "sdpa", CPU)
    batch = packed_row([tokens(length, VOCABULARY) for length in (5, 21)], CPU)
    found = []
    made.policy.train()
    for checkpointed in (False, True):
        if checkpointed:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.policy.zero_grad(set_to_none=True)
        logprobs = made.policy(batch).logprobs_K
        (logprobs**2).sum().backward()
        found.append((logprobs.detach(), {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}))
    (plain, gradients), (again, recomputed) = found
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-5)
    assert gradients.keys() == recomputed.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(recomputed[key], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max() + 1e-6))


# -- chunks


@pytest.mark.parametrize("shared", [False, True])
def test_chunked_attention_is_masked_attention(shared: bool) -> None:
    torch.manual_seed(0)
    lengths, chunk = [11, 3, 8], 4
    index = None
    if shared:
        # Two sequences of 11 and 9 tokens share their first 6 tokens.
        lengths, index = [11, 9], torch.tensor([*range(11), *range(6), 11, 12, 13])
    count = sum(lengths) if index is None else 14
    q, k, v = (torch.randn(count, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    layout = make_layout(lengths, CPU, "sdpa", index).chunked(chunk)
    out = varlen_attention(q, k, v, layout, scale=0.3)
    source = torch.arange(count) if index is None else index
    wanted = torch.zeros_like(out)
    for part in source.split(lengths):
        positions = torch.arange(len(part))
        mask = Seen(None, chunk).sees(positions[:, None], positions[None])
        heads = [rows_T[part].transpose(0, 1)[None] for rows_T in (q, k, v)]
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
        wanted = wanted.index_copy(0, part, attended[0].transpose(0, 1))
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(out)
    for mine, own in zip(*(torch.autograd.grad((o * upstream).sum(), (q, k, v)) for o in (out, wanted)), strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)


def test_a_short_sequence_is_one_chunk() -> None:
    layout = make_layout([4, 2], CPU, "sdpa")
    assert layout.chunked(4) is layout
    assert layout.chunked(3).ends == (3, 4, 6)
    assert layout.chunked(3) is layout.chunked(3)


def test_the_check_finds_wrong_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_miniature(AutoConfig.for_model("llama4_text"), "sdpa", CPU)
    chunked = Layout.chunked
    monkeypatch.setattr(Layout, "chunked", lambda self, chunk: chunked(self, chunk - 1))
    with pytest.raises(Unfit, match="packed log-probs differ"):
        try_architecture(made)


# -- indexers


def test_rows_take_shared_tokens_from_the_first_sequence() -> None:
    ids = torch.tensor([[7, 8, 9, 5, 6]])
    positions = torch.tensor([[0, 1, 2, 2, 3]])
    found = rows.padded_rows(ids, positions, (3, 4), torch.tensor([0, 1, 2, 0, 1, 3, 4]), True)
    assert found.input_ids_NL.tolist() == [[7, 8, 9, 0], [7, 8, 5, 6]]
    assert found.position_ids_NL.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    states = torch.arange(8.0).view(2, 4, 1)
    assert found.back(states).flatten().tolist() == [0, 1, 2, 6, 7]


def test_the_checks_find_a_selection_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small("deepseek_v32")
    try_architecture(made)
    try_engine(made, Cpu())
    attend = rows.row_attention
    monkeypatch.setattr(interface, "row_attention", lambda *a, **k: attend(*a, **{**k, "selected": {}}))
    with pytest.raises(Unfit, match="packed log-probs differ"):
        try_architecture(made)
    with pytest.raises(Unfit, match="greedy tokens or log-probs"):
        try_engine(made, Cpu())


def test_an_indexer_sees_no_other_sequence() -> None:
    """The log-probs of a sequence do not change with its neighbours in the packed row."""
    policy = small("deepseek_v32").policy
    first, second = tokens(13, VOCABULARY), tokens(19, VOCABULARY, 5)
    with torch.no_grad():
        both = policy(packed_row([second, first], CPU)).logprobs_K
        alone = policy(packed_row([first], CPU)).logprobs_K
    torch.testing.assert_close(both[18:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"), [("llama4_text", "chunks of 8 tokens"), ("deepseek_v32", "selects tokens with an indexer")]
)
def test_context_parallelism_refuses_what_it_cannot_split(name: str, why: str) -> None:
    model = build_miniature(AutoConfig.for_model(name), "sdpa", CPU).model
    with pytest.raises(Refusal, match=f"{why}, which context parallelism does not support"):
        refuse_undivided(model, SimpleNamespace(layout="gather", size=2), name)  # type: ignore[arg-type]
