"""Triton kernels for quantised weights: dequantise a weight, and multiply few rows by a weight that stays quantised.

Both compute code value times scale in fp32 and round it to the dtype of the result, exactly like
`formats.dequantize`. `enable_fp_fusion=False` keeps the compiler from fusing the multiplication and the addition of
double quantisation, which would change the last bit. The product sums in another order than `linear`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.quantized.formats import NF4, NF4_BLOCK, SCALE_GROUP, Quantized, dynamic_table
from lockstep.kernels.triton_math import runs_on

# Values of a row that a program of the product reads at once. Every block has one scale for so many values.
STEP = 64
BLOCK_OUT = 32
LEAST_ROWS = 16  # the smallest tile of `tl.dot`
MOST_ROWS = 64
# A row of a long weight is divided over programs, and the sums of the parts are added in a fixed order. The number of
# parts depends on the weight alone, so a row of x has the same result in every batch.
LEAST_PROGRAMS = 512
BLOCK_BYTES = 1024


@triton.jit
def _fp8_values(codes):  # type: ignore[no-untyped-def]
    """The values of float8_e4m3fn bytes. Exponent and mantissa move to their places in fp32; a factor of 2^120 gives
    the exponent of fp32. This needs no fp8 instructions, and is exact for subnormal values too."""
    bits = codes.to(tl.uint32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(bits >= 128, -magnitude, magnitude)


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    scales,
    scale_codes,
    scale_scales,
    scale_offset,
    dynamic,
    row,
    block,
    inside,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """The scales of these blocks of these rows. `row` counts the rows of all matrices of a stack."""
    place = row.to(tl.int64) * BLOCKS + block
    if DOUBLE:
        matrix = row // ROWS
        whole = (row % ROWS + FIRST_ROW).to(tl.int64) * ROW_BLOCKS + FIRST_BLOCK + block
        code = tl.load(scale_codes + place, mask=inside, other=0).to(tl.int32)
        step = tl.load(scale_scales + matrix.to(tl.int64) * GROUPS + whole // GROUP, mask=inside, other=0.0)
        value = tl.load(dynamic + code) * step + tl.load(scale_offset + matrix, mask=inside, other=0.0)
    else:
        value = tl.load(scales + place, mask=inside, other=0.0)
    return value


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    codes,
    scales,
    scale_codes,
    scale_scales,
    scale_offset,
    table,
    dynamic,
    out,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    DOUBLE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """One program per row and part of a row. KIND: 0 nf4, 1 int8, 2 fp8."""
    row = tl.program_id(0)
    byte = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    inside = byte < BYTES
    code = tl.load(codes + row.to(tl.int64) * BYTES + byte, mask=inside, other=0)
    column = byte * 2 if KIND == 0 else byte
    scale = _scale(
        scales,
        scale_codes,
        scale_scales,
        scale_offset,
        dynamic,
        row + byte * 0,
        column // BLOCK,
        inside,
        BLOCKS,
        ROWS,
        GROUPS,
        FIRST_ROW,
        FIRST_BLOCK,
        ROW_BLOCKS,
        GROUP,
        DOUBLE,
    )
    kind = out.dtype.element_ty
    target = out + row.to(tl.int64) * COLUMNS + column
    if KIND == 0:
        wide = code.to(tl.int32)
        pairs = tl.interleave(tl.load(table + (wide >> 4)) * scale, tl.load(table + (wide & 15)) * scale).to(kind)
        # One store of neighbouring values is faster than one of every second value.
        both = tl.program_id(1) * 2 * BLOCK_BYTES + tl.arange(0, 2 * BLOCK_BYTES)
        tl.store(out + row.to(tl.int64) * COLUMNS + both, pairs, mask=both < COLUMNS)
    elif KIND == 1:
        tl.store(target, (code.to(tl.float32) * scale).to(kind), mask=inside)
    else:
        tl.store(target, (_fp8_values(code) * scale).to(kind), mask=inside)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    scale_codes,
    scale_scales,
    scale_offset,
    table,
    dynamic,
    out,
    batch,
    x_stride,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    DOUBLE: tl.constexpr,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    STEP: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """`out` [parts, batch, OUT] of x [batch, COLUMNS]: the program sums STEPS steps of BLOCK_OUT rows of the weight."""
    kind = x.dtype.element_ty
    n = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    first = tl.program_id(1) * STEPS
    m = tl.arange(0, BATCH)
    has_row, has_out = m < batch, n < OUT
    acc = tl.zeros([BATCH, BLOCK_OUT], tl.float32)
    for step in range(first, first + STEPS):
        scale = _scale(
            scales,
            scale_codes,
            scale_scales,
            scale_offset,
            dynamic,
            n,
            n * 0 + step * STEP // BLOCK,
            has_out & (step * STEP < COLUMNS),
            BLOCKS,
            OUT,
            GROUPS,
            FIRST_ROW,
            FIRST_BLOCK,
            ROW_BLOCKS,
            GROUP,
            DOUBLE,
        )
        if KIND == 0:
            byte = step * (STEP // 2) + tl.arange(0, STEP // 2)
            inside = has_out[:, None] & (byte < BYTES)[None, :]
            packed = tl.load(codes + n[:, None].to(tl.int64) * BYTES + byte[None, :], mask=inside, other=0).to(tl.int32)
            even = (tl.load(table + (packed >> 4)) * scale[:, None]).to(kind)
            odd = (tl.load(table + (packed & 15)) * scale[:, None]).to(kind)
            places = x + m[:, None].to(tl.int64) * x_stride + 2 * byte[None, :]
            a = tl.load(places, mask=has_row[:, None] & (2 * byte < COLUMNS)[None, :], other=0.0)
            b = tl.load(places + 1, mask=has_row[:, None] & (2 * byte + 1 < COLUMNS)[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(even), acc, input_precision="ieee")
            acc = tl.dot(b, tl.trans(odd), acc, input_precision="ieee")
        else:
            k = step * STEP + tl.arange(0, STEP)
            inside = has_out[:, None] & (k < COLUMNS)[None, :]
            code = tl.load(codes + n[:, None].to(tl.int64) * BYTES + k[None, :], mask=inside, other=0)
            value = code.to(tl.float32) if KIND == 1 else _fp8_values(code)
            weight = (value * scale[:, None]).to(kind)
            places = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
            a = tl.load(places, mask=has_row[:, None] & (k < COLUMNS)[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(weight), acc, input_precision="ieee")
    place = (tl.program_id(1).to(tl.int64) * batch + m[:, None]) * OUT + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=has_row[:, None] & has_out[None, :])


def dequantize_fits(q: Quantized) -> bool:
    return runs_on(q.codes) and all(tensor.is_contiguous() for tensor in q.tensors().values())


def dequantize(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`formats.dequantize` with the same bits."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    rows = q.codes.numel() // q.codes.shape[-1] if q.codes.numel() else 0
    if rows:
        size = q.codes.shape[-1]
        grid = (rows, triton.cdiv(size, BLOCK_BYTES))
        _dequantize[grid](
            *_tensors(q), out, COLUMNS=q.shape[-1], ROWS=q.shape[-2], **_sizes(q), BLOCK_BYTES=BLOCK_BYTES, **_EXACT
        )
    return out


def product_fits(x: torch.Tensor, q: Quantized) -> bool:
    """Whether the kernel computes x [..., in] times this weight: x has few rows, and a step has one scale per row."""
    rows = x.numel() // max(x.shape[-1], 1)
    simple = len(q.shape) == 2 and (q.block or STEP) % STEP == 0 and x.dtype != torch.float64
    return simple and 0 < rows <= MOST_ROWS and x.shape[-1] == q.shape[-1] and dequantize_fits(q)


def product(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    """x [..., in] times the transposed weight in the dtype of x."""
    rows, columns = q.shape
    flat = x.reshape(-1, columns)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    programs, steps = triton.cdiv(rows, BLOCK_OUT), triton.cdiv(columns, STEP)
    parts = max(1, min(triton.cdiv(LEAST_PROGRAMS, programs), steps // 4))
    per_part = triton.cdiv(steps, parts)
    parts = triton.cdiv(steps, per_part)
    kind = x.dtype if parts == 1 else torch.float32
    sums = torch.empty(parts, len(flat), rows, dtype=kind, device=x.device)
    _product[(programs, parts)](
        flat,
        *_tensors(q),
        sums,
        len(flat),
        flat.stride(0),
        OUT=rows,
        COLUMNS=columns,
        **_sizes(q),
        STEPS=per_part,
        STEP=STEP,
        BATCH=max(LEAST_ROWS, triton.next_power_of_2(len(flat))),
        BLOCK_OUT=BLOCK_OUT,
        **_EXACT,
    )
    total = sums[0] if parts == 1 else sums.sum(0).to(x.dtype)
    return total.reshape(*x.shape[:-1], rows)


_EXACT = {"enable_fp_fusion": False}
_KINDS = {"nf4": 0, "int8": 1, "fp8": 2}


def _tensors(q: Quantized) -> tuple[torch.Tensor, ...]:
    """The tensors of the weight and the tables. Any tensor stands for one that the weight lacks."""
    codes = q.codes.view(torch.uint8) if q.format == "fp8" else q.codes
    tables = _table(q.device), dynamic_table(q.device)
    if q.scales is not None:
        return codes, q.scales, codes, q.scales, q.scales, *tables
    assert q.scale_codes is not None
    assert q.scale_scales is not None
    assert q.scale_offset is not None
    return codes, q.scale_scales, q.scale_codes, q.scale_scales, q.scale_offset, *tables


def _sizes(q: Quantized) -> dict[str, Any]:
    columns = q.shape[-1]
    block = q.block or triton.cdiv(columns, STEP) * STEP
    blocks = triton.cdiv(columns, block)
    return {
        "BYTES": q.codes.shape[-1],
        "BLOCK": block,
        "BLOCKS": blocks,
        "GROUPS": q.scale_scales.shape[-1] if q.scale_scales is not None else 1,
        "FIRST_ROW": q.origin[0],
        "FIRST_BLOCK": q.origin[1],
        "ROW_BLOCKS": q.row_blocks or blocks,
        "GROUP": SCALE_GROUP,
        "DOUBLE": q.double,
        "KIND": _KINDS[q.format],
    }


@cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor(NF4, device=device)


assert NF4_BLOCK == STEP
