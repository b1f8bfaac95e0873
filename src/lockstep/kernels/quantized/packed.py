"""Decodes the weights of quantised model folders: GPTQ, AWQ, block fp8, MXFP4, compressed-tensors and bitsandbytes.

Each function takes the tensors of one weight as they are stored, and returns what the format says: code value times
scale. A weight whose codes and scales are also one of the formats of `formats.py` stays quantised (`Quantized`); its
values are those of the folder, because integers of at most eight bits and fp8 values are exact as codes. Other weights
are returned as values in fp32, or in the given dtype where that is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.quantized.formats import NF4, NF4_BLOCK, SCALE_GROUP, Quantized, dynamic_table

# AutoAWQ packs the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight neighbours from the lowest to the highest four bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# The values of the four bits of MXFP4 (e2m1): sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The unsigned integers in int32 words [..., n], the first in the lowest bits: int32 [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def integers(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Tensor | None = None, block: int = 0
) -> Quantized | Tensor:
    """(codes - zeros) * scales for codes [out, in], and zeros and scales [out, blocks of a row]. `groups` has the block
    of each column. Without it, a block has `block` columns; 0 is a block for all columns."""
    columns, scales = codes.shape[-1], scales.float()
    block = sharing(columns, scales.shape[-1], block) if groups is None else int((groups == groups[0]).sum())
    in_order = torch.arange(columns, device=codes.device) // block
    place = in_order if groups is None else groups.long()
    if int(place.max()) >= scales.shape[-1] or int(place.min()) < 0 or len(scales) != len(codes):
        raise ValueError(f"scales {tuple(scales.shape)} do not fit {tuple(codes.shape)} codes in blocks of {block}")
    whole = codes.to(torch.int16) if zeros is None else codes.to(torch.int16) - zeros.to(torch.int16)[:, place]
    if torch.equal(place, in_order) and int(whole.min()) >= -128 and int(whole.max()) <= 127:
        size = 0 if scales.shape[-1] == 1 else block
        return Quantized("int8", whole.to(torch.int8).contiguous(), scales.contiguous(), tuple(codes.shape), size)
    return whole.float() * scales[:, place]


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, block: int, *, plus_one: bool
) -> Quantized | Tensor:
    """qweight [in * bits / 32, out] packs inputs, qzeros [groups, out * bits / 32] packs outputs. `plus_one`: the
    stored zero points are smaller by one (the format "gptq"), and the addition keeps `bits` bits."""
    zeros = unpacked(qzeros, bits)
    if plus_one:
        zeros = (zeros + 1) & (2**bits - 1)
    codes = unpacked(qweight.T.contiguous(), bits)
    return integers(codes, zeros.T, scales.T, g_idx, block)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, block: int) -> Quantized | Tensor:
    """qweight [in, out / 8] and qzeros [groups, out / 8] pack outputs in the order of `_AWQ_PLACES`."""

    def in_order(words: Tensor) -> Tensor:
        return unpacked(words, 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)

    return integers(in_order(qweight).T, in_order(qzeros).T, scales.T, block=block)


def floats(codes: Tensor, scales: Tensor, block: Sequence[int] | None = None) -> Quantized | Tensor:
    """float8 codes [..., out, in] times scales: one for the tensor, one per row, or one per block of `block` rows and
    columns, of which the last ones may be smaller."""
    rows, columns = codes.shape[-2:]
    scales = exponents(scales) if scales.dtype == torch.uint8 else scales.float()
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(rows, 1)
    if scales.dim() == 1:
        scales = scales[:, None]
    (high, wide), grid = block or (0, 0), scales.shape[-2:]
    high, wide = sharing(rows, grid[0], high), sharing(columns, grid[1], wide)
    scales = scales.repeat_interleave(high, -2)[..., :rows, :]
    if codes.dtype == torch.float8_e4m3fn:
        size = 0 if scales.shape[-1] == 1 else wide
        scales = scales.expand(*codes.shape[:-1], scales.shape[-1]).contiguous()
        return Quantized("fp8", codes.contiguous(), scales, tuple(codes.shape), size)
    return codes.float() * scales.repeat_interleave(wide, -1)[..., :columns]


def sharing(size: int, scales: int, block: int) -> int:
    """Returns how many of `size` rows or columns share a scale. The number of scales alone does not tell: 2 scales of
    72 columns may stand for blocks of 36 or of 48."""
    if scales in (1, size):
        return size // scales
    if not block:
        raise ValueError(
            f"config.json does not say how many of {size} rows or columns share one of {scales} scales; it belongs in "
            "weight_block_size, group_size or config_groups of its quantization_config"
        )
    if -(-size // block) != scales:
        raise ValueError(f"{size} rows or columns in blocks of {block} do not have {scales} scales")
    return block


def exponents(codes: Tensor) -> Tensor:
    """The powers of two of e8m0 bytes."""
    return torch.ldexp(torch.ones((), device=codes.device), codes.int() - 127)


def mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [experts, out, groups, 16] with two values per byte, the first in the low four bits, times
    2^(scales - 127). Returns [experts, in, out], as gpt-oss multiplies. A value has one bit of mantissa, so it is exact
    in `dtype`."""
    experts, rows, groups, size = blocks.shape
    table = torch.tensor(_E2M1, device=blocks.device)
    out = torch.empty(experts, groups * size * 2, rows, dtype=dtype, device=blocks.device)
    for expert, (packed, powers) in enumerate(zip(blocks, scales, strict=True)):
        pairs = table[torch.stack([packed & 15, packed >> 4], -1).int()].flatten(-2)
        out[expert] = torch.ldexp(pairs, powers.int()[..., None] - 127).flatten(1).T
    return out


def bitsandbytes_4bit(
    codes: Tensor,
    absmax: Tensor,
    table: Tensor,
    shape: Sequence[int],
    block: int,
    nested: tuple[Tensor, Tensor, float, int] | None,
) -> Quantized | Tensor:
    """Blocks of the flattened weight. `table` has the values of the sixteen codes. `nested` has the scales of the
    eight-bit absmax: their scales, their table, the mean and the block size."""
    codes = codes.view(torch.uint8).flatten()
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    in_rows = block == NF4_BLOCK and columns % NF4_BLOCK == 0 and table.tolist() == torch.tensor(NF4).tolist()
    if in_rows and nested is not None:
        scales, values, offset, size = nested
        if size == SCALE_GROUP and torch.equal(values.float(), dynamic_table(values.device)):
            return Quantized(
                "nf4",
                codes.reshape(rows, columns // 2),
                None,
                (rows, columns),
                NF4_BLOCK,
                scale_codes=absmax.reshape(rows, columns // NF4_BLOCK),
                scale_scales=scales.float(),
                scale_offset=torch.tensor(offset, device=codes.device),
            )
    if nested is not None:
        scales, values, offset, size = nested
        absmax = values[absmax.int()] * scales.repeat_interleave(size)[: absmax.numel()] + offset
    absmax = absmax.float()
    if in_rows:
        per_row = absmax.reshape(rows, columns // NF4_BLOCK)
        return Quantized("nf4", codes.reshape(rows, columns // 2), per_row, (rows, columns), NF4_BLOCK)
    values = table.float()[torch.stack([codes >> 4, codes & 15], -1).flatten().int()][: rows * columns]
    return (values * absmax.repeat_interleave(block)[: values.numel()]).reshape(*shape)


def bitsandbytes_8bit(codes: Tensor, absmax: Tensor) -> Quantized:
    """int8 rows: 127 stands for the largest magnitude of the row."""
    return Quantized("int8", codes, (absmax.float() * (1 / 127))[:, None], tuple(codes.shape))
