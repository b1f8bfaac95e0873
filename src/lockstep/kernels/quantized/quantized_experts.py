"""Quantised experts: the stacked weights [experts, rows, columns] of a transformers module, stored as codes.

The module reads a stack under its usual name and gets a `QuantizedStack` instead. A matmul with a stack or
with one of its experts dequantises the weights, and the backward pass dequantises them again. Every other operation on
a `QuantizedStack` gets the dequantised values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep.kernels.quantized.quantized_linear import PARTS, Coding

# The functions that multiply a tensor with a weight [inputs, outputs] or with a stack of such weights.
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch._grouped_mm)


class QuantizedStack:
    """A quantised stack of experts, or one expert of it. Torch calls `__torch_function__` for operations with it."""

    def __init__(
        self, coding: Coding, dtype: torch.dtype, parts: Sequence[torch.Tensor | None], *, transposed: bool = False
    ):
        self.coding, self.dtype, self.transposed = coding, dtype, transposed
        self.parts = list(parts)
        self.requires_grad = False

    @property
    def codes(self) -> torch.Tensor:
        codes = self.parts[0]
        assert codes is not None
        return codes

    @property
    def shape(self) -> torch.Size:
        outer, sides = self.codes.shape[:-2], self.coding.shape[-2:]
        return torch.Size((*outer, *(reversed(sides) if self.transposed else sides)))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def dim(self) -> int:
        return self.codes.ndim

    def size(self, dimension: int | None = None) -> Any:
        return self.shape if dimension is None else self.shape[dimension]

    def __len__(self) -> int:
        return self.shape[0]

    def transpose(self, one: int, other: int) -> Any:
        """Swaps the rows and columns of each matrix. Other transpositions return the dequantised values."""
        if {one % self.ndim, other % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return QuantizedStack(self.coding, self.dtype, self.parts, transposed=not self.transposed)
        return self.dequantized().transpose(one, other)

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    def __getitem__(self, index: Any) -> Any:
        """Returns one expert as a `QuantizedStack` without the first dimension, or dequantised values for other
        indices."""
        if self.ndim != 3 or not (isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() <= 1)):
            return self.dequantized()[index]
        chosen = QuantizedStack(self.coding, self.dtype, [None if part is None else part[index] for part in self.parts])
        chosen.transposed = self.transposed
        return chosen if chosen.ndim == 2 else chosen.dequantized()

    @torch.no_grad()
    def dequantized(self) -> torch.Tensor:
        weight = self.coding.dequantized(self.parts, self.dtype)
        return weight.transpose(-2, -1) if self.transposed else weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        if len(args) >= 2 and isinstance(args[1], QuantizedStack) and isinstance(args[0], torch.Tensor):
            if func is functional.linear:
                product = _StackProduct.apply(args[0], torch.matmul, {}, args[1].mT, *args[1].parts)
                bias = args[2] if len(args) > 2 else more.get("bias")
                return product if bias is None else product + bias
            if func in PRODUCTS and len(args) == 2 and more.get("bias") is None:
                return _StackProduct.apply(args[0], func, more, args[1], *args[1].parts)
        return func(*map(_plain, args), **{name: _plain(one) for name, one in more.items()})


def _plain(argument: Any) -> Any:
    return argument.dequantized() if isinstance(argument, QuantizedStack) else argument


class _StackProduct(torch.autograd.Function):
    """Computes product(input, weights) and saves only the codes. The gradient of the input is the product of the output
    gradient and the transposed weights."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        product: Callable[..., torch.Tensor],
        keywords: Mapping[str, Any],
        stack: QuantizedStack,
        *parts: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(*parts)
        ctx.product, ctx.keywords = product, keywords
        ctx.stack = QuantizedStack(stack.coding, stack.dtype, (), transposed=stack.transposed)
        return product(input, stack.dequantized(), **keywords)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = None
        if ctx.needs_input_grad[0]:
            stack = QuantizedStack(
                ctx.stack.coding, ctx.stack.dtype, ctx.saved_tensors, transposed=ctx.stack.transposed
            )
            found = ctx.product(grads[0], stack.dequantized().transpose(-2, -1), **ctx.keywords)
        return found, None, None, None, *[None] * len(PARTS)


class QuantizedExperts(nn.Module):
    """The part of a class of experts that stores stacks as codes. `stacks` are their codings by name."""

    stacks: dict[str, Coding]
    dtype: torch.dtype

    def stack(self, name: str) -> QuantizedStack:
        coding = self.stacks[name]
        return QuantizedStack(coding, self.dtype, coding.stored(self))

    def divided_parts(self, style: str) -> dict[str, int]:
        """Returns the dimension by which tensor parallelism splits each parameter: complete experts per rank."""
        return {name: 0 for name, parameter in self._parameters.items() if parameter is not None}


def quantize_stacks(
    module: nn.Module, names: Sequence[str], coding: Callable[[tuple[int, ...], str], Coding], dtype: torch.dtype
) -> QuantizedExperts:
    """Replaces the parameters `names` of an expert module by codes without values, and returns the module. `coding`
    returns how a weight of a shape is stored, with a prefix for the names of its parts."""
    stacks = {}
    for name in names:
        parameter = module._parameters.pop(name)
        assert parameter is not None
        stacks[name] = coding(tuple(parameter.shape), f"{name}_")
        stacks[name].register(module, parameter.device)
    # The class of the module reads its weights by name, so the names become properties of a subclass.
    module.__class__ = _with_stacks(type(module), tuple(names))  # type: ignore[arg-type]
    assert isinstance(module, QuantizedExperts)
    module.stacks, module.dtype = stacks, dtype
    return module


def dequantize_stacks(module: QuantizedExperts, dtype: torch.dtype) -> None:
    """Gives the module its own class again, with the dequantised weights as parameters in `dtype`."""
    weights = {name: module.stack(name).dequantized().to(dtype) for name in module.stacks}
    for coding in module.stacks.values():
        for part in coding.shapes():
            del module._parameters[coding.name(part)]
    del module.stacks, module.dtype
    module.__class__ = type(module).__mro__[2]
    for name, weight in weights.items():
        module.register_parameter(name, nn.Parameter(weight, requires_grad=False))


@cache
def _with_stacks(kind: Any, names: tuple[str, ...]) -> Any:
    properties = {name: property(partial(_read_stack, name=name)) for name in names}
    return type(kind.__name__, (QuantizedExperts, kind), {**properties, "__module__": kind.__module__})


def _read_stack(module: QuantizedExperts, name: str) -> QuantizedStack:
    return module.stack(name)


def quantized_experts(model: nn.Module) -> Iterator[tuple[str, QuantizedExperts]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedExperts))
