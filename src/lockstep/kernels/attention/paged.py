"""Paged attention of the rollout engine, with keys and values in blocks of a shared KV cache.

Tensor names end with their dimensions, which are T tokens of a forward pass, B sequences that decode one token each, M
block-table entries per sequence, H query heads, G key/value heads, D head size. A slot holds the key and value of one
token. The index of a slot is block * block size + position in the block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lockstep.kernels.attention.explicit import causal_attention, masked_attention
from lockstep.kernels.attention.flash import LARGEST_HEAD, flash_part, flash_part_fits
from lockstep.kernels.attention.kv_cache import Fp8Plane, KVCache
from lockstep.kernels.attention.layout import Chunk, Chunks, DecodePass, Layout, decode_mask
from lockstep.kernels.attention.masks import CALLS, Seen
from lockstep.kernels.attention.npu_attention import infer_decode, infer_fits
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.invariant import HALVES, invariant_chunk, invariant_decode, invariant_store
from lockstep.vision.spans import ImageBlock


@dataclass(frozen=True)
class PrefillPass:
    """A prefill forward pass over tokens of several sequences in one packed row. `where` is a `Layout` if every
    sequence starts in this pass, otherwise the chunks of the sequences."""

    cache: KVCache
    slots_T: torch.Tensor
    where: Layout | Chunks
    kernel: str = "gather"
    states: Any = None
    """The states of recurrent layers (`PrefillStates`), or None if the model has no such layers."""
    blocks: tuple[ImageBlock, ...] = ()
    """The images whose tokens attend to each other in both directions. Their keys are slots of the KV cache."""
    turns: Counter[int] = field(default_factory=Counter)
    """Number of attention calls so far of each module that attends several times in a pass, by `id`."""


def cached_call(module: torch.nn.Module, step: PrefillPass | DecodePass) -> int:
    """Returns the index of the module's next attention call in the layout of the KV cache."""
    calls: tuple[int, ...] = getattr(module, CALLS)
    if len(calls) == 1:
        return calls[0]
    step.turns[id(module)] += 1
    return calls[step.turns[id(module)] - 1]


def store_keys(key_TGD: torch.Tensor, step: PrefillPass | DecodePass, call: int) -> None:
    """Writes the keys of an attention call, or its latents, to the KV cache."""
    step.cache.layer(call)[0].index_copy_(0, step.slots_T, key_TGD)


def paged_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    step: PrefillPass | DecodePass,
    call: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    stored: bool = False,
    chunk: int | None = None,
) -> torch.Tensor:
    """Stores new keys and values in the KV cache, unless they are already stored (`stored`). Computes causal attention
    within each token's sequence, or within its chunk of `chunk` tokens."""
    planes = step.cache.layout.calls[call]
    writes = (planes.writes_keys and not stored, planes.writes_values and not stored)
    if step.cache.fp8:
        how = scale, window, softcap, sinks_H, chunk
        return _fp8_attention(query_THD, key_TGD, value_TGD, step, call, writes, *how)
    keys, values = step.cache.layer(call)
    invariant = step.kernel == "invariant" and _invariant_fits(query_THD, value_TGD, softcap, sinks_H, chunk)
    fused = writes[0] and (writes[1] or planes.latent is not None)
    if isinstance(step, DecodePass) and step.kernel == "triton" and query_THD.is_cuda and fused:
        new = key_TGD, value_TGD
        return decode_attention(query_THD, keys, values, step, scale, window, softcap, sinks_H, new, chunk=chunk)
    if invariant and all(writes):
        invariant_store(key_TGD, value_TGD, keys, values, step.slots_T)
    else:
        for cached, new_rows, written in zip((keys, values), (key_TGD, value_TGD), writes, strict=True):
            if written:
                cached.index_copy_(0, step.slots_T, new_rows)
    if isinstance(step, DecodePass):
        return decode_attention(query_THD, keys, values, step, scale, window, softcap, sinks_H, chunk=chunk)
    if isinstance(step.where, Layout):
        where = step.where.chunked(chunk) if chunk else step.where
        return varlen_attention(
            query_THD, key_TGD, value_TGD, where, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )
    if invariant:
        return torch.cat(
            [invariant_chunk(query_THD, keys, values, piece, scale, window) for piece in step.where.pieces]
        )
    plain = softcap is None and sinks_H is None and chunk is None
    if plain and step.where.kernel == "flash_varlen" and flash_part_fits(query_THD, values):
        # One call for all pieces: a turn of many conversations has many short pieces.
        k, v = (cached.index_select(0, step.where.slots_S) for cached in (keys, values))
        return flash_part(query_THD, k, v, step.where.sections, scale, window)[0]
    return _in_chunks(query_THD, keys, values, step.where, scale, window, softcap, sinks_H, chunk)


