"""Attention of one query a sequence to its blocks of the cache, on an NVIDIA device.

The plain-torch twin is `gathered_decode` in `paged.py`. B sequences, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import tanh

# Cached tokens read at once by a program.
TILE = 64


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    lengths,
    sinks,
    out,
    scale,
    softcap,
    window,
    query_stride,
    slot_stride,
    head_stride,
    table_stride,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program for a sequence and a key/value head: the SHARED query heads that read it stand as rows of a tile."""
    sequence = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    inside = (rows[:, None] < SHARED) & (columns[None, :] < SIZE)
    heads = group * SHARED + rows
    asked = tl.load(query + sequence * query_stride + heads[:, None] * SIZE + columns[None, :], mask=inside, other=0.0)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    if SINKS:
        # As if a first key had been read: of this logit, and with a value of 0.
        largest = tl.load(sinks + heads, mask=rows < SHARED, other=0.0).to(tl.float32)
        total += 1.0
    for start in range(first // TILE * TILE, length, TILE):
        positions = start + tl.arange(0, TILE)
        seen = (positions < length) & (positions >= first)
        blocks = tl.load(table + sequence * table_stride + positions // BLOCK, mask=seen, other=0)
        slots = blocks * BLOCK + positions % BLOCK
        offsets = slots[:, None] * slot_stride + group * head_stride + columns[None, :]
        wanted = seen[:, None] & (columns[None, :] < SIZE)
        key = tl.load(keys + offsets, mask=wanted, other=0.0)
        logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            logits = softcap * tanh(logits / softcap)
        logits = tl.where(seen[None, :], logits, -float("inf"))
        new = tl.maximum(largest, tl.max(logits, axis=1))
        shrink = tl.exp(largest - new)
        shares = tl.exp(logits - new[:, None])
        value = tl.load(values + offsets, mask=wanted, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(shares, axis=1)
        largest = new
    result = mixed / total[:, None]
    address = out + sequence * query_stride + heads[:, None] * SIZE + columns[None, :]
    tl.store(address, result.to(out.dtype.element_ty), mask=inside)


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
) -> torch.Tensor:
    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    query = query_BHD.contiguous()
    out = torch.empty_like(query)
    shared = heads // groups
    _decode[(batch, groups)](
        query,
        keys,
        values,
        table_BM,
        lengths_B,
        query if sinks_H is None else sinks_H.contiguous(),
        out,
        scale,
        1.0 if softcap is None else float(softcap),
        window or 2**30,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        table_BM.stride(0),
        SHARED=shared,
        ROWS=max(16, triton.next_power_of_2(shared)),
        SIZE=size,
        PADDED=max(16, triton.next_power_of_2(size)),
        BLOCK=block,
        TILE=TILE,
        CAPPED=softcap is not None,
        SINKS=sinks_H is not None,
        num_warps=4,
    )
    return out
