"""Linear layers that train with fp8 matmuls: the forward and the gradient of the input in fp8, the gradient of the
weight in the dtype of the model.

The formula is the recipe `rowwise_with_gw_hp` of torchao (`torchao.float8`): inputs and weights have one scale per row
in the forward. The gradient of the output has one scale per row, and there the weight has a single scale. Scales are
powers of two, so that dividing by them does not round. Every tensor is quantised from its current values (dynamic
scaling), so there is no state between steps.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.kernels.quantized.token_products import LARGEST, scaled_mm_fits

Codes = tuple[torch.Tensor, torch.Tensor]
# The smallest magnitude that torchao scales by.
_SMALLEST = 1e-12
# The bits of an fp32 number that are its sign and exponent.
_EXPONENT = 0xFF800000 - (1 << 32)


def power_scale(largest: torch.Tensor) -> torch.Tensor:
    """Returns the factor that maps the magnitude `largest` to the range of e4m3, rounded down to a power of two."""
    scale = (LARGEST["fp8"] / largest.double().clamp(min=_SMALLEST)).float()
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32)


def fp8_codes(x: torch.Tensor) -> Codes:
    """Returns the codes of a matrix, and the factors that restore its rows [rows, 1]."""
    if _has_kernel(x):
        from lockstep.kernels.quantized.token_codes_triton import token_codes_triton

        return token_codes_triton(x, torch.float8_e4m3fn, LARGEST["fp8"], _SMALLEST, power=True)
    scale = power_scale(x.abs().amax(-1, keepdim=True))
    codes = (x.float() * scale).clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(torch.float8_e4m3fn)
    return codes, scale.reciprocal()


def fp8_columns(weight_NK: torch.Tensor, scales_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of the transposed weight [K, N] with one scale, and this scale for each row [K, 1]. `scales_N1`
    are those of the rows of the weight: the largest one is the scale of the whole weight."""
    scale = scales_N1.max()
    if _has_kernel(weight_NK):
        from lockstep.kernels.quantized.token_codes_triton import transposed_codes_triton

        codes = transposed_codes_triton(weight_NK, scale, LARGEST["fp8"])
    else:
        codes = (weight_NK.float() * scale.reciprocal()).clamp(-LARGEST["fp8"], LARGEST["fp8"])
        codes = codes.to(torch.float8_e4m3fn).t().contiguous()
    return codes, scale.expand(weight_NK.shape[1], 1).contiguous()


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and importlib.util.find_spec("triton") is not None


def _product(x: Codes, weight: Codes, like: torch.Tensor, bias_N: torch.Tensor | None, *, fast: bool) -> torch.Tensor:
    """Multiplies codes [T, K] by codes [N, K] with their factors [T, 1] and [N, 1], and adds the bias."""
    (codes_TK, scales_T1), (codes_NK, scales_N1) = x, weight
    if not scaled_mm_fits(codes_TK, codes_NK, like.dtype):
        out = ((codes_TK.float() @ codes_NK.float().t()) * scales_T1 * scales_N1.t()).to(like.dtype)
        return out if bias_N is None else out + bias_N
    return torch._scaled_mm(
        codes_TK,
        codes_NK.t(),
        scale_a=scales_T1,
        scale_b=scales_N1.t(),
        bias=None if bias_N is None else bias_N.to(like.dtype),
        out_dtype=like.dtype,
        use_fast_accum=fast,
    )


class Fp8Product(torch.autograd.Function):
    """`x @ weight.T + bias` for x [T, K]. The input, the weight itself and the scales of its rows are saved for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, codes: Codes | None
    ) -> torch.Tensor:
        weight = fp8_codes(weight_NK)
        ctx.save_for_backward(x_TK, weight_NK, weight[1])
        return _product(codes or fp8_codes(x_TK), weight, x_TK, bias_N, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight_NK, scales_N1 = ctx.saved_tensors
        grad_TN = grads[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(fp8_codes(grad_TN), fp8_columns(weight_NK, scales_N1), grad_TN, None, fast=False)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_TN.t() @ x_TK
        if ctx.needs_input_grad[2]:
            grad_bias = grad_TN.sum(0)
        return grad_x, grad_weight, grad_bias, None


class _LastInput:
    """The codes of the last input. Query, key and value projections have the same input, and so have gate and up
    projections: it is quantised once. The version of a tensor counts its changes in place."""

    def __init__(self) -> None:
        self.of: tuple[weakref.ref[torch.Tensor], int, Codes] | None = None

    def codes(self, x: torch.Tensor) -> Codes:
        last = self.of  # read once: another thread may replace it
        if last is None or last[0]() is not x or last[1] != x._version:
            self.of = last = weakref.ref(x), x._version, fp8_codes(x.detach().reshape(-1, x.shape[-1]))
        return last[2]


_LAST_INPUT = _LastInput()


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Tensors of inference mode do not count their changes.
    codes = None if x.is_inference() else _LAST_INPUT.codes(x)
    out = Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, codes)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class Fp8Forward:
    """The forward of a linear layer that trains in fp8. It keeps a weak reference to the module, like `KernelForward`
    of `fused_modules.py`, but is not of this class: fused layers that read the weight directly must not replace it."""

    def __init__(self, module: nn.Linear):
        self._module = weakref.ref(module)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module()
        assert module is not None  # the caller has a reference to the module
        return fp8_linear(x, module.weight, module.bias)

    def __reduce__(self) -> tuple[type[Fp8Forward], tuple[nn.Linear | None]]:
        return type(self), (self._module(),)


def train_in_fp8(modules: Iterable[nn.Linear]) -> int:
    """Makes linear layers compute in fp8. Returns their number."""
    count = 0
    for module in modules:
        module.__dict__["forward"] = Fp8Forward(module)
        count += 1
    return count


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """Makes the layers of `train_in_fp8` compute in the dtype of the model, as an export of the model does."""
    replaced = [(one, vars(one).pop("forward")) for one in model.modules() if _in_fp8(one)]
    try:
        yield
    finally:
        for module, forward in replaced:
            module.__dict__["forward"] = forward


def _in_fp8(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Fp8Forward)
