"""Triton kernels for the operations between the matmuls of a decoder layer, for generation (no backward pass).

The outputs of the kernels overwrite their inputs. Each kernel rounds at the same points as the modules of transformers.
The plain-torch references are in this file too. Tensor names end with their dimensions, which are T tokens, H query
heads, G key/value heads, D head size, W model width, I feed-forward width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.kernels.norm_triton import plain_rms_norm
from lockstep.kernels.rotary_triton import plain_rotate

# Number of elements of a row that one Triton program handles.
BLOCK_N = 1024


@triton.jit
def _add_norm(stream, more, weight, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Implements `add_norm_`. Each Triton program handles one token."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    values = tl.load(stream + places, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(more + places, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(stream.dtype.element_ty)
    tl.store(stream + places, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + epsilon)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, (normed * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(low, high, weight, epsilon, half, HALF: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes the RMSNorm of attention heads. The two halves of each head are given as separate tensors."""
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
    low_weight = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    low = ((low * scale).to(KIND).to(tl.float32) * low_weight).to(KIND).to(tl.float32)
    high = ((high * scale).to(KIND).to(tl.float32) * high_weight).to(KIND).to(tl.float32)
    return low, high


@triton.jit
def _turned(low, high, low_cos, high_cos, low_sin, high_sin, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    first = (low * low_cos).to(KIND).to(tl.float32) - (high * low_sin).to(KIND).to(tl.float32)
    second = (high * high_cos).to(KIND).to(tl.float32) + (low * high_sin).to(KIND).to(tl.float32)
    return first.to(KIND), second.to(KIND)


@triton.jit
def _place_heads(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    slots,
    keys,
    values,
    query_epsilon,
    key_epsilon,
    slot_stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    PLACES: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Implements `place_heads_`. Each Triton program handles one token."""
    kind: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, PLACES)
    angles = token * (2 * HALF) + half
    low_cos = tl.load(cos + angles, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos + angles + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin + angles, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin + angles + HALF, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slots + token).to(tl.int64) * slot_stride
    start = qkv + token * ((QUERIES + 2 * KEYS) * 2 * HALF)

    heads = tl.arange(0, MANY)
    inside = (heads < QUERIES)[:, None] & (half < HALF)[None, :]
    places = start + heads[:, None] * (2 * HALF) + half[None, :]
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        low, high = _normed(low, high, query_weight, query_epsilon, half, HALF, kind)
    first, second = _turned(low, high, low_cos, high_cos, low_sin, high_sin, kind)
    tl.store(places, first, mask=inside)
    tl.store(places + HALF, second, mask=inside)

    heads = tl.arange(0, FEW)
    inside = (heads < KEYS)[:, None] & (half < HALF)[None, :]
    across = heads[:, None] * (2 * HALF) + half[None, :]
    places = start + QUERIES * 2 * HALF + across
    low = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        low, high = _normed(low, high, key_weight, key_epsilon, half, HALF, kind)
    first, second = _turned(low, high, low_cos, high_cos, low_sin, high_sin, kind)
    tl.store(places, first, mask=inside)
    tl.store(places + HALF, second, mask=inside)
    tl.store(keys + slot + across, first, mask=inside)
    tl.store(keys + slot + across + HALF, second, mask=inside)

    places += KEYS * 2 * HALF
    tl.store(values + slot + across, tl.load(places, mask=inside), mask=inside)
    tl.store(values + slot + across + HALF, tl.load(places + HALF, mask=inside), mask=inside)


@triton.jit
def _swiglu(gate_up, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < WIDTH
    places = gate_up + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(places, (silu * up).to(gate_up.dtype.element_ty), mask=inside)


def add_norm_(stream_TW: torch.Tensor, more_TW: torch.Tensor, weight_W: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Adds `more_TW` to the residual stream in place. Returns the RMSNorm of the sum."""
    tokens, width = stream_TW.shape
    out = torch.empty_like(stream_TW)
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // 256))
    _add_norm[(tokens,)](stream_TW, more_TW, weight_W, out, epsilon, WIDTH=width, BLOCK=block, num_warps=warps)
    return out


def plain_add_norm_(
    stream_TW: torch.Tensor, more_TW: torch.Tensor, weight_W: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Reference implementation of `add_norm_`."""
    return plain_rms_norm(stream_TW.add_(more_TW), weight_W, epsilon)


Norms = tuple[torch.Tensor, float, torch.Tensor, float]
"""Weight and epsilon of the query norm and of the key norm."""


def place_heads_(
    line_TL: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    slots_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: int,
    norms: Norms | None = None,
) -> None:
    """Applies the optional head norms and the rotary embedding to queries and keys in place. Writes keys and values to
    their slots in a layer's KV cache (slots, G, D). `line_TL` is the concatenated QKV of each token (L = (H + 2 G)
    D)."""
    tokens = len(line_TL)
    _, groups, size = keys.shape
    assert all(tensor.is_contiguous() for tensor in (line_TL, cos_TD, sin_TD))
    assert line_TL.shape[1] == (queries + 2 * groups) * size
    assert cos_TD.shape == sin_TD.shape == (tokens, size)
    assert keys.stride() == values.stride() == (groups * size, size, 1)
    query_weight, query_epsilon, key_weight, key_epsilon = norms or (line_TL, 0.0, line_TL, 0.0)
    _place_heads[(tokens,)](
        line_TL,
        cos_TD,
        sin_TD,
        query_weight,
        key_weight,
        slots_T,
        keys,
        values,
        query_epsilon,
        key_epsilon,
        keys.stride(0),
        QUERIES=queries,
        KEYS=groups,
        HALF=size // 2,
        PLACES=triton.next_power_of_2(size // 2),
        MANY=triton.next_power_of_2(queries),
        FEW=triton.next_power_of_2(groups),
        NORMED=norms is not None,
        num_warps=4,
        # transformers rounds the products, and a fused multiply-add would skip this rounding.
        enable_fp_fusion=False,
    )


def plain_place_heads_(
    line_TL: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    slots_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: int,
    norms: Norms | None = None,
) -> None:
    """Reference implementation of `place_heads_`."""
    query, key, value = heads_of_line(line_TL, queries, keys.shape[1])
    q, k = query, key
    if norms is not None:
        q, k = plain_rms_norm(query, *norms[:2]), plain_rms_norm(key, *norms[2:])
    q, k = plain_rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos_TD[None], sin_TD[None])
    query.copy_(q[0].transpose(0, 1))
    key.copy_(k[0].transpose(0, 1))
    keys.index_copy_(0, slots_T, key)
    values.index_copy_(0, slots_T, value)


def heads_of_line(line_TL: torch.Tensor, queries: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of the queries (T, H, D), keys and values (T, G, D) in the concatenated QKV."""
    heads = line_TL.unflatten(1, (queries + 2 * groups, -1))
    query, key, value = heads.split([queries, groups, groups], 1)
    return query, key, value


def swiglu_(line_TL: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up for the concatenated gate and up projections (L = 2 I), and writes the result over the
    gate."""
    tokens, width = len(line_TL), line_TL.shape[1] // 2
    assert line_TL.is_contiguous()
    _swiglu[(tokens, triton.cdiv(width, BLOCK_N))](line_TL, WIDTH=width, BLOCK_N=BLOCK_N, num_warps=4)
    return line_TL[:, :width]


def plain_swiglu_(line_TL: torch.Tensor) -> torch.Tensor:
    """Reference implementation of `swiglu_`."""
    gate, up = line_TL.chunk(2, 1)
    return gate.copy_(torch.nn.functional.silu(gate) * up)
