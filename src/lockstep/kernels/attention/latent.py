"""Multi-head latent attention (MLA): the KV cache holds one compressed latent and one rotary key per token.

The modules of transformers expand the latents to keys and values of every head (`expand_kv`). In the rollout engine,
the modules pass latents and rotary keys to attention instead. Decoding uses absorbed products: a query is multiplied by
the key part of `kv_b_proj`, so that it attends to latents directly, and the attended latent by the value part.

Tensor names end with their dimensions, which are T tokens, H query heads, R latent size, P size of the rotary key, N
size of a key without its rotary part, V value size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from lockstep.kernels.attention.kv_cache import CachedCall, CacheLayout, Plane
from lockstep.kernels.attention.layout import DecodePass, Layout
from lockstep.kernels.attention.masks import CALLS, HEADS
from lockstep.kernels.attention.paged import PrefillPass, paged_attention, store_keys
from lockstep.kernels.attention.varlen import varlen_attention

PROJECTIONS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Allowed error of absorbed products in the trial, relative to the largest number.
TRIAL_ERROR = 1e-4
TRIAL_TOKENS = 7


def latent_modules(attentions: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the attention modules whose KV cache can hold latents. These modules are recognised by the names of their
    projections. If absorbed products give wrong results for a module, it caches full keys and values, with a
    warning."""
    found = []
    tried: dict[tuple[Any, ...], str | None] = {}
    for module in dict.fromkeys(attentions):
        if not _looks_latent(module):
            continue
        kind = type(module), getattr(module, HEADS), *(getattr(module, name) for name in SIZES)
        if kind not in tried:
            tried[kind] = why = _trial(module)
            if why is not None:
                warnings.warn(f"{type(module).__name__} caches full keys and values: {why}", stacklevel=2)
        if tried[kind] is None:
            found.append(module)
    return found


def _looks_latent(module: Any) -> bool:
    named = all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)
    sized = all(isinstance(getattr(module, name, None), int) for name in SIZES)
    if not named or not sized or getattr(module.kv_b_proj, "bias", None) is not None:
        return False
    return callable(getattr(module, "expand_kv", None)) and len(getattr(module, CALLS)) == 1


@torch.no_grad()
def _trial(module: Any) -> str | None:
    """Compares absorbed products with the keys and values of the module itself, in fp32. Returns a description of the
    difference, or None if there is none. The weights are random, because those of the module may be sharded or on
    another device."""
    generator = torch.Generator().manual_seed(0)
    heads, rank = getattr(module, HEADS), module.kv_lora_rank

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    stand_in = copy(module)
    projection = nn.Linear(rank, heads * (module.qk_nope_head_dim + module.v_head_dim), bias=False, device="meta")
    projection.weight = nn.Parameter(drawn(*projection.weight.shape) / rank**0.5, requires_grad=False)
    stand_in.__dict__["_modules"] = {**module._modules, "kv_b_proj": projection}
    latent_1KR, rope_1KP = drawn(1, TRIAL_TOKENS, rank), drawn(1, TRIAL_TOKENS, module.qk_rope_head_dim)
    query_THD = drawn(2, heads, module.qk_nope_head_dim + module.qk_rope_head_dim)
    shares_THK = drawn(2, heads, TRIAL_TOKENS)
    try:
        key, value = type(module).expand_kv(stand_in, latent_1KR[None], rope_1KP[None])
        pairs = (
            (
                absorbed_query(stand_in, query_THD) @ torch.cat((latent_1KR, rope_1KP), -1)[0].T,
                torch.einsum("thd,hkd->thk", query_THD, key[0]),
            ),
            (
                expanded_output(stand_in, shares_THK @ latent_1KR[0]),
                torch.einsum("thk,hkv->thv", shares_THK, value[0]),
            ),
        )
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"its latents cannot be absorbed ({str(error).splitlines()[0]})"
    for absorbed, own in pairs:
        off = float((absorbed - own).abs().max() / own.abs().max())
        if not off <= TRIAL_ERROR:
            return f"absorbed products have a relative error of {off:.2g}"
    return None


