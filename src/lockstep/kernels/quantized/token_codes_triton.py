"""Quantises a matrix to fp8 or int8 in one kernel, and multiplies int8 matrices. The plain references are `token_codes`
and `int8_product` in `token_products.py`, and `fp8_codes` in `fp8_linear.py`, whose scales are powers of two."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Columns that a program reads at once.
TILE = 4096
# Rows and columns that a program transposes.
SQUARE = 64
# Programs that fill an H200.
FILLING = 132


class Int8Tile(NamedTuple):
    """Rows, outputs and inputs that a program of the product of int8 matrices reads at once, and how it is launched."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


@triton.jit
def _fp8_bits(value, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of float8_e4m3fn numbers of at most 448, rounded half to even. `NATIVE`: the device has an instruction
    for it. Integer arithmetic needs no such instruction, and Triton's interpreter does not round up to the next power
    of two."""
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of the mantissa stay. The exponent has the bias 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((tl.abs(value) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(tl.abs(value) < 0.015625, subnormal, normal)
    code = tl.where(value != value, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _power_factor(largest, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """`power_scale` of `fp8_linear.py`: the largest power of two that keeps `largest` in the range."""
    factor = (LARGEST / tl.maximum(largest.to(tl.float64), SMALLEST)).to(tl.float32)
    exponent = factor.to(tl.int32, bitcast=True) & -8388608  # sign and exponent of fp32
    return exponent.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(value):  # type: ignore[no-untyped-def]
    """The bits of |value|. As integers they have the order of the magnitudes, and NaN is the largest."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest_bits, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of a row by the largest of its `magnitude_bits`. A row with NaN has the scale NaN."""
    scale = tl.maximum(tl.div_rn(largest_bits.to(tl.float32, bitcast=True), LARGEST), SMALLEST)
    return tl.where(largest_bits > 0x7F800000, float("nan"), scale)


@triton.jit
def coded(value, factor, LARGEST: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of the values of a row, of which `factor` is 1 / scale."""
    value = tl.minimum(tl.maximum(value.to(tl.float32) * factor, -LARGEST), LARGEST)
    if INT8:
        # Adding 1.5 x 2^23 rounds half to even. The limits are applied before it: a fused multiply-add would round the
        # product and the sum together.
        code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        code = _fp8_bits(value, NATIVE)
    return code


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    x, codes, scales, columns, row_stride, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, INT8: tl.constexpr,
    POWER: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Each program quantises one row: first its largest magnitude, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    bits = tl.zeros([TILE], tl.int32)
    for start in range(0, columns, TILE):
        at = start + tl.arange(0, TILE)
        part = tl.load(x + row * row_stride + at, mask=at < columns, other=0.0)
        bits = tl.maximum(bits, magnitude_bits(part))
    largest_bits = tl.max(bits, axis=0)
    if POWER:
        factor = _power_factor(largest_bits.to(tl.float32, bitcast=True), LARGEST, SMALLEST)
        scale = tl.where(largest_bits > 0x7F800000, float("nan"), tl.div_rn(1.0, factor))
    else:
        scale = row_scale(largest_bits, LARGEST, SMALLEST)
        factor = tl.div_rn(1.0, scale)
    tl.store(scales + row, scale)
    for start in range(0, columns, TILE):
        at = start + tl.arange(0, TILE)
        part = tl.load(x + row * row_stride + at, mask=at < columns, other=0.0)
        tl.store(codes + row * columns + at, coded(part, factor, LARGEST, INT8, NATIVE), mask=at < columns)


@triton.jit
def _transposed(  # type: ignore[no-untyped-def]
    x, codes, scale, rows, columns, row_stride, LARGEST: tl.constexpr, SIZE: tl.constexpr, NATIVE: tl.constexpr
):
    """Each program quantises a square of the matrix with one scale for the whole matrix, and stores it transposed."""
    factor = tl.div_rn(1.0, tl.load(scale))  # exact: the scale is a power of two
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    part = tl.load(x + row[:, None].to(tl.int64) * row_stride + column[None, :], mask=inside, other=0.0)
    value = tl.minimum(tl.maximum(part.to(tl.float32) * factor, -LARGEST), LARGEST)
    target = codes + column[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(target, tl.trans(_fp8_bits(value, NATIVE)), mask=tl.trans(inside))


@triton.jit
def _int8_product(  # type: ignore[no-untyped-def]
    x, x_scales, weight, weight_scales, out, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums of products of codes are exact integers. Both scales are applied before the result is stored, so that no
    matrix of 32-bit sums is written and read again. Programs that use the same rows of x run together."""
    program = tl.program_id(0)
    across, down = tl.cdiv(outputs, OUTPUTS), tl.cdiv(rows, ROWS)
    group = program // (8 * across)
    tall = tl.minimum(down - group * 8, 8)
    row = (group * 8 + (program % (8 * across)) % tall) * ROWS + tl.arange(0, ROWS)
    column = (program % (8 * across)) // tall * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, INPUTS)
    # Rows beyond the last one read an existing row instead; their results are not stored.
    x_places = x + (row % rows).to(tl.int64)[:, None] * inputs + inner[None, :]
    weight_places = weight + (column % outputs).to(tl.int64)[None, :] * inputs + inner[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.int32)
    for start in range(0, inputs, INPUTS):
        if EVEN:
            x_tile, weight_tile = tl.load(x_places), tl.load(weight_places)
        else:
            x_tile = tl.load(x_places, mask=(start + inner < inputs)[None, :], other=0)
            weight_tile = tl.load(weight_places, mask=(start + inner < inputs)[:, None], other=0)
        acc = tl.dot(x_tile, weight_tile, acc, out_dtype=tl.int32)
        x_places += INPUTS
        weight_places += INPUTS
    scaled = acc.to(tl.float32) * tl.load(x_scales + row % rows)[:, None]
    scaled = scaled * tl.load(weight_scales + column % outputs)[None, :]
    places = row.to(tl.int64)[:, None] * outputs + column[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + places, scaled.to(out.dtype.element_ty), mask=inside)


def native(x: torch.Tensor) -> bool:
    """Returns whether the device converts to fp8 by an instruction."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def stored(codes: torch.Tensor) -> torch.Tensor:
    """Returns the codes as the integers that kernels store."""
    return codes if codes.dtype is torch.int8 else codes.view(torch.uint8)


def int8_product_fits(codes_TK: torch.Tensor, codes_NK: torch.Tensor) -> bool:
    contiguous = codes_TK.is_contiguous() and codes_NK.is_contiguous()
    # Older devices have too little shared memory for the tiles.
    modern = codes_TK.device.type != "cuda" or torch.cuda.get_device_capability(codes_TK.device) >= (8, 0)
    return contiguous and modern and codes_TK.numel() > 0 and len(codes_NK) > 0


def int8_product_triton(
    codes_TK: torch.Tensor, scales_T1: torch.Tensor, codes_NK: torch.Tensor, scales_N1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    (rows, inputs), outputs = codes_TK.shape, len(codes_NK)
    out = torch.empty(rows, outputs, dtype=dtype, device=codes_TK.device)
    tile = _tile(rows, outputs, inputs)
    _int8_product[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
        codes_TK, scales_T1.contiguous(), codes_NK, scales_N1.contiguous(), out, rows, outputs, inputs,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, EVEN=inputs % tile.inputs == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile(rows: int, outputs: int, inputs: int) -> Int8Tile:
    """Returns a tile that was among the fastest of 21 on an H200, for the layers of a 7B model and 32 to 8,192 rows.
    Each of them needs 96 KiB of shared memory. A small batch reads the weights once: small tiles fill the device."""
    if rows > 128 and triton.cdiv(rows, 128) * triton.cdiv(outputs, 128) >= FILLING:
        return Int8Tile(128, 128, 128, 8, 3)
    if rows > 256:
        return Int8Tile(64, 128, 128, 4, 4)
    if rows > 128:
        return Int8Tile(64, 64, 256, 4, 3) if inputs > 8192 else Int8Tile(64, 64, 128, 4, 4)
    return Int8Tile(64, 64, 128, 4, 4) if outputs > 8192 else Int8Tile(64, 32, 256, 4, 4)


def token_codes_triton(
    x_TK: torch.Tensor, dtype: torch.dtype, largest: float, smallest: float, *, power: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes in `dtype` and the scales [T, 1] of each row of a matrix. `power`: scales are powers of two."""
    x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
    rows, columns = x_TK.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x_TK.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x_TK.device)
    if rows:
        tile = min(TILE, triton.next_power_of_2(columns))
        int8 = dtype is torch.int8
        _codes[(rows,)](
            x_TK, stored(codes), scales, columns, x_TK.stride(0), largest, smallest, int8, power, tile, native(x_TK),
            num_warps=4 if columns <= 1024 else 8,
        )  # fmt: skip
    return codes, scales


def transposed_codes_triton(x_NK: torch.Tensor, scale: torch.Tensor, largest: float) -> torch.Tensor:
    """Returns the fp8 codes [K, N] of a matrix with one scale, which is a power of two."""
    x_NK = x_NK if x_NK.stride(-1) == 1 else x_NK.contiguous()
    rows, columns = x_NK.shape
    codes = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=x_NK.device)
    grid = (triton.cdiv(rows, SQUARE), triton.cdiv(columns, SQUARE))
    _transposed[grid](
        x_NK, stored(codes), scale, rows, columns, x_NK.stride(0), largest, SQUARE, native(x_NK), num_warps=4
    )
    return codes
