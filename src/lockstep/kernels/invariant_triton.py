"""Batch-invariant matmul and attention in Triton: the result for a row does not depend on the other rows.

In the usual libraries the reduction order depends on the number of rows. So a token in a decode batch of 256 rows can
get a different result than in a packed row of 16,384 tokens. The reduction order of these kernels depends only on the
weight's shape or, in attention, on the position of the keys. Tensor names end with their dimensions, which are M rows,
N outputs, K inputs, T tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# QUERY_ROWS is the number of rows of a query tile: several tokens times the query heads that share a key head. Training
# and decoding use the same tile size, because the tile size determines the matmul instruction.
QUERY_ROWS, KEY_TILE = 64, 64
# Weights with up to NARROW outputs use narrower tiles, so that a small batch still occupies the whole device.
NARROW = 2048
INNER = 64


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Computes out = x @ weight.T + bias. Triton programs that use the same rows of x are launched together, so that
    these rows are read once."""
    program = tl.program_id(0)
    across, down = tl.cdiv(outputs, OUTPUTS), tl.cdiv(rows, ROWS)
    group = program // (8 * across)
    tall = tl.minimum(down - group * 8, 8)
    at_row = group * 8 + (program % (8 * across)) % tall
    at_output = (program % (8 * across)) // tall
    row = at_row * ROWS + tl.arange(0, ROWS)
    column = at_output * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, INPUTS)
    # Rows beyond the last one of x read an existing row instead; their results are not stored.
    x_places = x + (row % rows).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_places = weight + (column % outputs).to(tl.int64)[None, :] * weight_stride + inner[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        if EVEN:
            x_tile, w_tile = tl.load(x_places), tl.load(weight_places)
        else:
            x_tile = tl.load(x_places, mask=(start + inner < inputs)[None, :], other=0.0)
            w_tile = tl.load(weight_places, mask=(start + inner < inputs)[:, None], other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        x_places += INPUTS
        weight_places += INPUTS
    if BIAS:
        acc += tl.load(bias + column % outputs).to(tl.float32)[None, :]
    places = row.to(tl.int64)[:, None] * outputs + column[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


def product(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Returns x @ weight.T + bias; both operands must be contiguous in their last dimension."""
    rows, inputs = x_MK.shape
    outputs = len(weight_NK)
    out = torch.empty(rows, outputs, dtype=x_MK.dtype, device=x_MK.device)
    if not out.numel():
        return out
    # The number of rows of x changes only how many rows one program computes. The summation order within a row is the
    # same.
    tall, warps = (64, 4) if rows <= 512 else (128, 8)
    wide = 64 if outputs <= NARROW else 128
    _product[(triton.cdiv(rows, tall) * triton.cdiv(outputs, wide),)](
        x_MK,
        weight_NK,
        bias_N if bias_N is not None else weight_NK,
        out,
        rows,
        outputs,
        inputs,
        x_MK.stride(0),
        weight_NK.stride(0),
        ROWS=tall,
        OUTPUTS=wide,
        INPUTS=INNER,
        EVEN=inputs % INNER == 0,
        BIAS=bias_N is not None,
        num_warps=warps,
        num_stages=4,
    )
    return out


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    inside = numbers < HEADS * SIZE
    head, column = numbers // SIZE, numbers % SIZE
    to = slot * HEADS * SIZE + numbers
    part = tl.load(key + token * key_stride + head * key_head_stride + column, mask=inside)
    tl.store(keys + to, part, mask=inside)
    part = tl.load(value + token * value_stride + head * value_head_stride + column, mask=inside)
    tl.store(values + to, part, mask=inside)


def store(
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Writes keys and values to their slots of the KV cache. Only padding rows are written to the same slot, so the
    order of the writes does not matter. Torch's deterministic index_put would sort the slots first."""
    tokens, heads, size = key_TGD.shape
    _store[(tokens,)](
        key_TGD,
        value_TGD,
        keys,
        values,
        slots_T,
        *key_TGD.stride()[:2],
        *value_TGD.stride()[:2],
        HEADS=heads,
        SIZE=size,
        PADDED=triton.next_power_of_2(heads * size),
    )


class KeyPlaces(NamedTuple):
    """Says where the keys and values of a sequence are stored. Packed keys of sequence i start at index `firsts[i]`.
    Paged keys are in the cache blocks that `table` lists."""

    keys: torch.Tensor
    values: torch.Tensor
    firsts: torch.Tensor | None = None
    table: torch.Tensor | None = None
    block: int = 1


class Queries(NamedTuple):
    """Packed queries. Sequence i has `counts[i]` query tokens, which start at index `firsts[i]`. The last query token
    of sequence i has position `lengths[i]` - 1."""

    rows_THD: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    """The largest number of query tokens of a sequence."""


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    out,
    logsums,
    query_firsts,
    counts,
    lengths,
    key_firsts,
    table,
    scale,
    window,
    tokens,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Each program computes the attention of some consecutive tokens of a sequence for one key/value head. The SHARED
    query heads of a token are padded to PLACES rows of the query tile. Keys are read tile by tile, in ascending order.
    A tile of keys that is fully masked for a query row does not change the result of that row."""
    sequence = tl.program_id(1)
    group = tl.program_id(2)
    count = tl.load(counts + sequence)
    first = tl.program_id(0) * (ROWS // PLACES)
    if first >= count:
        return
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    token = first + rows // PLACES
    head = group * SHARED + rows % PLACES
    row_mask = (token < count) & (rows % PLACES < SHARED)
    inside = row_mask[:, None] & (columns < SIZE)[None, :]
    index = (tl.load(query_firsts + sequence) + token).to(tl.int64)
    q = tl.load(
        query + index[:, None] * query_stride + head[:, None] * query_head_stride + columns[None, :],
        mask=inside,
        other=0.0,
    )
    length = tl.load(lengths + sequence)
    position = length - count + token
    last = tl.minimum(length - count + first + ROWS // PLACES, length)
    lowest = tl.maximum(length - count + first + 1 - window, 0) // TILE * TILE
    key_first = tl.load(key_firsts + sequence).to(tl.int64)
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(lowest, last, TILE):
        at = start + tl.arange(0, TILE)
        if PAGED:
            blocks = tl.load(table + sequence * table_stride + at // BLOCK, mask=at < last, other=0)
            place = blocks.to(tl.int64) * BLOCK + at % BLOCK
        else:
            place = key_first + at
        kv_mask = (at < last)[:, None] & (columns < SIZE)[None, :]
        k = tl.load(
            keys + place[:, None] * key_stride + group * key_head_stride + columns[None, :], mask=kv_mask, other=0.0
        )
        v = tl.load(
            values + place[:, None] * value_stride + group * value_head_stride + columns[None, :],
            mask=kv_mask,
            other=0.0,
        )
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
        qk = tl.where(seen, qk, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, axis=1))
        # A query row that has not attended to any key yet has a maximum of -inf, which must not be subtracted.
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp(qk - m_safe[:, None])
        alpha = tl.exp(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / l_safe[:, None]
    tl.store(
        out + (index[:, None] * (tl.num_programs(2) * SHARED) + head[:, None]) * SIZE + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside,
    )
    tl.store(logsums + head.to(tl.int64) * tokens + index, m_i + tl.log(l_safe), mask=row_mask)


def attend(queries: Queries, where: KeyPlaces, scale: float, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes causal attention of every token within its sequence. Returns the output and the log-sum-exp of each row
    as (H, T)."""
    query = queries.rows_THD
    tokens, heads, size = query.shape
    groups = where.keys.shape[1]
    shared = heads // groups
    places = triton.next_power_of_2(shared)
    if places > QUERY_ROWS:
        raise ValueError(f"{shared} query heads per key head: batch-invariant attention supports at most {QUERY_ROWS}")
    out = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    logsums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    paged = where.table is not None
    sequences = len(queries.counts)
    if not sequences:
        return out, logsums
    _attend[(triton.cdiv(queries.longest, QUERY_ROWS // places), sequences, groups)](
        query,
        where.keys,
        where.values,
        out,
        logsums,
        queries.firsts,
        queries.counts,
        queries.lengths,
        where.firsts if where.firsts is not None else queries.firsts,
        where.table if where.table is not None else queries.firsts,
        scale,
        window or 2**30,
        tokens,
        query.stride(0),
        query.stride(1),
        where.keys.stride(0),
        where.keys.stride(1),
        where.values.stride(0),
        where.values.stride(1),
        where.table.stride(0) if where.table is not None else 0,
        SHARED=shared,
        PLACES=places,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        BLOCK=where.block,
        ROWS=QUERY_ROWS,
        TILE=KEY_TILE,
        PAGED=paged,
        num_warps=4,
        num_stages=2,
    )
    return out, logsums
