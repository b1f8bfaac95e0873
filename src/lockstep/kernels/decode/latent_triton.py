"""Places queries and latents of multi-head latent attention (MLA) in decoding, in one Triton kernel.

The kernel normalises the latents, applies the rotary embedding to the rotary key and to the rotary parts of all query
heads, writes latent and rotary key to the KV cache, and the rotary queries behind the place of the absorbed queries. It
rounds where the modules of transformers round. The plain-torch reference is `plain_place_latents`. Suffixes: T tokens,
H query heads, N size of a key without its rotary part, P size of the rotary part, R latent size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.norm_triton import RmsNorm, plain_rms_norm, weighted
from lockstep.kernels.rotary_triton import plain_rotate


@triton.jit
def _turned(source, target, cos, sin, mask, half, HALF: tl.constexpr, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotates vectors of size 2 HALF from `source` to `target`. If PAIRED, neighbouring numbers are a pair."""
    kind: tl.constexpr = target.dtype.element_ty
    if PAIRED:
        first = tl.load(source + 2 * half, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + 2 * half + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + half, mask=mask, other=0.0).to(tl.float32)
    low_cos, low_sin = tl.load(cos + half, mask=half < HALF), tl.load(sin + half, mask=half < HALF)
    # Of paired numbers both halves have the angles of the first half.
    shift = 0 if PAIRED else HALF
    high_cos = tl.load(cos + shift + half, mask=half < HALF).to(tl.float32)
    high_sin = tl.load(sin + shift + half, mask=half < HALF).to(tl.float32)
    low_cos, low_sin = low_cos.to(tl.float32), low_sin.to(tl.float32)
    low = (first * low_cos).to(kind).to(tl.float32) - (second * low_sin).to(kind).to(tl.float32)
    high = (second * high_cos).to(kind).to(tl.float32) + (first * high_sin).to(kind).to(tl.float32)
    tl.store(target + half, low.to(kind), mask=mask)
    tl.store(target + HALF + half, high.to(kind), mask=mask)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    query,
    latent,
    cos,
    sin,
    weight,
    slots,
    cache,
    out,
    epsilon,
    query_stride,
    latent_stride,
    slot_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PAIRED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Each Triton program handles one token."""
    kind: tl.constexpr = cache.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64) * slot_stride
    columns = tl.arange(0, PADDED_RANK)
    inside = columns < RANK
    values = tl.load(latent + token * latent_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / RANK + epsilon)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(cache + slot + columns, weighted(values * scale, weights, OFFSET, kind), mask=inside)
    half = tl.arange(0, PADDED_HALF)[None, :]
    angles = token * (2 * HALF)
    row = tl.arange(0, 1)[:, None]
    key = latent + token * latent_stride + RANK + row
    _turned(key, cache + slot + RANK + row, cos + angles, sin + angles, (half < HALF) & (row == 0), half, HALF, PAIRED)
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    source = query + token * query_stride + heads * (NOPE + 2 * HALF) + NOPE
    target = out + (token * HEADS + heads) * (RANK + 2 * HALF) + RANK
    _turned(source, target, cos + angles, sin + angles, (heads < HEADS) & (half < HALF), half, HALF, PAIRED)


def place_latents(
    query_TL: torch.Tensor,
    latent_TL: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    slots_T: torch.Tensor,
    cache: torch.Tensor,
    norm: RmsNorm,
    out_THQ: torch.Tensor,
    paired: bool,
) -> None:
    """Writes the last P columns of each query of `query_TL` (L = H (N + P)), rotated, to the last P columns of
    `out_THQ`. Writes latents and rotary keys of `latent_TL` (L = R + P) to the slots of `cache` (slots, 1, R + P)."""
    tokens, heads, rank = len(query_TL), out_THQ.shape[1], norm.weight_W.shape[0]
    size = cos_TP.shape[1]
    assert query_TL.stride(1) == latent_TL.stride(1) == 1
    assert cos_TP.is_contiguous()
    assert sin_TP.is_contiguous()
    assert cache.shape[2] == latent_TL.shape[1] == out_THQ.shape[2] == rank + size
    assert out_THQ.is_contiguous()
    _place[(tokens,)](
        query_TL,
        latent_TL,
        cos_TP,
        sin_TP,
        norm.weight_W,
        slots_T,
        cache,
        out_THQ,
        norm.epsilon,
        query_TL.stride(0),
        latent_TL.stride(0),
        cache.stride(0),
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        NOPE=query_TL.shape[1] // heads - size,
        HALF=size // 2,
        PADDED_HALF=triton.next_power_of_2(size // 2),
        RANK=rank,
        PADDED_RANK=triton.next_power_of_2(rank),
        PAIRED=paired,
        OFFSET=norm.unit_offset,
        num_warps=4,
        # transformers rounds the products, and a fused multiply-add would skip this rounding.
        enable_fp_fusion=False,
    )


def plain_place_latents(
    query_TL: torch.Tensor,
    latent_TL: torch.Tensor,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    slots_T: torch.Tensor,
    cache: torch.Tensor,
    norm: RmsNorm,
    out_THQ: torch.Tensor,
    paired: bool,
) -> None:
    """Reference implementation of `place_latents`."""
    rank, size = norm.weight_W.shape[0], cos_TP.shape[1]
    query = query_TL.unflatten(1, (out_THQ.shape[1], -1))[..., -size:]
    key = latent_TL[:, None, rank:]
    cos, sin = cos_TP, sin_TP
    if paired:
        query, key = (torch.cat((part[..., ::2], part[..., 1::2]), -1) for part in (query, key))
        cos, sin = (part[:, : size // 2].repeat(1, 2) for part in (cos, sin))
    q, k = plain_rotate(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    out_THQ[..., rank:] = q[0].transpose(0, 1)
    cache[slots_T, 0, :rank] = plain_rms_norm(latent_TL[:, :rank], *norm)
    cache[slots_T, 0, rank:] = k[0, 0]