def _fp8_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    step: PrefillPass | DecodePass,
    call: int,
    writes: tuple[bool, bool],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    chunk: int | None,
) -> torch.Tensor:
    """`paged_attention` over a cache in fp8. Tokens of the same pass are rounded too, so that a token's output does not
    depend on whether its context was in the cache."""
    keys, values = step.cache.fp8_layer(call)
    for plane, rows, written in zip((keys, values), (key_TGD, value_TGD), writes, strict=True):
        if written:
            plane.index_copy_(0, step.slots_T, rows)
    if isinstance(step, DecodePass):
        block = step.cache.block
        if step.kernel in ("triton", "invariant") and query_THD.is_cuda:
            from lockstep.kernels.attention.paged_triton import paged_decode

            table, lengths, scales = step.table_BM, step.lengths_B, (keys.scales, values.scales)
            cached = keys.codes, values.codes
            return paged_decode(
                query_THD, *cached, table, lengths, block, scale, window, softcap, sinks_H, chunk=chunk, scales=scales
            )
        mask = step.mask(window, query_THD.dtype, chunk)
        return _masked_decode(query_THD, keys, values, step.table_BM, block, scale, mask, softcap, sinks_H)
    if isinstance(step.where, Layout):
        where = step.where.chunked(chunk) if chunk else step.where
        key_TGD, value_TGD = keys.rounded(key_TGD), values.rounded(value_TGD)
        return varlen_attention(
            query_THD, key_TGD, value_TGD, where, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H
        )
    return _in_chunks(query_THD, keys, values, step.where, scale, window, softcap, sinks_H, chunk)


def _in_chunks(
    query_THD: torch.Tensor,
    keys: torch.Tensor | Fp8Plane,
    values: torch.Tensor | Fp8Plane,
    where: Chunks,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    chunk: int | None,
) -> torch.Tensor:
    """Computes the attention of each prefill chunk separately."""
    pieces = (
        _chunk_attention(query_THD, keys, values, piece, scale, window, softcap, sinks_H, chunk)
        for piece in where.pieces
    )
    return torch.cat(list(pieces))


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
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Computes decode attention over the KV cache with the device's kernel. There is one query per sequence.

    If `new` is given, the Triton kernel also writes these new keys and values to the cache.
    """
    plain = softcap is None and sinks_H is None
    block = step.cache.block
    if step.kernel == "invariant" and _invariant_fits(query_BHD, values, softcap, sinks_H, chunk):
        return invariant_decode(query_BHD, keys, values, step, scale, window)
    if step.kernel in ("triton", "invariant") and query_BHD.is_cuda:
        from lockstep.kernels.attention.paged_triton import paged_decode

        blocks = step.table_BM, step.lengths_B, block
        return paged_decode(query_BHD, keys, values, *blocks, scale, window, softcap, sinks_H, new, chunk=chunk)
    assert new is None
    longest = step.table_BM.shape[1] * block
    plain = plain and keys.shape == values.shape and chunk is None
    if step.kernel == "npu_infer" and plain and infer_fits(query_BHD, keys, block, window, longest):
        return infer_decode(query_BHD, keys, values, step.table_BM, step.lengths(), block, scale)
    mask = step.mask(window, query_BHD.dtype, chunk)
    return _masked_decode(query_BHD, keys, values, step.table_BM, block, scale, mask, softcap, sinks_H)


def _invariant_fits(
    query_THD: torch.Tensor,
    values: torch.Tensor,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    chunk: int | None,
) -> bool:
    """Returns whether the batch-invariant kernel supports these inputs. The limits of the kernel are the same as for
    packed rows."""
    if query_THD.shape[-1] != values.shape[-1] or chunk is not None:
        return False
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
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Reference implementation: gathers the blocks of every sequence and computes plain attention with a mask."""
    mask = decode_mask(lengths_B, table_BM.shape[1] * block, window, query_BHD.dtype, chunk)
    return _masked_decode(query_BHD, keys, values, table_BM, block, scale, mask, softcap, sinks_H)


def _masked_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor | Fp8Plane,
    values: torch.Tensor | Fp8Plane,
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
        _rows_of_blocks(cached, table_BM, block).view(batch, -1, groups, cached.shape[-1]) for cached in (keys, values)
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if softcap is not None or sinks_H is not None:
        query = query_BHD[:, :, None]
        return masked_attention(query, k, v, mask[:, 0], sinks_H, scale=scale, softcap=softcap)[:, :, 0]
    # The query heads of one key/value head are stacked as rows of one matrix, so keys are not repeated in memory.
    query = query_BHD.reshape(batch, groups, heads // groups, size)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, -1)


def _rows_of_blocks(cached: torch.Tensor | Fp8Plane, table_BM: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the rows of all blocks of the table, in order."""
    if isinstance(cached, torch.Tensor):
        return cached.unflatten(0, (-1, block)).index_select(0, table_BM.flatten())
    places = torch.arange(block, device=table_BM.device)
    return cached.index_select(0, (table_BM.flatten()[:, None] * block + places).flatten())


def _chunk_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor | Fp8Plane,
    values: torch.Tensor | Fp8Plane,
    piece: Chunk,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Computes the attention of a prefill chunk's tokens to the prefill chunk itself and to the cached tokens before
    it."""
    query = query_THD[piece.first : piece.first + piece.stop - piece.start].transpose(0, 1)[None]
    k, v = (cached.index_select(0, piece.slots).transpose(0, 1)[None] for cached in (keys, values))
    if (softcap is not None or sinks_H is not None) and chunk is None:
        out = causal_attention(query, k, v, sinks_H, scale=scale, softcap=softcap, window=window, first=piece.start)
        return out[0].transpose(0, 1)
    positions = torch.arange(piece.stop, device=keys.device)
    mask = Seen(window or None, chunk).sees(positions[piece.start :, None], positions[None, :])
    if softcap is not None or sinks_H is not None:
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -float("inf"))[None]
        out = masked_attention(query, k, v, bias, sinks_H, scale=scale, softcap=softcap)
        return out[0].transpose(0, 1)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
