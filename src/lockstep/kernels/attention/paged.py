"""Paged attention of the rollout engine, with keys and values in blocks of a shared KV cache.

The suffixes of tensor names mean T tokens of a forward pass, B sequences that decode one token each, M block-table
entries per sequence, H query heads, G key/value heads, D head size. A slot holds the key and value of one token. The
index of a slot is block * block size + position in the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lockstep.kernels.attention.explicit import causal_attention, masked_attention
from lockstep.kernels.attention.flash import LARGEST_HEAD
from lockstep.kernels.attention.layout import Chunk, DecodePass, KVCache, Layout, decode_mask
from lockstep.kernels.attention.npu_attention import infer_decode, infer_fits
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.invariant import HALVES, invariant_chunk, invariant_decode, invariant_store


@dataclass(frozen=True)
class PrefillPass:
    """A prefill forward pass over tokens of several sequences in one packed row. `where` is a `Layout` if every
    sequence starts in this pass, otherwise it is one `Chunk` per sequence."""

    cache: KVCache
    slots_T: torch.Tensor
    where: Layout | tuple[Chunk, ...]
    kernel: str = "gather"
    states: Any = None
    """The states of recurrent layers (`PrefillStates`), or None if the model has no such layers."""


def paged_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    step: PrefillPass | DecodePass,
    layer: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    stored: bool = False,
) -> torch.Tensor:
    """Stores new keys and values in the KV cache, unless `stored` says that they are already in the cache. Computes
    causal attention within each token's sequence."""
    keys, values = step.cache.layer(layer)
    invariant = step.kernel == "invariant" and _invariant_fits(query_THD, softcap, sinks_H)
    if isinstance(step, DecodePass) and step.kernel == "triton" and query_THD.is_cuda and not stored:
        new = key_TGD, value_TGD
        return decode_attention(query_THD, keys, values, step, scale, window, softcap, sinks_H, new)
    if invariant and not stored:
        invariant_store(key_TGD, value_TGD, keys, values, step.slots_T)
    elif not stored:
        keys.index_copy_(0, step.slots_T, key_TGD)
        values.index_copy_(0, step.slots_T, value_TGD)
    if isinstance(step, DecodePass):
        return decode_attention(query_THD, keys, values, step, scale, window, softcap, sinks_H)
    if isinstance(step.where, Layout):
        return varlen_attention(
            query_THD, key_TGD, value_TGD, step.where, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )
    if invariant:
        chunks = (invariant_chunk(query_THD, keys, values, chunk, scale, window) for chunk in step.where)
        return torch.cat(list(chunks))
    chunks = (_chunk_attention(query_THD, keys, values, chunk, scale, window, softcap, sinks_H) for chunk in step.where)
    return torch.cat(list(chunks))


def decode_attention(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: DecodePass,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes decode attention over the KV cache with the device's kernel. There is one query per sequence.

    If `new` is given, the Triton kernel also writes these new keys and values to the cache.
    """
    plain = softcap is None and sinks_H is None
    block = step.cache.block
    if step.kernel == "invariant" and _invariant_fits(query_BHD, softcap, sinks_H):
        return invariant_decode(query_BHD, keys, values, step, scale, window)
    if step.kernel in ("triton", "invariant") and query_BHD.is_cuda:
        from lockstep.kernels.attention.paged_triton import paged_decode

        blocks = step.table_BM, step.lengths_B, block
        return paged_decode(query_BHD, keys, values, *blocks, scale, window, softcap, sinks_H, new)
    assert new is None
    longest = step.table_BM.shape[1] * block
    if step.kernel == "npu_infer" and plain and infer_fits(query_BHD, keys, block, window, longest):
        return infer_decode(query_BHD, keys, values, step.table_BM, step.lengths(), block, scale)
    mask = step.mask(window, query_BHD.dtype)
    return _masked_decode(query_BHD, keys, values, step.table_BM, block, scale, mask, softcap, sinks_H)


def _invariant_fits(query_THD: torch.Tensor, softcap: float | None, sinks_H: torch.Tensor | None) -> bool:
    """Returns whether the batch-invariant kernel supports these inputs. The limits of the kernel are the same as for
    packed rows."""
    fits = query_THD.is_cuda and query_THD.dtype in HALVES and query_THD.shape[-1] % 8 == 0
    return fits and query_THD.shape[-1] <= LARGEST_HEAD and softcap is None and sinks_H is None


def gathered_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    block: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference implementation: gathers the blocks of every sequence and computes plain attention with a mask."""
    mask = decode_mask(lengths_B, table_BM.shape[1] * block, window, query_BHD.dtype)
    return _masked_decode(query_BHD, keys, values, table_BM, block, scale, mask, softcap, sinks_H)


def _masked_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BM: torch.Tensor,
    block: int,
    scale: float,
    mask: torch.Tensor,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    k, v = (
        cached.unflatten(0, (-1, block)).index_select(0, table_BM.flatten()).view(batch, -1, groups, cached.shape[-1])
        for cached in (keys, values)
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if softcap is not None or sinks_H is not None:
        query = query_BHD[:, :, None]
        return masked_attention(query, k, v, mask[:, 0], sinks_H, scale=scale, softcap=softcap)[:, :, 0]
    # The query heads of one key/value head are stacked as rows of one matrix, so keys are not repeated in memory.
    query = query_BHD.reshape(batch, groups, heads // groups, size)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, -1)


def _chunk_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: Chunk,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the attention of a chunk's tokens to the chunk itself and to the cached tokens before it."""
    query = query_THD[chunk.first : chunk.first + chunk.stop - chunk.start].transpose(0, 1)[None]
    k, v = (cached.index_select(0, chunk.slots).transpose(0, 1)[None] for cached in (keys, values))
    if softcap is not None or sinks_H is not None:
        out = causal_attention(query, k, v, sinks_H, scale=scale, softcap=softcap, window=window, first=chunk.start)
        return out[0].transpose(0, 1)
    positions = torch.arange(chunk.stop, device=keys.device)
    distance = positions[chunk.start :, None] - positions[None, :]
    mask = distance >= 0
    if window:
        mask &= distance < window
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
