"""The number formats of quantised weights, in plain torch for every device.

A weight [..., out, in] becomes codes and scales. The codes of one block of a row share one scale:

- nf4: four bits per value and blocks of 64 values. A value is `NF4[code] * scale`, and the scale is the largest
  magnitude of the block (absmax). With double quantisation the scales are stored with eight bits: their mean is
  subtracted, and groups of 256 scales of one matrix share one fp32 scale. Codes and values are those of bitsandbytes
  (`quantize_4bit` of its plain torch and CUDA code), where the row length is a multiple of 64.
- int8: `code * scale` with scale = absmax / 127 and one scale per row, rounded half to even, as torchao computes it
  with the range -127 to 127.
- fp8: `code * scale` with codes in float8_e4m3fn, scale = absmax / 448 and one scale per row, as torchao computes it
  for fp32 weights.

Blocks never cross rows: the first and the last row of a slice have the codes and scales that they have in the full
weight. So FSDP2 and tensor parallelism can shard the codes like the weight. Leading dimensions (experts) are quantised
one matrix at a time. All arithmetic is in fp32 with a fixed order, so that every device computes the same bits. (The
mean of double quantisation is the exception in bitsandbytes: its last bit depends on the device and on the number of
threads.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FORMATS = ("nf4", "int8", "fp8")
NF4_BLOCK = 64
SCALE_GROUP = 256  # how many scales share one fp32 scale in double quantisation
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SMALLEST_ABSMAX = 1e-38  # bitsandbytes divides by at least this much
_SMALLEST_SCALE = 2.0**-126  # a row of zeros gets this scale, so that no division by zero occurs
_BY_ROW = ("codes", "scales", "scale_codes")  # tensors with one entry per row
_CHUNK = 1 << 24  # how many values are converted at once: limits the fp32 copies

# The quantiles of a normal distribution that bitsandbytes uses.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Quantized:
    """A quantised weight. `shape` is the shape of the weight that `dequantize` returns.

    codes: nf4: uint8 [..., out, in / 2], the first of two values in the high four bits; int8: int8; fp8: float8_e4m3fn.
    scales: fp32 [..., out, blocks of a row], or None with double quantisation.
    block: how many values of a row share a scale; 0 means that the row has one scale.
    scale_codes, scale_scales, scale_offset: the scales with double quantisation: uint8 [..., out, blocks], fp32
        [..., groups] and fp32 [...]. The groups count the blocks of the full matrix, so a slice keeps them all.
    origin, row_blocks: the first row and the first block of a slice in the full matrix, and how many blocks a row of
        the full matrix has (0: the row is not sliced).
    """

    format: str
    codes: Tensor
    scales: Tensor | None
    shape: tuple[int, ...]
    block: int = 0
    scale_codes: Tensor | None = None
    scale_scales: Tensor | None = None
    scale_offset: Tensor | None = None
    origin: tuple[int, int] = (0, 0)
    row_blocks: int = 0

    @property
    def double(self) -> bool:
        return self.scale_codes is not None

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor], **changes: Any) -> Quantized:
        """This weight with other tensors by field name, and other fields."""
        return replace(self, **{**changes, **tensors})

    def to(self, device: torch.device | str) -> Quantized:
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def block_scales(self) -> Tensor:
        """The scales in fp32 [..., out, blocks of a row]."""
        if self.scales is not None:
            return self.scales
        codes, scales, offset = self.scale_codes, self.scale_scales, self.scale_offset
        if codes is None or scales is None or offset is None:
            raise ValueError("a quantised weight has scales or scale codes")
        rows, blocks = codes.shape[-2:]
        row = torch.arange(self.origin[0], self.origin[0] + rows, device=codes.device)
        column = torch.arange(self.origin[1], self.origin[1] + blocks, device=codes.device)
        group = (row[:, None] * (self.row_blocks or blocks) + column) // SCALE_GROUP
        values = dynamic_table(codes.device)[codes.int()]
        return values * scales[..., group] + offset[..., None, None]


def quantize(weight: Tensor, format: str, double: bool = True) -> Quantized:
    """The weight [..., out, in] in `format`. `double` quantises the scales of nf4 too; int8 and fp8 ignore it. A weight
    with NaN or infinity raises ValueError."""
    if format not in FORMATS:
        raise ValueError(f"unknown number format {format!r}")
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} has no rows to quantise")
    rows = weight.detach().reshape(-1, weight.shape[-1])
    convert = _nf4_rows if format == "nf4" else _int8_rows if format == "int8" else _fp8_rows
    parts = [convert(rows[piece].float()) for piece in _pieces(rows.shape)]
    codes, scales = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("the weight has a value that is NaN or infinite")
    codes, scales = (part.reshape(*weight.shape[:-1], part.shape[-1]) for part in (codes, scales))
    plain = Quantized(format, codes, scales, tuple(weight.shape), NF4_BLOCK if format == "nf4" else 0)
    return double_quantized(plain) if double and format == "nf4" else plain


def double_quantized(q: Quantized, offset: Tensor | None = None) -> Quantized:
    """`q` with its scales in eight bits. `offset` is the value that is subtracted first; by default, the mean."""
    assert q.scales is not None
    flat = q.scales.flatten(-2)
    offset = _mean(flat) if offset is None else offset
    if not bool(torch.isfinite(offset).all()):
        raise ValueError("the sum of the largest values of the blocks overflows fp32")
    centred = functional.pad(flat - offset[..., None], (0, -flat.shape[-1] % SCALE_GROUP))
    groups = centred.unflatten(-1, (-1, SCALE_GROUP))
    largest = groups.abs().amax(-1)
    codes = torch.bucketize(_normalized(groups, largest), _bounds(dynamic_table(flat.device))).to(torch.uint8)
    codes = codes.flatten(-2)[..., : flat.shape[-1]].reshape(q.scales.shape).contiguous()
    return replace(q, scales=None, scale_codes=codes, scale_scales=largest, scale_offset=offset)


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: code value times scale in fp32, rounded once."""
    columns = q.shape[-1]
    codes = q.codes.reshape(-1, q.codes.shape[-1])
    scales = q.block_scales()
    scales = scales.reshape(-1, scales.shape[-1])
    block = q.block or columns
    out = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    for piece in _pieces(out.shape):
        values = _code_values(codes[piece], q.format)[:, :columns]
        out[piece] = _scaled(values, scales[piece], block)
    return out.reshape(q.shape)


