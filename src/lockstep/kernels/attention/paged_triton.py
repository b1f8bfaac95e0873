"""Attention of one query a sequence to its blocks of the cache, on an NVIDIA device.

The plain-torch twin is `gathered_decode` in `paged.py`. B sequences, H query heads, G key/value heads, D head size, S
splits of a sequence.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import tanh


class Launch(NamedTuple):
    """Of a program: cached tokens that it reads at once, its warps, and how many such reads are under way, with the one
    that is computed with."""

    tile: int
    warps: int
    stages: int


# For heads of up to 64, and for wider ones. Reads of like size: more of them do not fit beside those of other programs.
NARROW, WIDE = Launch(64, 2, 3), Launch(32, 4, 3)
# Programs that keep a multiprocessor busy. Where there are fewer, sequences are split among several, but not into
# pieces of fewer tokens than pay for putting them together again.
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
    peaks,
    totals,
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
    """One program for a sequence and a key/value head: the SHARED query heads that read it stand as rows of a tile.

    With SPLITS a program reads a piece of the sequence, and `_merge` puts the pieces together.
    """
    # Heads of one token lie side by side, and samples of one prompt beside each other: both are read at the same time.
    group = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    sized = columns < SIZE
    inside = (rows[:, None] < SHARED) & sized[None, :]
    heads = group * SHARED + rows
    places = sequence * query_stride + heads[:, None] * query_head_stride + columns[None, :]
    asked = tl.load(query + places, mask=inside, other=0.0)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
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
            # As if a first key had been read: of this logit, and with a value of 0.
            largest = tl.load(sinks + heads, mask=rows < SHARED, other=0.0).to(tl.float32)
            total += 1.0
        if NEW:
            # The token that is fed: its key and value go to the cache, and are read from where they are.
            place = sequence * new_key_stride + group * new_key_head_stride + columns
            key = tl.load(new_keys + place, mask=sized, other=0.0)
            place = sequence * new_value_stride + group * new_value_head_stride + columns
            value = tl.load(new_values + place, mask=sized, other=0.0)
            slot = tl.load(table + sequence * table_stride + cached // BLOCK) * BLOCK + cached % BLOCK
            slot = slot * slot_stride + group * head_stride
            tl.store(keys + slot + columns, key, mask=sized)
            tl.store(values + slot + columns, value, mask=sized)
            logit = tl.sum(asked.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
            if CAPPED:
                logit = softcap * tanh(logit / softcap)
            new = tl.maximum(largest, logit)
            part = tl.exp(logit - new)
            total = total * tl.exp(largest - new) + part
            mixed = part[:, None] * value.to(tl.float32)[None, :]
            largest = new
    # The next tile's part of the table is read a tile ahead: keys and values are then loaded several tiles ahead, which
    # the compiler does not do for loads that wait for another one.
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
        wanted = seen[:, None] & sized[None, :]
        key = tl.load(keys + offsets, mask=wanted, other=0.0)
        value = tl.load(values + offsets, mask=wanted, other=0.0)
        logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            logits = softcap * tanh(logits / softcap)
        logits = tl.where(seen[None, :], logits, -float("inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1))
        shrink = tl.exp(largest - new)
        shares = tl.exp(logits - new[:, None])
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(shares, axis=1)
        largest = new
    place = sequence * tl.num_programs(0) * SHARED + heads
    if SPLITS > 1:
        place = place * SPLITS + split
        tl.store(peaks + place, largest, mask=rows < SHARED)
        tl.store(totals + place, total, mask=rows < SHARED)
    else:
        mixed = mixed / total[:, None]
    tl.store(out + place[:, None] * SIZE + columns[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    mixed, peaks, totals, out, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """A head of a sequence from its pieces; a piece of no tokens has a peak of -inf."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, PADDED)
    peak = tl.load(peaks + row * SPLITS + splits)
    weight = tl.exp(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(totals + row * SPLITS + splits), axis=0)
    places = (row * SPLITS + splits)[:, None] * SIZE + columns[None, :]
    pieces = tl.load(mixed + places, mask=columns[None, :] < SIZE, other=0.0)
    result = tl.sum(weight[:, None] * pieces, axis=0) / total
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
    """`new` are the keys and values (B, G, D) of each sequence's last token, where the cache does not hold them yet:
    they are written to it."""
    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    shared = heads // groups
    splits = splits or _splits(batch * groups, table_BM.shape[1] * block, query_BHD.device)
    query = query_BHD if query_BHD.stride(2) == 1 else query_BHD.contiguous()
    new_keys, new_values = (query, query) if new is None else (_rows(part) for part in new)
    out = torch.empty(batch, heads, size, dtype=query.dtype, device=query.device)
    mixed = peaks = totals = out
    if splits > 1:
        mixed = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=query.device)
        peaks, totals = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=query.device)
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
        mixed,
        peaks,
        totals,
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
        _merge[(batch * heads,)](mixed, peaks, totals, out, SIZE=size, PADDED=padded, SPLITS=splits, num_warps=1)
    return out


def _rows(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(2) == 1 else part.contiguous()


def _splits(programs: int, longest: int, device: torch.device) -> int:
    """Into how many pieces a sequence is cut. By the size of the batch and of its tables alone: recorded passes keep
    their shape."""
    wanted = BUSY * _processors(device) // programs
    return max(1, min(MOST_SPLITS, _power_below(wanted), _power_below(longest // PIECE)))


def _power_below(count: int) -> int:
    return 1 << max(0, count.bit_length() - 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
