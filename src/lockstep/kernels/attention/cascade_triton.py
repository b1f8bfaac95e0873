"""The two parts of an attention over shared beginnings put together on an NVIDIA device, in one pass over their rows.

The plain-torch twins are `merge_` and `add_rows_` in `cascade.py`. T tokens of the line, R rows, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out,
    lse,
    rows,
    more,
    more_lse,
    out_row,
    out_head,
    lse_head,
    more_row,
    more_head,
    more_lse_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, all of its heads."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    heads, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCK)
    there = heads < HEADS
    inside = there[:, None] & (columns < SIZE)[None, :]
    one = tl.load(lse + heads.to(tl.int64) * lse_head + row, mask=there, other=0.0)
    other = tl.load(more_lse + heads.to(tl.int64) * more_lse_head + at, mask=there, other=0.0)
    largest = tl.maximum(one, other)
    both = largest + tl.log(tl.exp(one - largest) + tl.exp(other - largest))
    places = out + row * out_row + heads[:, None].to(tl.int64) * out_head + columns[None, :]
    added = more + at * more_row + heads[:, None].to(tl.int64) * more_head + columns[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32) * tl.exp(one - both)[:, None]
    second = tl.load(added, mask=inside, other=0.0).to(tl.float32) * tl.exp(other - both)[:, None]
    tl.store(places, (first + second).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + heads.to(tl.int64) * lse_head + row, both, mask=there)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    total,
    rows,
    more,
    total_row,
    total_head,
    more_row,
    more_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    heads, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    places = total + row * total_row + heads[:, None].to(tl.int64) * total_head + columns[None, :]
    added = more + at * more_row + heads[:, None].to(tl.int64) * more_head + columns[None, :]
    found = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, found.to(total.dtype.element_ty), mask=inside)


def merge_(
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    rows_R: torch.Tensor,
    more_RHD: torch.Tensor,
    more_lse_HR: torch.Tensor,
) -> None:
    assert out_THD.stride(-1) == more_RHD.stride(-1) == lse_HT.stride(-1) == more_lse_HR.stride(-1) == 1
    _merge[(len(rows_R),)](
        out_THD,
        lse_HT,
        rows_R,
        more_RHD,
        more_lse_HR,
        out_THD.stride(0),
        out_THD.stride(1),
        lse_HT.stride(0),
        more_RHD.stride(0),
        more_RHD.stride(1),
        more_lse_HR.stride(0),
        **_tile(out_THD),
    )


def add_rows_(total_THD: torch.Tensor, rows_R: torch.Tensor, more_RHD: torch.Tensor) -> None:
    assert total_THD.stride(-1) == more_RHD.stride(-1) == 1
    _add[(len(rows_R),)](
        total_THD,
        rows_R,
        more_RHD,
        total_THD.stride(0),
        total_THD.stride(1),
        more_RHD.stride(0),
        more_RHD.stride(1),
        **_tile(total_THD),
    )


def _tile(tensor_THD: torch.Tensor) -> dict[str, int]:
    _, heads, size = tensor_THD.shape
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(size)
    warps = 4 if blocks[0] * blocks[1] >= 512 else 1
    return {"HEADS": heads, "SIZE": size, "HEAD_BLOCK": blocks[0], "BLOCK": blocks[1], "num_warps": warps}