def _weights(module: Any) -> torch.Tensor:
    """Returns the weight of `kv_b_proj` as (H, N + V, R). A LoRA adapter of `kv_b_proj` is included."""
    projection, size = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
    if type(projection) is nn.Linear and projection.bias is None:
        return projection.weight.view(-1, size, module.kv_lora_rank)
    like = next(projection.parameters())
    return projection(torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)).T.unflatten(0, (-1, size))


def absorbed_query(module: Any, query_THD: torch.Tensor) -> torch.Tensor:
    """Returns queries (T, H, R + P) that attend to latents with rotary keys."""
    nope, rope = query_THD.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    keys_HNR = _weights(module)[:, : module.qk_nope_head_dim]
    return torch.cat((torch.bmm(nope.transpose(0, 1), keys_HNR).transpose(0, 1), rope), -1)


def expanded_output(module: Any, latent_THR: torch.Tensor) -> torch.Tensor:
    """Returns the attention output (T, H, V) of attended latents."""
    values_HVR = _weights(module)[:, module.qk_nope_head_dim :]
    return torch.bmm(latent_THR.transpose(0, 1), values_HVR.transpose(1, 2)).transpose(0, 1)


def latent_layout(layout: CacheLayout, modules: Sequence[Any]) -> CacheLayout:
    """Returns the layout in which the calls of these modules cache latents instead of keys and values."""
    calls, planes = list(layout.calls), list(layout.planes)
    for module in modules:
        (index,) = getattr(module, CALLS)
        keys = calls[index].keys
        planes[keys] = Plane(1, module.kv_lora_rank + module.qk_rope_head_dim)
        calls[index] = CachedCall(keys, keys, writes_values=False, latent=module.kv_lora_rank)
    used = sorted({plane for call in calls for plane in (call.keys, call.values)})
    moved = {plane: place for place, plane in enumerate(used)}
    return CacheLayout(
        tuple(planes[plane] for plane in used),
        tuple(
            CachedCall(moved[call.keys], moved[call.values], call.writes_keys, call.writes_values, call.latent)
            for call in calls
        ),
    )


@contextmanager
def latents_kept(modules: Sequence[Any]) -> Iterator[None]:
    """Inside the `with` block, the modules pass latents and rotary keys to attention instead of keys and values."""
    for module in modules:
        module.expand_kv = _as_they_are
    try:
        yield
    finally:
        for module in modules:
            del module.expand_kv


def _as_they_are(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rope


def latent_attention(
    module: Any,
    query_THD: torch.Tensor,
    latent_TR: torch.Tensor,
    rope_TP: torch.Tensor,
    step: PrefillPass | DecodePass,
    call: int,
    **limits: Any,
) -> torch.Tensor:
    """Stores the new latents in the KV cache and computes the attention of their tokens. `limits` are the scale, the
    window, the chunk, the soft cap and the sinks."""
    rows_T1L = torch.cat((latent_TR, rope_TP), -1)[:, None]
    if isinstance(step, PrefillPass) and isinstance(step.where, Layout):
        store_keys(rows_T1L, step, call)
        # A prefill pass is limited by arithmetic, and attention over full keys and values needs fewer operations.
        key, value = type(module).expand_kv(module, latent_TR[None, None], rope_TP[None, None])
        key_THD, value_THV = (tensor[0].transpose(0, 1) for tensor in (key, value))
        chunk = limits.pop("chunk")
        where = step.where.chunked(chunk) if chunk else step.where
        return varlen_attention(query_THD, key_THD, value_THV, where, **limits)
    query_THL = absorbed_query(module, query_THD)
    latent_THR = paged_attention(query_THL, rows_T1L, rows_T1L[..., : latent_TR.shape[-1]], step, call, **limits)
    return expanded_output(module, latent_THR)
