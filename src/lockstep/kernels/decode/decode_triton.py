"""Triton kernels for the operations between the matmuls of a decoder layer, for generation (no backward pass).

The outputs of the kernels overwrite their inputs. Each kernel rounds at the same points as the modules of transformers.
The plain-torch references are in this file too. Tensor names end with their dimensions, which are T tokens, H query
heads, G key/value heads, D head size, W model width, I feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.norm_triton import RmsNorm, plain_rms_norm, weighted
from lockstep.kernels.quantized.token_codes_triton import coded, magnitude_bits, native, row_scale, stored
from lockstep.kernels.quantized.token_products import CODES, LARGEST, SMALLEST_SCALE, TokenCodes
from lockstep.kernels.rotary_triton import plain_rotate
from lockstep.kernels.swiglu_triton import activated, plain_swiglu

# Number of elements of a row that one Triton program handles.
BLOCK_N = 1024
# The widest row of act(gate) * up that one program keeps in registers.
WIDEST_CODED = 32768


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    stream,
    more,
    weight,
    post_weight,
    out,
    scales,
    epsilon,
    post_epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    POST: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Implements `add_norm_`, and `add_norm_codes_` if there are scales. Each Triton program handles one token."""
    kind: tl.constexpr = stream.dtype.element_ty
    # A thread has the 16 bytes that it loads at once. Without the hint, it would have 16 codes that it stores at once,
    # so the sums would have another order than without codes, and other bits.
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 128 // kind.primitive_bitwidth)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    added = tl.load(more + places, mask=inside, other=0.0).to(tl.float32)
    if POST:
        scale = tl.rsqrt(tl.sum(added * added, axis=0) / WIDTH + post_epsilon)
        weights = tl.load(post_weight + columns, mask=inside, other=0.0).to(tl.float32)
        added = weighted(added * scale, weights, OFFSET, kind).to(tl.float32)
    rounded = (tl.load(stream + places, mask=inside, other=0.0).to(tl.float32) + added).to(kind)
    tl.store(stream + places, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + epsilon)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = weighted(values * scale, weights, OFFSET, kind)
    if scales is None:
        tl.store(out + places, normed, mask=inside)
    else:
        scale = row_scale(tl.max(magnitude_bits(normed), axis=0), LARGEST, SMALLEST)
        codes = coded(normed, tl.div_rn(1.0, scale), LARGEST, out.dtype.element_ty == tl.int8, NATIVE)
        tl.store(out + places, codes, mask=inside)
        tl.store(scales + tl.program_id(0), scale)


