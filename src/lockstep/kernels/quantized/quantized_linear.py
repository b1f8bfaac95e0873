"""A frozen linear layer with quantised weights, for adapters on top.

The forward pass dequantises the weight, and the backward pass dequantises it again: autograd saves only the codes. The
codes are parameters, so that FSDP2 and tensor parallelism shard them, but they are not named `weight`: code that reads
`weight` gets the dequantised values and never the codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep.kernels.quantized.formats import NF4_BLOCK, SCALE_GROUP, Quantized, quantize
from lockstep.kernels.quantized.product import dequantize, matmul

# The tensors of a quantised weight that a module stores as parameters. The fields have the names of `Quantized`.
PARTS = ("codes", "scales", "scale_codes", "scale_scales", "scale_offset")


class Coding:
    """How a weight of `shape` is stored: its format, and the parts of a `Quantized` as parameters of a module."""

    def __init__(self, format: str, double: bool, shape: tuple[int, ...], prefix: str = ""):
        self.format, self.double, self.shape, self.prefix = format, double and format == "nf4", shape, prefix
        self.origin, self.row_blocks = (0, 0), 0
        """Where the weight begins in the weight of all tensor-parallel ranks, as in `Quantized`."""

    def slice_of(self, style: str, rank: int, ranks: int) -> None:
        """Notes that the parts of the weight are those of one tensor-parallel rank. All ranks have the scales of double
        quantisation, which count the blocks of the full weight."""
        rows, columns = self.shape[-2:]
        self.row_blocks = -(-columns // NF4_BLOCK)
        self.origin = (rank * rows // ranks, 0) if style == "columns" else (0, rank * self.row_blocks // ranks)

    def name(self, part: str) -> str:
        """Returns the name of the parameter that stores a part of the weight."""
        return f"{self.prefix}{part}"

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each stored part."""
        *outer, rows, columns = self.shape
        packed = -(-columns // 2) if self.format == "nf4" else columns
        # fp8 codes are stored as bytes, because collectives and host copies of float8 are missing on some devices.
        kind = torch.int8 if self.format == "int8" else torch.uint8
        blocks = -(-columns // NF4_BLOCK) if self.format == "nf4" else 1
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": ((*outer, rows, packed), kind)}
        if not self.double:
            return found | {"scales": ((*outer, rows, blocks), torch.float32)}
        groups = -(-(rows * blocks) // SCALE_GROUP)
        return found | {
            "scale_codes": ((*outer, rows, blocks), torch.uint8),
            "scale_scales": ((*outer, groups), torch.float32),
            # FSDP2 cannot shard a tensor without dimensions.
            "scale_offset": ((*outer, 1), torch.float32),
        }

    def register(self, module: nn.Module, device: torch.device) -> None:
        """Gives the module parameters for the parts, without values."""
        for part, (shape, kind) in self.shapes().items():
            empty = torch.empty(shape, dtype=kind, device=device)
            module.register_parameter(self.name(part), nn.Parameter(empty, requires_grad=False))

    def stored(self, module: nn.Module) -> list[torch.Tensor | None]:
        """Returns the parts as they are in the module, in the order of `PARTS`."""
        return [getattr(module, self.name(part), None) for part in PARTS]

    def parts_of(self, weight: Quantized) -> dict[str, torch.Tensor]:
        """Returns the parts of a quantised weight in the dtypes and shapes in which a module stores them."""
        found = weight.tensors()
        if self.format == "fp8":
            found["codes"] = found["codes"].view(torch.uint8)
        if "scale_offset" in found:
            found["scale_offset"] = found["scale_offset"][..., None]
        return found

    def stores(self, weight: Quantized) -> bool:
        """Returns whether the codes and scales of a quantised weight can be stored as they are."""
        block = NF4_BLOCK if self.format == "nf4" else 0
        return (weight.format, weight.double, weight.block) == (self.format, self.double, block)

    def coded(self, weight: torch.Tensor | Quantized) -> Quantized:
        return weight if isinstance(weight, Quantized) else quantize(weight, self.format, self.double)

    def weight(self, parts: list[torch.Tensor | None]) -> Quantized:
        """Returns the quantised weight of stored parts. The parts may be a slice of the rows or columns."""
        codes, scales, scale_codes, scale_scales, offset = parts
        assert codes is not None
        if self.format == "fp8":
            codes = codes.view(torch.float8_e4m3fn)
        columns = min(self.shape[-1], codes.shape[-1] * (2 if self.format == "nf4" else 1))
        return Quantized(
            self.format,
            codes,
            scales,
            (*codes.shape[:-1], columns),
            NF4_BLOCK if self.format == "nf4" else 0,
            scale_codes,
            scale_scales,
            None if offset is None else offset[..., 0],
            self.origin,
            self.row_blocks,
        )

    def dequantized(self, parts: list[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        codes = parts[0]
        assert codes is not None
        if codes.is_meta:
            return torch.empty(self.shape, dtype=dtype, device=codes.device)
        return dequantize(self.weight(parts), dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored in `coding`. `dtype` is the dtype of inputs, outputs and the matmul."""

    def __init__(self, coding: Coding, dtype: torch.dtype, device: torch.device, bias: nn.Parameter | None = None):
        # The constructor of nn.Linear would allocate the weight.
        nn.Module.__init__(self)
        self.out_features, self.in_features = coding.shape
        self.coding, self.dtype = coding, dtype
        coding.register(self, device)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The dequantised weight, computed at each access."""
        return self.dequantized(self.dtype)

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.coding.dequantized(self.coding.stored(self), dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return matmul(input, self.coding.weight(self.coding.stored(self)), self.dtype, self.bias)
        found: torch.Tensor = _Product.apply(input, self.bias, self.coding, self.dtype, *self.coding.stored(self))
        return found

    def divided_parts(self, style: str) -> dict[str, int]:
        """Returns the dimension by which tensor parallelism splits each parameter of this layer."""
        coded = {part: 0 for part in ("codes", "scales", "scale_codes") if part in self._parameters}
        if style == "columns":
            return coded | ({} if self.bias is None else {"bias": 0})
        blocked = self.coding.format == "nf4"
        return {part: 1 for part in coded if part == "codes" or blocked}

    def extra_repr(self) -> str:
        double = ", double" if self.coding.double else ""
        return f"{super().extra_repr()}, format={self.coding.format}{double}"


class _Product(torch.autograd.Function):
    """Computes input @ weight.T + bias. Only the codes are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        coding: Coding,
        dtype: torch.dtype,
        *parts: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(*parts)
        ctx.coding, ctx.dtype = coding, dtype
        return functional.linear(input, coding.dequantized(list(parts), dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grads[0] @ ctx.coding.dequantized(list(ctx.saved_tensors), ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grads[0].flatten(0, -2).sum(0)
        return grad_input, grad_bias, None, None, *[None] * len(PARTS)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
