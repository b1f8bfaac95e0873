"""Dequantises weights, and multiplies by quantised weights, with the device's kernel or in plain torch.

The first use of a kernel for a format, dtype and device is a trial against plain torch. A kernel that fails, or whose
results differ, is not used.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch.nn.functional import linear

from lockstep.kernels.fused_modules import KernelTrial, drawn
from lockstep.kernels.invariant import rows_are_separate
from lockstep.kernels.quantized import formats
from lockstep.kernels.quantized.formats import Quantized

# Rows and columns of the weight of a trial: several groups of scales, a last block of a row that is shorter.
TRIAL_SHAPE = (96, 712)
# A dequantised value has the same bits. A product sums in another order.
EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
SUMMED = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def dequantize(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`formats.dequantize`, by the device's kernel where it gives the same bits."""
    if _has_triton() and dtype in EXACT:
        from lockstep.kernels.quantized import product_triton

        if product_triton.dequantize_fits(q) and _dequantizes(q.format, q.double, dtype, q.device):
            return product_triton.dequantize(q, dtype)
    return formats.dequantize(q, dtype)


def matmul(x: torch.Tensor, q: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times the transposed weight, plus `bias`, in `dtype`. The kernel for few rows has no gradient; with a
    gradient, and with batch-invariant products, the weight is dequantised and multiplied by torch."""
    x = x.to(dtype)
    if _has_triton() and dtype in SUMMED and not (torch.is_grad_enabled() and x.requires_grad):
        from lockstep.kernels.quantized import product_triton

        if (
            product_triton.product_fits(x, q)
            and not rows_are_separate()
            and _multiplies(q.format, q.double, dtype, q.device)
        ):
            found = product_triton.product(x, q)
            return found if bias is None else found + bias
    return linear(x, dequantize(q, dtype), bias)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _dequantizes(format: str, double: bool, dtype: torch.dtype, device: torch.device) -> bool:
    from lockstep.kernels.quantized import product_triton

    q = _drawn_weight(format, double, device)
    return _trial(EXACT).alike(
        f"dequantising {format}",
        "the Triton kernel",
        lambda: [formats.dequantize(q, dtype)],
        lambda: [product_triton.dequantize(q, dtype)],
    )


@cache
def _multiplies(format: str, double: bool, dtype: torch.dtype, device: torch.device) -> bool:
    from lockstep.kernels.quantized import product_triton

    q = _drawn_weight(format, double, device)
    x = drawn(5, TRIAL_SHAPE[1], like=torch.empty(0, dtype=dtype, device=device), seed=1)
    return _trial(SUMMED).alike(
        f"the product with {format} weights",
        "the Triton kernel",
        lambda: [linear(x, formats.dequantize(q, dtype))],
        lambda: [product_triton.product(x, q)],
    )


def _drawn_weight(format: str, double: bool, device: torch.device) -> Quantized:
    weight = torch.randn(TRIAL_SHAPE, generator=torch.Generator().manual_seed(0))
    return formats.quantize(weight, format, double).to(device)


def _trial(tolerance: dict[torch.dtype, float]) -> KernelTrial:
    from lockstep.kernels.fused_modules_triton import KERNELS

    return KernelTrial(tolerance, smallest=1e-20, gradients=False, wait=lambda: None, errors=KERNELS.trial.errors)
