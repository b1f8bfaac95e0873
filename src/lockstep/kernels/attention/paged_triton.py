"""Paged decode attention in Triton: one query token per sequence attends to its KV cache blocks, with split-KV.

The plain-torch reference is `gathered_decode` in `paged.py`. Tensor names end with their dimensions, which are B
sequences, H query heads, G key/value heads, D key size, V value size, S splits of a sequence.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import tanh


class Launch(NamedTuple):
    """Launch parameters, which are KV tokens per tile (BLOCK_N), num_warps, num_stages and query heads per program
    (BLOCK_H)."""

    tile: int
    warps: int
    stages: int
    rows: int = 16


# Launch parameters for head sizes up to 64 (NARROW), up to 256 (WIDE) and above (WIDEST). Tiles larger than these
# would leave no shared memory for other programs.
NARROW, WIDE, WIDEST = Launch(64, 2, 3), Launch(32, 4, 3), Launch(16, 4, 2)
# Launch parameters for latents (MLA), whose heads share one wide key, for up to 16, 32 and more query heads. These were
# the fastest of 54 settings on an H200. More rows would spill the accumulator.
LATENTS = Launch(32, 4, 2, 16), Launch(32, 4, 3, 32), Launch(32, 8, 3, 64)
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
    key_scales,
    value_scales,
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
    value_slot_stride,
    value_head_stride,
    table_stride,
    scale_stride,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNKED: tl.constexpr,
    NEW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Computes decode attention. Each Triton program handles one sequence and up to ROWS of the SHARED query heads of
    one key/value head.

    A key has MAIN columns and, if the KV cache holds latents, REST further columns. The values of latents are the first
    MAIN columns of the keys, so these columns are read only once. With SPLITS > 1, a program reads one split of the
    sequence, and `_merge` combines the splits. With CHUNKED, `window` is a chunk size: a token sees only tokens of its
    own chunk. With FP8, keys and values are codes with a scale per token and head.
    """
    # Neighbouring programs read neighbouring memory, because they handle the heads of a token and the samples of one
    # prompt.
    TILES: tl.constexpr = (SHARED + ROWS - 1) // ROWS
    group = tl.program_id(0) // TILES
    head_tile = tl.program_id(0) % TILES
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = head_tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    rest_columns = tl.arange(0, PADDED_REST)
    value_columns = tl.arange(0, PADDED_VALUE)
    sized = columns < MAIN
    rest_sized = rest_columns < REST
    value_sized = value_columns < VALUE
    own = rows < SHARED
    heads = group * SHARED + rows
    places = sequence * query_stride + heads[:, None] * query_head_stride
    q = tl.load(query + places + columns[None, :], mask=own[:, None] & sized[None, :], other=0.0)
    if REST:
        q_rest = tl.load(
            query + places + MAIN + rest_columns[None, :], mask=own[:, None] & rest_sized[None, :], other=0.0
        )
    length = tl.load(lengths + sequence)
    if CHUNKED:
        first = (length - 1) // window * window
    else:
        first = tl.maximum(length - window, 0)
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
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
            m_i = tl.load(sinks + heads, mask=own, other=0.0).to(tl.float32)
            l_i += 1.0
        if NEW:
            # Key and value of the new token are written to the cache, and used here from registers. All programs of a
            # key/value head write the same numbers.
            place = sequence * new_key_stride + group * new_key_head_stride
            k = tl.load(new_keys + place + columns, mask=sized, other=0.0)
            slot = tl.load(table + sequence * table_stride + cached // BLOCK) * BLOCK + cached % BLOCK
            key_slot = slot * slot_stride + group * head_stride
            tl.store(keys + key_slot + columns, k, mask=sized)
            qk_new = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1)
            if REST:
                k_rest = tl.load(new_keys + place + MAIN + rest_columns, mask=rest_sized, other=0.0)
                tl.store(keys + key_slot + MAIN + rest_columns, k_rest, mask=rest_sized)
                qk_new += tl.sum(q_rest.to(tl.float32) * k_rest.to(tl.float32)[None, :], axis=1)
                v = k
            else:
                place = sequence * new_value_stride + group * new_value_head_stride
                v = tl.load(new_values + place + value_columns, mask=value_sized, other=0.0)
                value_slot = slot * value_slot_stride + group * value_head_stride
                tl.store(values + value_slot + value_columns, v, mask=value_sized)
            qk_new = qk_new * scale
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
        offsets = slots[:, None] * slot_stride + group * head_stride
        k = tl.load(keys + offsets + columns[None, :], mask=seen[:, None] & sized[None, :], other=0.0)
        if FP8:
            k = k.to(q.dtype)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        if FP8:
            qk = qk * tl.load(key_scales + slots * scale_stride + group, mask=seen, other=0.0)[None, :]
        if REST:
            k_rest = tl.load(
                keys + offsets + MAIN + rest_columns[None, :], mask=seen[:, None] & rest_sized[None, :], other=0.0
            )
            qk = tl.dot(q_rest, tl.trans(k_rest), qk, input_precision="ieee")
            v = k
        else:
            offsets = slots[:, None] * value_slot_stride + group * value_head_stride
            v = tl.load(values + offsets + value_columns[None, :], mask=seen[:, None] & value_sized[None, :], other=0.0)
        qk = qk * scale
        if CAPPED:
            qk = softcap * tanh(qk / softcap)
        qk = tl.where(seen[None, :], qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        weights = p
        if FP8:
            v = v.to(q.dtype)
            weights = p * tl.load(value_scales + slots * scale_stride + group, mask=seen, other=0.0)[None, :]
        acc = acc * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        l_i = l_i * alpha + tl.sum(p, axis=1)
        m_i = m_new
    place = sequence * (tl.num_programs(0) // TILES * SHARED) + heads
    if SPLITS > 1:
        place = place * SPLITS + split
        tl.store(m_parts + place, m_i, mask=own)
        tl.store(l_parts + place, l_i, mask=own)
    else:
        acc = acc / l_i[:, None]
    out_mask = own[:, None] & value_sized[None, :]
    tl.store(out + place[:, None] * VALUE + value_columns[None, :], acc.to(out.dtype.element_ty), mask=out_mask)


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
    chunk: int | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Computes paged decode attention. `new` has the keys (B, G, D) and values (B, G, V) of each sequence's last token
    if they are not cached yet. The kernel writes `new` to the cache. If `values` are the first columns of `keys`
    (latents), the kernel reads them once. With `scales` (slots, G), keys and values are codes in fp8."""
    assert scales is None or (new is None and keys.data_ptr() != values.data_ptr())
    batch, heads, _ = query_BHD.shape
    groups, sizes = keys.shape[1], _sizes(keys, values)
    launch = _launch(sizes, heads // groups)
    programs = groups * -(-(heads // groups) // launch.rows)
    splits = splits or _splits(batch * programs, table_BM.shape[1] * block, query_BHD.device)
    query = _rows(query_BHD)
    new_keys, new_values = (query, query) if new is None else (_rows(part) for part in new)
    out = torch.empty(batch, heads, sizes.value, dtype=query.dtype, device=query.device)
    acc = m_parts = l_parts = out
    if splits > 1:
        acc = torch.empty(batch, heads, splits, sizes.value, dtype=torch.float32, device=query.device)
        m_parts, l_parts = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=query.device)
    _decode[(programs, batch, splits)](
        query,
        keys,
        values,
        new_keys,
        new_values,
        table_BM,
        lengths_B,
        query if sinks_H is None else sinks_H.contiguous(),
        *((query, query) if scales is None else scales),
        acc,
        m_parts,
        l_parts,
        scale,
        1.0 if softcap is None else float(softcap),
        chunk or window or 2**30,
        *query.stride()[:2],
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        table_BM.stride(0),
        0 if scales is None else scales[0].stride(0),
        SHARED=heads // groups,
        ROWS=launch.rows,
        MAIN=sizes.main,
        PADDED=_padded(sizes.main),
        REST=sizes.rest,
        PADDED_REST=_padded(sizes.rest),
        VALUE=sizes.value,
        PADDED_VALUE=_padded(sizes.value),
        BLOCK=block,
        TILE=launch.tile,
        SPLITS=splits,
        CHUNKED=chunk is not None,
        NEW=new is not None,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        FP8=scales is not None,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if splits > 1:
        merged = {"SIZE": sizes.value, "PADDED": _padded(sizes.value), "SPLITS": splits}
        _merge[(batch * heads,)](acc, m_parts, l_parts, out, **merged, num_warps=1)
    return out


class _Sizes(NamedTuple):
    """Numbers of columns. A key has `main` columns, and a latent key has `rest` further columns that are not part of
    the value."""

    main: int
    rest: int
    value: int


def _sizes(keys: torch.Tensor, values: torch.Tensor) -> _Sizes:
    size, value = keys.shape[-1], values.shape[-1]
    if keys.data_ptr() == values.data_ptr() and value < size:
        return _Sizes(value, size - value, value)
    return _Sizes(size, 0, value)


def _launch(sizes: _Sizes, shared: int) -> Launch:
    rows = max(16, triton.next_power_of_2(shared))
    if sizes.rest:
        return LATENTS[0] if rows <= 16 else LATENTS[1] if rows == 32 else LATENTS[2]
    size = max(sizes.main, sizes.value)
    settings = NARROW if size <= 64 else WIDE if size <= 256 else WIDEST
    return settings._replace(rows=rows)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


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
