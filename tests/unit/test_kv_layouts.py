"""KV caches of several sizes, shared planes, several calls per layer, latents, chunks and indexers.

The sweep compares one model of each kind with transformers. Here the cache layouts are checked by hand, and every
comparison is made to fail by breaking the layout or the mask.
"""

from __future__ import annotations

import itertools
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
from lockstep.kernels.attention.kv_cache import CachedCall, CacheLayout, KVCache, Plane
from lockstep.kernels.attention.layout import Layout, make_layout
from lockstep.kernels.attention.masks import Seen
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.model import miniature
from lockstep.model.check import LENGTHS, Miniature, build_miniature, packed_row, tokens, try_architecture
from lockstep.model.miniature import VOCABULARY, miniature_config
from lockstep.model.trials import Unfit
from lockstep.parallel.context_split import refuse_undivided
from lockstep.preflight.model_sizes import selection_bytes
from lockstep.preflight.state_sizes import cached_elements, indexed_latents, kv_bytes
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
    # Latents, rotary keys and indexer keys of 16 in each of three layers. In transformers 5.17, four heads have keys of
    # 24 and values of 16 instead of latents.
    "deepseek_v32": 3 * (16 + 8 + 16) if indexed_latents() else 3 * (4 * (24 + 16) + 16),
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


# Families with latents, caches of several sizes, shared caches, chunks and indexers, and what switches these on.
NAMED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "kimi_k25": {},
    "glm4_moe_lite": {},
    "longcat_flash": {},
    "gemma4_text": SHARED,
    "mimo_v2_flash": {},
    "diffllama": {},
    "llama4_text": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2},
}


def reads_elsewhere(layout: CacheLayout) -> CacheLayout:
    """The layout in which a call reads the cache of an earlier call with the same shapes."""

    def shapes(call: CachedCall) -> tuple[Plane, Plane]:
        return layout.planes[call.keys], layout.planes[call.values]

    pairs = itertools.combinations(range(len(layout.calls)), 2)
    first, second = next(
        (i, j)
        for i, j in pairs
        if shapes(layout.calls[i]) == shapes(layout.calls[j]) and layout.calls[i].keys != layout.calls[j].keys
    )
    calls, other = list(layout.calls), layout.calls[first]
    calls[second] = replace(calls[second], keys=other.keys, values=other.values, writes_keys=False, writes_values=False)
    return replace(layout, calls=tuple(calls))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_named_family_is_that_of_transformers_and_a_wrong_layout_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, gradients and greedy tokens, and then the engine with a call that reads the cache of another."""
    made = build_miniature(AutoConfig.for_model(name, **NAMED[name]), "sdpa", CPU)
    try_architecture(made)
    try_engine(made, Cpu())
    layout = reads_elsewhere(made.policy.decoder.cache_layout())
    monkeypatch.setattr(made.policy.decoder, "cache_layout", lambda: layout)
    with pytest.raises(Unfit, match="greedy tokens or log-probs"):
        try_engine(made, Cpu())


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3_vl_text"])
def test_the_checks_of_other_families_find_a_selection_that_is_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_miniature(AutoConfig.for_model(name, **NAMED[name]), "sdpa", CPU)
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


@pytest.mark.parametrize(("heads", "ties"), [(16, False), (2, True)])
def test_a_small_indexer_has_heads_enough_to_tell_tokens_apart(
    heads: int, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of a token is 0 if relu is 0 in every head, which happens to every fourth token with two heads. Which
    tokens with a score of 0 are selected is arbitrary, so the check could fail for a correct model."""
    monkeypatch.setitem(miniature.SIZES, "index_n_heads", heads)
    scored: list[torch.Tensor] = []
    topk = torch.Tensor.topk

    def noted(scores: torch.Tensor, k: int, *args: Any, **named: Any) -> Any:
        if scores.dim() == 3 and scores.shape[1] == scores.shape[2]:
            scored.append(scores)
        return topk(scores, k, *args, **named)

    made = build_miniature(AutoConfig.for_model("deepseek_v32"), "sdpa", CPU)
    monkeypatch.setattr(torch.Tensor, "topk", noted)
    made.policy(packed_row([tokens(length, VOCABULARY) for length in LENGTHS], CPU))
    limit = made.model.config.index_topk
    ordered = [scores.sort(-1, descending=True).values for scores in scored]
    # The last selected token and the first that is not selected, where both are seen.
    edges = [(one[..., limit - 1], one[..., limit]) for one in ordered]
    assert edges
    assert any(bool(((last == next_one) & (next_one > -1e30)).any()) for last, next_one in edges) == ties


def test_the_memory_plan_counts_padding_and_masks_of_indexers() -> None:
    config = AutoConfig.for_model("deepseek_v32")
    # Two rows of 100 tokens, three masks in bf16, and fp32 scores of 64 heads.
    assert selection_bytes(config, 200, 100, 2, 3) == 200 * 100 * (2 * 3 + 4 * 64)
    assert selection_bytes(AutoConfig.for_model("deepseek_v3"), 200, 100, 2, 3) == 0


# -- batch-invariant kernels


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", None),
        ("llama4_text", "Llama4TextAttention attends within chunks"),
        ("deepseek_v3", "DeepseekV3Attention has keys and values of different sizes"),
        ("deepseek_v32", "DeepseekV32Attention selects tokens by scores"),
        ("gemma2", "Gemma2Attention has a soft cap"),
        ("gpt_oss", "GptOssAttention has attention sinks"),
        ("mamba2", "Mamba2Mixer has a recurrent state"),
    ],
)
def test_what_batch_invariant_kernels_do_not_support_is_known(name: str, why: str | None) -> None:
    assert small(name).policy.decoder.batch_variant() == why