def narrow(q: Quantized, dim: int, start: int, length: int) -> Quantized:
    """The slice [start, start + length) of dimension `dim`: it dequantises to the same slice of the weight. A slice of
    the last dimension begins and ends with a block (ValueError otherwise)."""
    dim = dim % len(q.shape)
    from_end = dim - len(q.shape)
    shape = (*q.shape[:dim], length, *q.shape[dim + 1 :])
    if from_end < -2:  # one of the leading dimensions: every matrix is complete
        return q.with_tensors({n: t.narrow(dim, start, length) for n, t in q.tensors().items()}, shape=shape)
    if from_end == -2:
        cut = {n: t.narrow(dim, start, length) for n, t in q.tensors().items() if n in _BY_ROW}
        return q.with_tensors(cut, shape=shape, origin=(q.origin[0] + start, q.origin[1]))
    return _narrow_columns(q, start, length, shape)


def quantized_bytes(shape: tuple[int, ...], format: str, double: bool = True) -> int:
    """How many bytes the codes and scales of a weight of this shape have."""
    rows, columns = prod(shape[:-1]), shape[-1]
    if format != "nf4":
        return rows * (columns + 4)
    blocks = rows * _ceil(columns, NF4_BLOCK)
    codes = rows * _ceil(columns, 2)
    if not double:
        return codes + 4 * blocks
    matrices = prod(shape[:-2])
    groups = matrices * _ceil(blocks // max(matrices, 1), SCALE_GROUP)
    return codes + blocks + 4 * groups + 4 * matrices


def _narrow_columns(q: Quantized, start: int, length: int, shape: tuple[int, ...]) -> Quantized:
    if not q.block:  # the row keeps its one scale
        return replace(q, shape=shape, codes=q.codes.narrow(-1, start, length))
    end = start + length
    if start % q.block or (end % q.block and end != q.shape[-1]):
        raise ValueError(f"columns {start} to {end} do not begin and end with a block of {q.block} values")
    first, blocks = start // q.block, _ceil(length, q.block)
    packed = 2 if q.format == "nf4" else 1
    cut = {"codes": q.codes.narrow(-1, start // packed, _ceil(length, packed))}
    cut |= {n: t.narrow(-1, first, blocks) for n, t in q.tensors().items() if n in _BY_ROW and n != "codes"}
    row_blocks = q.row_blocks or _ceil(q.shape[-1], q.block)
    return q.with_tensors(cut, shape=shape, origin=(q.origin[0], q.origin[1] + first), row_blocks=row_blocks)


def _nf4_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    columns = rows.shape[-1]
    blocks = functional.pad(rows, (0, -columns % NF4_BLOCK)).unflatten(-1, (-1, NF4_BLOCK))
    absmax = blocks.abs().amax(-1)
    codes = torch.bucketize(_normalized(blocks, absmax), _bounds(_nf4_table(rows.device)), out_int32=True)
    codes = codes.to(torch.uint8).flatten(-2)
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    return packed[:, : _ceil(columns, 2)].contiguous(), absmax


def _int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _row_scale(rows, "int8")
    codes = torch.round(rows * (1.0 / scale)).clamp(-_LARGEST["int8"], _LARGEST["int8"])
    return codes.to(torch.int8), scale


def _fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = _row_scale(rows, "fp8")
    return (rows / scale).clamp(-_LARGEST["fp8"], _LARGEST["fp8"]).to(torch.float8_e4m3fn), scale


def _row_scale(rows: Tensor, format: str) -> Tensor:
    return divided(rows.abs().amax(-1, keepdim=True), _LARGEST[format]).clamp(min=_SMALLEST_SCALE)


def divided(values: Tensor, by: float) -> Tensor:
    """`values / by`, rounded once on every device. CUDA multiplies by 1 / by if `by` is a number of the host."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def _normalized(blocks: Tensor, absmax: Tensor) -> Tensor:
    return (blocks * (1.0 / absmax.clamp(min=_SMALLEST_ABSMAX))[..., None]).clamp(-1.0, 1.0)


def _code_values(codes: Tensor, format: str) -> Tensor:
    """The fp32 value of each code, before the scale."""
    if format != "nf4":
        return codes.float()
    pairs = _nf4_pairs(codes.device).index_select(0, codes.flatten().int())
    return pairs.reshape(codes.shape[0], -1)


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    if scales.shape[-1] == 1:
        return values * scales
    columns = values.shape[-1]
    blocks = functional.pad(values, (0, scales.shape[-1] * block - columns)).unflatten(-1, (-1, block))
    return (blocks * scales[..., None]).flatten(-2)[:, :columns]


def _mean(values: Tensor) -> Tensor:
    """The mean of the last dimension. The sum adds halves to each other, which gives the same bits on every device."""
    count = values.shape[-1]
    total = functional.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return divided(total[..., 0], count)


def _pieces(shape: torch.Size) -> Iterator[slice]:
    step = max(1, _CHUNK // shape[-1])
    return (slice(start, start + step) for start in range(0, shape[0], step))


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _bounds(table: Tensor) -> Tensor:
    """The midpoints between neighbouring codes. A value on a midpoint gets the lower code."""
    return (table[:-1] + table[1:]) / 2


@cache
def _nf4_table(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """The two values of each of the 256 bytes."""
    table = _nf4_table(torch.device("cpu"))
    byte = torch.arange(256)
    return torch.stack([table[byte >> 4], table[byte & 15]], -1).to(device)


@cache
def dynamic_table(device: torch.device) -> Tensor:
    """The 256 values of the eight-bit codes of double quantisation: bitsandbytes' dynamic map (arXiv 1511.04561). The
    sign takes one bit, leading zeros count the powers of ten, and the other bits divide the range of 0.1 to 1.

    The edges are computed in fp64 from fp32 steps: `torch.linspace` gives other last bits on other processors."""
    values = [0.0, 1.0]
    first = _fp32(0.1)
    for power in range(7):
        count = 2**power
        step = _fp32(_fp32(1 - first) / count)
        low = [first + step * index for index in range((count + 1) // 2)]
        high = [1 - step * (count - index) for index in range((count + 1) // 2, count + 1)]
        edges = torch.tensor(low + high, dtype=torch.float64).float()
        middles = (edges[:-1] + edges[1:]) / 2.0
        positive = (10.0 ** (power - 6) * middles).tolist()
        values += positive + [-value for value in positive]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
