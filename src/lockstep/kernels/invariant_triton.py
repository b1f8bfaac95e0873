"""Products and attention whose result for a row does not depend on the rows beside it, on an NVIDIA device.

Libraries choose another way to add up for another number of rows, so a token gets other bits in a batch of 256 that
decodes than on a line of 16,384 that trains. These kernels add up in an order that depends on the weight alone, or on
the keys from the first one on: the same token gets the same bits in both. M rows, N outputs, K inputs; T tokens, H
query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Rows of a tile of queries: several tokens with the query heads that share a key head each. One number for lines and
# for single tokens, because the instruction that multiplies depends on it.
QUERY_ROWS, KEY_TILE = 64, 64
# Weights of up to so many outputs are cut into narrower stretches, so that a small batch still fills the device.
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
    """out = x @ weight.T + bias. Programs that share rows stand together, so that these are read once."""
    program = tl.program_id(0)
    across, down = tl.cdiv(outputs, OUTPUTS), tl.cdiv(rows, ROWS)
    group = program // (8 * across)
    tall = tl.minimum(down - group * 8, 8)
    at_row = group * 8 + (program % (8 * across)) % tall
    at_output = (program % (8 * across)) // tall
    row = at_row * ROWS + tl.arange(0, ROWS)
    column = at_output * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, INPUTS)
    # Rows beyond the last repeat one that is there: their results are not stored.
    x_places = x + (row % rows).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_places = weight + (column % outputs).to(tl.int64)[None, :] * weight_stride + inner[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        if EVEN:
            left, right = tl.load(x_places), tl.load(weight_places)
        else:
            left = tl.load(x_places, mask=(start + inner < inputs)[None, :], other=0.0)
            right = tl.load(weight_places, mask=(start + inner < inputs)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_places += INPUTS
        weight_places += INPUTS
    if BIAS:
        total += tl.load(bias + column % outputs).to(tl.float32)[None, :]
    places = row.to(tl.int64)[:, None] * outputs + column[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def product(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias; inputs lie side by side in both."""
    rows, inputs = x_MK.shape
    outputs = len(weight_NK)
    out = torch.empty(rows, outputs, dtype=x_MK.dtype, device=x_MK.device)
    if not out.numel():
        return out
    # By the number of rows only how many share a program: each row's sums are the same in both.
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
    found = tl.load(key + token * key_stride + head * key_head_stride + column, mask=inside)
    tl.store(keys + to, found, mask=inside)
    found = tl.load(value + token * value_stride + head * value_head_stride + column, mask=inside)
    tl.store(values + to, found, mask=inside)


def store(
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Keys and values to their slots, no slot named twice but for rows of nobody. Torch's own way would sort the slots
    first, to be deterministic where one is named twice."""
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
    """Where a sequence's keys and values lie: along a line from `firsts` on, or in the blocks that `table` names."""

    keys: torch.Tensor
    values: torch.Tensor
    firsts: torch.Tensor | None = None
    table: torch.Tensor | None = None
    block: int = 1


class Queries(NamedTuple):
    """`counts` tokens of each sequence from `firsts` of the line on, the last of which stands at `lengths` - 1."""

    rows_THD: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    """Tokens of the longest stretch."""


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
    """A program for a stretch of a sequence's tokens and a key/value head: SHARED query heads of a token stand on
    PLACES rows. Keys are taken from the first one on, a tile at a time; a tile that a row does not see changes
    nothing in it, not a bit."""
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
    here = (token < count) & (rows % PLACES < SHARED)
    inside = here[:, None] & (columns < SIZE)[None, :]
    line = (tl.load(query_firsts + sequence) + token).to(tl.int64)
    asked = tl.load(
        query + line[:, None] * query_stride + head[:, None] * query_head_stride + columns[None, :],
        mask=inside,
        other=0.0,
    )
    length = tl.load(lengths + sequence)
    position = length - count + token
    last = tl.minimum(length - count + first + ROWS // PLACES, length)
    lowest = tl.maximum(length - count + first + 1 - window, 0) // TILE * TILE
    key_first = tl.load(key_firsts + sequence).to(tl.int64)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(lowest, last, TILE):
        at = start + tl.arange(0, TILE)
        if PAGED:
            blocks = tl.load(table + sequence * table_stride + at // BLOCK, mask=at < last, other=0)
            place = blocks.to(tl.int64) * BLOCK + at % BLOCK
        else:
            place = key_first + at
        known = (at < last)[:, None] & (columns < SIZE)[None, :]
        key = tl.load(
            keys + place[:, None] * key_stride + group * key_head_stride + columns[None, :], mask=known, other=0.0
        )
        value = tl.load(
            values + place[:, None] * value_stride + group * value_head_stride + columns[None, :], mask=known, other=0.0
        )
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no largest score to subtract.
        base = tl.where(new == -float("inf"), 0.0, new)
        shares = tl.exp(scores - base[:, None])
        kept = tl.exp(largest - base)
        total = total * kept + tl.sum(shares, axis=1)
        mixed = tl.dot(shares.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
        largest = new
    safe = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / safe[:, None]
    tl.store(
        out + (line[:, None] * (tl.num_programs(2) * SHARED) + head[:, None]) * SIZE + columns[None, :],
        mixed.to(out.dtype.element_ty),
        mask=inside,
    )
    tl.store(logsums + head.to(tl.int64) * tokens + line, largest + tl.log(safe), mask=here)


def attend(queries: Queries, where: KeyPlaces, scale: float, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token to itself and what stands before it in its sequence: the output, and the log of the sum of
    exponentials as (H, T)."""
    query = queries.rows_THD
    tokens, heads, size = query.shape
    groups = where.keys.shape[1]
    shared = heads // groups
    places = triton.next_power_of_2(shared)
    if places > QUERY_ROWS:
        raise ValueError(f"{shared} query heads to a key head: at most {QUERY_ROWS} can be computed row by row")
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