@triton.jit
def _normed(low, high, weight, epsilon, half, HALF: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes the RMSNorm of attention heads. The two halves of each head are given as separate tensors."""
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
    low_weight = tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    low = weighted(low * scale, low_weight, OFFSET, KIND).to(tl.float32)
    high = weighted(high * scale, high_weight, OFFSET, KIND).to(tl.float32)
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
    OFFSET: tl.constexpr,
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
        low, high = _normed(low, high, query_weight, query_epsilon, half, HALF, OFFSET, kind)
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
        low, high = _normed(low, high, key_weight, key_epsilon, half, HALF, OFFSET, kind)
    first, second = _turned(low, high, low_cos, high_cos, low_sin, high_sin, kind)
    tl.store(places, first, mask=inside)
    tl.store(places + HALF, second, mask=inside)
    tl.store(keys + slot + across, first, mask=inside)
    tl.store(keys + slot + across + HALF, second, mask=inside)

    places += KEYS * 2 * HALF
    tl.store(values + slot + across, tl.load(places, mask=inside), mask=inside)
    tl.store(values + slot + across + HALF, tl.load(places + HALF, mask=inside), mask=inside)


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    act = activated(gate.to(tl.float32), GELU).to(gate.dtype).to(tl.float32)
    return (act * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _swiglu(gate_up, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < WIDTH
    places = gate_up + tl.program_id(0).to(tl.int64) * (2 * WIDTH) + columns
    gate = tl.load(places, mask=inside, other=0.0)
    up = tl.load(places + WIDTH, mask=inside, other=0.0)
    tl.store(places, _gated(gate, up, GELU), mask=inside)


@triton.jit
def _swiglu_codes(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    scales,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Implements `swiglu_codes`. Each Triton program keeps the row of one token in registers, so that it reads the row
    and computes the activation once. The row is in two blocks, because one block would have up to twice its width."""
    INT8: tl.constexpr = out.dtype.element_ty == tl.int8
    token = tl.program_id(0).to(tl.int64)
    places = gate_up + token * (2 * WIDTH)
    head, tail = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    inside = tail < WIDTH
    gate, up = tl.load(places + tail, mask=inside, other=0.0), tl.load(places + WIDTH + tail, mask=inside, other=0.0)
    last = _gated(gate, up, GELU)
    first = _gated(tl.load(places + head), tl.load(places + WIDTH + head), GELU)
    largest = tl.maximum(tl.max(magnitude_bits(first), axis=0), tl.max(magnitude_bits(last), axis=0))
    scale = row_scale(largest, LARGEST, SMALLEST)
    factor = tl.div_rn(1.0, scale)
    tl.store(out + token * WIDTH + head, coded(first, factor, LARGEST, INT8, NATIVE))
    tl.store(out + token * WIDTH + tail, coded(last, factor, LARGEST, INT8, NATIVE), mask=inside)
    tl.store(scales + token, scale)


def add_norm_(
    stream_TW: torch.Tensor, more_TW: torch.Tensor, norm: RmsNorm, post: RmsNorm | None = None
) -> torch.Tensor:
    """Adds `more_TW`, normalised by the norm `post` if there is one, to the residual stream in place. Returns the
    RMSNorm of the sum."""
    out = torch.empty_like(stream_TW)
    _launch_add_norm(stream_TW, more_TW, norm, post, out=out, scales=None, LARGEST=0.0, SMALLEST=0.0, NATIVE=False)
    return out


def add_norm_codes_(
    stream_TW: torch.Tensor, more_TW: torch.Tensor, norm: RmsNorm, post: RmsNorm | None, format: str
) -> TokenCodes:
    """Returns the `token_codes` of the result of `add_norm_`."""
    made, arguments = _codes_memory(stream_TW, len(stream_TW), stream_TW.shape[1], format)
    _launch_add_norm(stream_TW, more_TW, norm, post, **arguments)
    return made


def _launch_add_norm(
    stream_TW: torch.Tensor, more_TW: torch.Tensor, norm: RmsNorm, post: RmsNorm | None, **output: Any
) -> None:
    tokens, width = stream_TW.shape
    assert more_TW.is_contiguous()
    assert stream_TW.is_contiguous()
    block = triton.next_power_of_2(width)
    _add_norm[(tokens,)](
        stream_TW,
        more_TW,
        norm.weight_W,
        norm.weight_W if post is None else post.weight_W,
        epsilon=norm.epsilon,
        post_epsilon=0.0 if post is None else post.epsilon,
        WIDTH=width,
        BLOCK=block,
        OFFSET=norm.unit_offset,
        POST=post is not None,
        num_warps=max(1, min(16, block // 256)),
        **output,
    )


def _codes_memory(like: torch.Tensor, tokens: int, width: int, format: str) -> tuple[TokenCodes, dict[str, Any]]:
    """Returns memory for the codes of rows with the dtype of `like`, and the arguments of a kernel that fills it."""
    codes = torch.empty(tokens, width, dtype=CODES[format], device=like.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=like.device)
    numbers = {"LARGEST": LARGEST[format], "SMALLEST": SMALLEST_SCALE, "NATIVE": native(like)}
    return TokenCodes(codes, scales, like.dtype), {"out": stored(codes), "scales": scales, **numbers}


def plain_add_norm_(
    stream_TW: torch.Tensor, more_TW: torch.Tensor, norm: RmsNorm, post: RmsNorm | None = None
) -> torch.Tensor:
    """Reference implementation of `add_norm_`."""
    return plain_rms_norm(stream_TW.add_(more_TW if post is None else plain_rms_norm(more_TW, *post)), *norm)


HeadNorms = tuple[RmsNorm, RmsNorm]
"""The query norm and the key norm."""


def place_heads_(
    line_TL: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    slots_T: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: int,
    norms: HeadNorms | None = None,
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
    query_norm, key_norm = norms or (RmsNorm(line_TL, 0.0), RmsNorm(line_TL, 0.0))
    _place_heads[(tokens,)](
        line_TL,
        cos_TD,
        sin_TD,
        query_norm.weight_W,
        key_norm.weight_W,
        slots_T,
        keys,
        values,
        query_norm.epsilon,
        key_norm.epsilon,
        keys.stride(0),
        QUERIES=queries,
        KEYS=groups,
        HALF=size // 2,
        PLACES=triton.next_power_of_2(size // 2),
        MANY=triton.next_power_of_2(queries),
        FEW=triton.next_power_of_2(groups),
        NORMED=norms is not None,
        OFFSET=query_norm.unit_offset,
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
    norms: HeadNorms | None = None,
) -> None:
    """Reference implementation of `place_heads_`."""
    query, key, value = heads_of_line(line_TL, queries, keys.shape[1])
    q, k = query, key
    if norms is not None:
        q, k = plain_rms_norm(query, *norms[0]), plain_rms_norm(key, *norms[1])
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


def swiglu_(line_TL: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Computes act(gate) * up for the concatenated gate and up projections (L = 2 I), and writes the result over the
    gate. act is silu or gelu (`swiglu_triton.py`)."""
    tokens, width = len(line_TL), line_TL.shape[1] // 2
    assert line_TL.is_contiguous()
    _swiglu[(tokens, triton.cdiv(width, BLOCK_N))](line_TL, WIDTH=width, GELU=gelu, BLOCK_N=BLOCK_N, num_warps=4)
    return line_TL[:, :width]


def swiglu_codes(line_TL: torch.Tensor, gelu: bool, format: str) -> TokenCodes:
    """Returns the `token_codes` of the result of `swiglu_`, and leaves its input as it is."""
    tokens, width = len(line_TL), line_TL.shape[1] // 2
    assert line_TL.is_contiguous()
    made, arguments = _codes_memory(line_TL, tokens, width, format)
    head = max(1, triton.next_power_of_2(width) // 2)
    tail = triton.next_power_of_2(max(1, width - head))
    warps = max(4, min(16, head // 1024))
    _swiglu_codes[(tokens,)](line_TL, WIDTH=width, GELU=gelu, HEAD=head, TAIL=tail, num_warps=warps, **arguments)
    return made


def plain_swiglu_(line_TL: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """Reference implementation of `swiglu_`."""
    gate, up = line_TL.chunk(2, 1)
    return gate.copy_(plain_swiglu(gate, up, gelu))
