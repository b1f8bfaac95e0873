"""Cascade attention in Triton: merges the attention over a shared prefix with the attention over the other keys.

The plain-torch references are `merge_` and `add_rows_` in `flash.py`. Tensor names end with their dimensions, which are
T tokens, R rows to merge, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out,
    lse,
    merged_lse,
    rows,
    more,
    more_lse,
    out_row,
    out_head,
    lse_head,
    merged_lse_head,
    more_row,
    more_head,
    more_lse_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merges all heads of one row (token). Each Triton program handles one row.

    Every warp of a program loads the lse of all heads, and the warps do not wait for each other. So `lse` and
    `merged_lse` must be different tensors: in place, a slow warp would load values that a fast warp has merged already.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + pid)
    heads, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCK)
    head_mask = heads < HEADS
    mask = head_mask[:, None] & (columns < SIZE)[None, :]
    lse_a = tl.load(lse + heads.to(tl.int64) * lse_head + row, mask=head_mask, other=0.0)
    lse_b = tl.load(more_lse + heads.to(tl.int64) * more_lse_head + pid, mask=head_mask, other=0.0)
    m_i = tl.maximum(lse_a, lse_b)
    lse_new = m_i + tl.log(tl.exp(lse_a - m_i) + tl.exp(lse_b - m_i))
    out_ptrs = out + row * out_row + heads[:, None].to(tl.int64) * out_head + columns[None, :]
    more_ptrs = more + pid * more_row + heads[:, None].to(tl.int64) * more_head + columns[None, :]
    acc_a = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(lse_a - lse_new)[:, None]
    acc_b = tl.load(more_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.exp(lse_b - lse_new)[:, None]
    tl.store(out_ptrs, (acc_a + acc_b).to(out.dtype.element_ty), mask=mask)
    tl.store(merged_lse + heads.to(tl.int64) * merged_lse_head + row, lse_new, mask=head_mask)


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
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + pid)
    heads, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCK)
    mask = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    total_ptrs = total + row * total_row + heads[:, None].to(tl.int64) * total_head + columns[None, :]
    more_ptrs = more + pid * more_row + heads[:, None].to(tl.int64) * more_head + columns[None, :]
    acc = tl.load(total_ptrs, mask=mask, other=0.0).to(tl.float32)
    acc += tl.load(more_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_ptrs, acc.to(total.dtype.element_ty), mask=mask)


def merge_(
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor,
    rows_R: torch.Tensor,
    more_RHD: torch.Tensor,
    more_lse_HR: torch.Tensor,
) -> None:
    assert out_THD.stride(-1) == more_RHD.stride(-1) == lse_HT.stride(-1) == more_lse_HR.stride(-1) == 1
    lse_before_HT = lse_HT.clone(memory_format=torch.contiguous_format)
    _merge[(len(rows_R),)](
        out_THD,
        lse_before_HT,
        lse_HT,
        rows_R,
        more_RHD,
        more_lse_HR,
        out_THD.stride(0),
        out_THD.stride(1),
        lse_before_HT.stride(0),
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
