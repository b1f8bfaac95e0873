"""Rotary position embedding (RoPE) of queries and keys in one Triton kernel.

The plain-torch reference is `plain_rotate`. Like transformers, the kernel rounds x * cos and rotate_half(x) * sin to
their dtype before it adds them. The suffixes of tensor names mean N rows, H query heads, G key heads, T positions and D
head size. cos and sin have shape (N or 1, T, D).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import runs_on


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    source,
    out,
    low_cos,
    high_cos,
    low_sin,
    high_sin,
    head,
    position,
    row,
    stride_row,
    stride_head,
    stride_position,
    width,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PLACES: tl.constexpr,
    BACK: tl.constexpr,
):
    """Applies the rotary embedding to all heads of one token. The output layout is (N, T, heads, D)."""
    half = tl.arange(0, PLACES)
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    places = source + row * stride_row + position * stride_position + head[:, None] * stride_head + half[None, :]
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        first = (low * low_cos).to(out.dtype.element_ty).to(tl.float32)
        first += (high * high_sin).to(out.dtype.element_ty).to(tl.float32)
        second = (high * high_cos).to(out.dtype.element_ty).to(tl.float32)
        second -= (low * low_sin).to(out.dtype.element_ty).to(tl.float32)
    else:
        first = (low * low_cos).to(out.dtype.element_ty).to(tl.float32)
        first -= (high * low_sin).to(out.dtype.element_ty).to(tl.float32)
        second = (high * high_cos).to(out.dtype.element_ty).to(tl.float32)
        second += (low * high_sin).to(out.dtype.element_ty).to(tl.float32)
    target = out + ((row * width + position) * HEADS + head[:, None]) * (2 * HALF) + half[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    out_q,
    out_k,
    width,
    q_row,
    q_head,
    q_position,
    k_row,
    k_head,
    k_position,
    angle_row,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    PLACES: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    BACK: tl.constexpr,
):
    """Each program applies the rotary embedding to the queries and keys of one token."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // width, token % width
    half = tl.arange(0, PLACES)
    angles = row * angle_row + position * (2 * HALF) + half
    low_cos = tl.load(cos + angles, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos + angles + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin + angles, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin + angles + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    heads = tl.arange(0, MANY)
    _turn(q, out_q, low_cos, high_cos, low_sin, high_sin, heads, position, row, q_row, q_head, q_position, width,
          QUERIES, HALF, PLACES, BACK)  # fmt: skip
    heads = tl.arange(0, FEW)
    _turn(k, out_k, low_cos, high_cos, low_sin, high_sin, heads, position, row, k_row, k_head, k_position, width,
          KEYS, HALF, PLACES, BACK)  # fmt: skip


def rotate(
    q_NHTD: torch.Tensor, k_NGTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotated queries and keys as views (N, heads, T, D) of new tensors with memory layout (N, T, heads, D)."""
    turned: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(q_NHTD, k_NGTD, cos, sin)
    return turned


def rotary_fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    if not (runs_on(q) and q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape):
        return False
    rows, _, width, size = q.shape
    same = q.dtype == k.dtype == cos.dtype == sin.dtype and not (cos.requires_grad or sin.requires_grad)
    same_tokens = (rows, width, size) == (k.shape[0], k.shape[2], k.shape[3])
    turned = cos.shape[0] in (1, rows) and cos.shape[1:] == (width, size)
    return same and same_tokens and turned and size % 2 == 0 and q.numel() > 0


def plain_rotate(
    q_NHTD: torch.Tensor, k_NGTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `rotate`."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    return turned(q_NHTD), turned(k_NGTD)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(True)
        return _launch(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_launch(grads[0], grads[1], cos, sin, back=True), None, None


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k))
    rows, queries, width, size = q.shape
    keys = k.shape[1]
    out_q, out_k = (q.new_empty(rows, width, heads, size) for heads in (queries, keys))
    _rotate[(rows * width,)](
        q,
        k,
        cos,
        sin,
        out_q,
        out_k,
        width,
        *q.stride()[:3],
        *k.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        QUERIES=queries,
        KEYS=keys,
        HALF=size // 2,
        PLACES=triton.next_power_of_2(size // 2),
        MANY=triton.next_power_of_2(queries),
        FEW=triton.next_power_of_2(keys),
        BACK=back,
        num_warps=4,
        # Fused multiply-add would skip the rounding of the products before the sum.
        enable_fp_fusion=False,
    )
    return out_q.transpose(1, 2), out_k.transpose(1, 2)
