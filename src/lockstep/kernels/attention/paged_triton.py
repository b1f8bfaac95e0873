"""Paged decode attention in Triton: one query token per sequence attends to its KV cache blocks, with split-KV.

The plain-torch reference is `gathered_decode` in `paged.py`. The suffixes of tensor names mean B sequences, H query
heads, G key/value heads, D head size, S splits of a sequence.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import tanh


class Launch(NamedTuple):
    """Launch parameters: KV tokens per tile (BLOCK_N), num_warps and num_stages."""

    tile: int
    warps: int
    stages: int


# Launch parameters for head sizes up to 64 (NARROW) and for larger head sizes (WIDE). Tiles larger than these would
# leave no shared memory for other programs.
NARROW, WIDE = Launch(64, 2, 3), Launch(32, 4, 3)
# BUSY is the number of programs that fill one multiprocessor. If there are fewer programs than fill the device, each
# sequence is split. A split has at least PIECE tokens, because merging smaller splits costs more time than it saves.
BUSY, PIECE, MOST_SPLITS = 4, 256, 16


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    new_keys,
    new_values,
    table,
    lengths,
    sinks,
    out,
    m_parts,
    l_parts,
    scale,
    softcap,
    window,
    query_stride,
    query_head_stride,
    new_key_stride,
    new_key_head_stride,
    new_value_stride,
    new_value_head_stride,
    slot_stride,
    head_stride,
    table_stride,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    NEW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Computes decode attention. Each Triton program handles one sequence and one key/value head. The rows of a tile
    are the SHARED query heads of that key/value head.

    With SPLITS > 1, a program reads one split of the sequence, and `_merge` combines the splits.
    """
    # Neighbouring programs read neighbouring memory, because they handle the heads of a token and the samples of one
    # prompt.
    group = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    sized = columns < SIZE
    inside = (rows[:, None] < SHARED) & sized[None, :]
    heads = group * SHARED + rows
    places = sequence * query_stride + heads[:, None] * query_head_stride + columns[None, :]
    q = tl.load(query + places, mask=inside, other=0.0)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    cached = length
    if NEW:
        cached = length - 1
    start = first // TILE * TILE
    stop = cached
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(cached - start, TILE), SPLITS) * TILE
        start += split * share
        stop = tl.minimum(start + share, cached)
    if split == 0:
        if SINKS:
            # An attention sink acts as a key with this logit and a value of 0.
            m_i = tl.load(sinks + heads, mask=rows < SHARED, other=0.0).to(tl.float32)
            l_i += 1.0
        if NEW:
            # Key and value of the new token are written to the cache, and used here from registers.
            place = sequence * new_key_stride + group * new_key_head_stride + columns
            k = tl.load(new_keys + place, mask=sized, other=0.0)
            place = sequence * new_value_stride + group * new_value_head_stride + columns
            v = tl.load(new_values + place, mask=sized, other=0.0)
            slot = tl.load(table + sequence * table_stride + cached // BLOCK) * BLOCK + cached % BLOCK
            slot = slot * slot_stride + group * head_stride
            tl.store(keys + slot + columns, k, mask=sized)
            tl.store(values + slot + columns, v, mask=sized)
            qk_new = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
            if CAPPED:
                qk_new = softcap * tanh(qk_new / softcap)
            m_new = tl.maximum(m_i, qk_new)
            p_new = tl.exp(qk_new - m_new)
            l_i = l_i * tl.exp(m_i - m_new) + p_new
            acc = p_new[:, None] * v.to(tl.float32)[None, :]
            m_i = m_new
    # The next tile's block table entries are loaded one tile ahead, so that the compiler can pipeline the loads of keys
    # and values, which depend on them.
    row = table + sequence * table_stride
    following = start + tl.arange(0, TILE)
    blocks = tl.load(row + following // BLOCK, mask=following < stop, other=0)
    for tile in range(start, stop, TILE):
        positions = tile + tl.arange(0, TILE)
        seen = (positions < stop) & (positions >= first)
        slots = blocks * BLOCK + positions % BLOCK
        following = positions + TILE
        blocks = tl.load(row + following // BLOCK, mask=following < stop, other=0)
        offsets = slots[:, None] * slot_stride + group * head_stride + columns[None, :]
        kv_mask = seen[:, None] & sized[None, :]
        k = tl.load(keys + offsets, mask=kv_mask, other=0.0)
        v = tl.load(values + offsets, mask=kv_mask, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            qk = softcap * tanh(qk / softcap)
        qk = tl.where(seen[None, :], qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        l_i = l_i * alpha + tl.sum(p, axis=1)
        m_i = m_new
    place = sequence * tl.num_programs(0) * SHARED + heads
    if SPLITS > 1:
        place = place * SPLITS + split
        tl.store(m_parts + place, m_i, mask=rows < SHARED)
        tl.store(l_parts + place, l_i, mask=rows < SHARED)
    else:
        acc = acc / l_i[:, None]
    tl.store(out + place[:, None] * SIZE + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    acc, m_parts, l_parts, out, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """Combines the splits of one head of one sequence. An empty split has the maximum m_i = -inf."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, PADDED)
    m_i = tl.load(m_parts + row * SPLITS + splits)
    alpha = tl.exp(m_i - tl.max(m_i, axis=0))
    l_i = tl.sum(alpha * tl.load(l_parts + row * SPLITS + splits), axis=0)
    places = (row * SPLITS + splits)[:, None] * SIZE + columns[None, :]
    acc_i = tl.load(acc + places, mask=columns[None, :] < SIZE, other=0.0)
    result = tl.sum(alpha[:, None] * acc_i, axis=0) / l_i
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=columns < SIZE)


def paged_decode(
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
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Computes paged decode attention. `new` has the keys and values (B, G, D) of each sequence's last token if they
    are not cached yet. The kernel then writes these keys and values to the cache."""
    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    shared = heads // groups
    splits = splits or _splits(batch * groups, table_BM.shape[1] * block, query_BHD.device)
    query = query_BHD if query_BHD.stride(2) == 1 else query_BHD.contiguous()
    new_keys, new_values = (query, query) if new is None else (_rows(part) for part in new)
    out = torch.empty(batch, heads, size, dtype=query.dtype, device=query.device)
    acc = m_parts = l_parts = out
    if splits > 1:
        acc = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=query.device)
        m_parts, l_parts = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=query.device)
    padded = max(16, triton.next_power_of_2(size))
    settings = NARROW if size <= 64 else WIDE
    _decode[(groups, batch, splits)](
        query,
        keys,
        values,
        new_keys,
        new_values,
        table_BM,
        lengths_B,
        query if sinks_H is None else sinks_H.contiguous(),
        acc,
        m_parts,
        l_parts,
        scale,
        1.0 if softcap is None else float(softcap),
        window or 2**30,
        *query.stride()[:2],
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *keys.stride()[:2],
        table_BM.stride(0),
        SHARED=shared,
        ROWS=max(16, triton.next_power_of_2(shared)),
        SIZE=size,
        PADDED=padded,
        BLOCK=block,
        TILE=settings.tile,
        SPLITS=splits,
        NEW=new is not None,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        num_warps=settings.warps,
        num_stages=settings.stages,
    )
    if splits > 1:
        _merge[(batch * heads,)](acc, m_parts, l_parts, out, SIZE=size, PADDED=padded, SPLITS=splits, num_warps=1)
    return out


def _rows(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(2) == 1 else part.contiguous()


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Returns the number of splits per sequence. This number of splits depends only on the sizes of batch and block
    table, because the grid of a captured CUDA graph is fixed."""
    target = BUSY * _processors(device) // programs
    return max(1, min(MOST_SPLITS, _power_below(target), _power_below(longest // PIECE)))


def _power_below(count: int) -> int:
    return 1 << max(0, count.bit_length() - 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
