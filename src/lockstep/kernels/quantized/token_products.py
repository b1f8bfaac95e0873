"""Products with quantised weights and quantised inputs (W8A8), in plain torch.

Every row of the input (a token) has its own scale, which is computed in the forward pass, so there is no calibration.
Tensor names end with their dimensions: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch

from lockstep.kernels.fused_modules import KernelTrial
from lockstep.kernels.npu_limits import quant_problem
from lockstep.kernels.quantized.formats import Quantized, divided
from lockstep.kernels.quantized.int8_npu import npu_int8_product

LARGEST = {"int8": 127.0, "fp8": 448.0}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# A row of zeros gets this scale, so that no division by zero occurs.
SMALLEST_SCALE = 2.0**-126
# torch._int_mm on NVIDIA devices needs more than 16 rows.
_LEAST_ROWS = 17
# Matrix units read 16 values at a time.
_STEP = 16


class TokenCodes(NamedTuple):
    """Quantised rows, one scale per row in fp32, and the dtype that products of these rows have."""

    codes_TK: torch.Tensor
    scales_T1: torch.Tensor
    dtype: torch.dtype


def token_codes(x_TK: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of each row and its scale in fp32 [T, 1]. The formulas are those of `formats.quantize`, without
    its check for NaN, which would wait for the device. A row with NaN or infinity has no finite product."""
    if x_TK.is_cuda and importlib.util.find_spec("triton") is not None:
        from lockstep.kernels.quantized.token_codes_triton import token_codes_triton

        flat = x_TK.reshape(-1, x_TK.shape[-1])
        codes, scale = token_codes_triton(flat, CODES[format], LARGEST[format], SMALLEST_SCALE)
        return codes.view(x_TK.shape), scale.view(*x_TK.shape[:-1], 1)
    wide = x_TK.float()
    scale = divided(wide.abs().amax(-1, keepdim=True), LARGEST[format]).clamp(min=SMALLEST_SCALE)
    # Devices divide each element slower than they multiply it.
    codes = wide * (1.0 / scale)
    if format == "int8":
        codes = torch.round(codes)
    return codes.clamp(-LARGEST[format], LARGEST[format]).to(CODES[format]), scale


def _quantised(x_TK: torch.Tensor | TokenCodes, format: str) -> TokenCodes:
    return x_TK if isinstance(x_TK, TokenCodes) else TokenCodes(*token_codes(x_TK, format), x_TK.dtype)


def quantized_product(
    x: torch.Tensor | TokenCodes, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `x @ weight.T + bias` in the dtype of `x`, with the rows of `x` quantised to the format of the weight."""
    assert weight.scales is not None
    flat = x if isinstance(x, TokenCodes) else x.reshape(-1, x.shape[-1])
    if weight.format == "fp8":
        out = fp8_product(flat, weight.codes, weight.scales, bias)
    else:
        out = int8_product(flat, weight.codes, weight.scales)
        out = out if bias is None else out + bias
    return out if isinstance(x, TokenCodes) else out.reshape(*x.shape[:-1], weight.codes.shape[0])


def fp8_product(
    x_TK: torch.Tensor | TokenCodes,
    codes_NK: torch.Tensor,
    scales_N1: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    codes_TK, scales_T1, dtype = x_TK = _quantised(x_TK, "fp8")
    if not scaled_mm_fits(codes_TK, codes_NK, dtype):
        out = dequantized_product(x_TK, codes_NK, scales_N1, "fp8")
        return out if bias_N is None else out + bias_N
    return torch._scaled_mm(
        codes_TK,
        codes_NK.t(),
        scale_a=scales_T1,
        scale_b=scales_N1.t(),
        bias=None if bias_N is None else bias_N.to(dtype),
        out_dtype=dtype,
        use_fast_accum=True,
    )


def scaled_mm_fits(codes_TK: torch.Tensor, codes_NK: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether torch's scaled matmul with one scale per row supports these matrices and this dtype of the
    result. On a CPU it depends on the processor which code runs, so plain matmuls are used there."""
    if not len(codes_TK) or codes_TK.device.type == "cpu":
        return False
    outputs, inputs = codes_NK.shape
    return dtype is torch.bfloat16 and inputs % _STEP == 0 and outputs % _STEP == 0


def int8_product(x_TK: torch.Tensor | TokenCodes, codes_NK: torch.Tensor, scales_N1: torch.Tensor) -> torch.Tensor:
    """The sums are exact integers, so that the result of a row does not depend on the other rows."""
    device = codes_NK.device.type
    if device == "npu" and isinstance(x_TK, torch.Tensor) and quant_problem(x_TK, codes_NK) is None:
        return npu_int8_product(x_TK, codes_NK, scales_N1)
    outputs, inputs = codes_NK.shape
    codes_TK, scales_T1, dtype = x_TK = _quantised(x_TK, "int8")
    if device == "cpu":
        sums_TN = codes_TK.double() @ codes_NK.double().t()  # exact on every processor
    elif device == "npu" or inputs % _STEP or outputs % _STEP:
        return dequantized_product(x_TK, codes_NK, scales_N1, "int8")
    else:
        found = _fused_int8_product(codes_TK, scales_T1, codes_NK, scales_N1, dtype)
        if found is not None:
            return found
        sums_TN = _integer_sums(codes_TK, codes_NK)
    return (sums_TN.float() * scales_T1 * scales_N1.t()).to(dtype)


def _integer_sums(codes_TK: torch.Tensor, codes_NK: torch.Tensor) -> torch.Tensor:
    rows = len(codes_TK)
    if rows < _LEAST_ROWS:
        codes_TK = torch.nn.functional.pad(codes_TK, (0, 0, 0, _LEAST_ROWS - rows))
    return torch._int_mm(codes_TK, codes_NK.t())[:rows]


def _fused_int8_product(
    codes_TK: torch.Tensor, scales_T1: torch.Tensor, codes_NK: torch.Tensor, scales_N1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Returns the product by the Triton kernel, or None if the kernel cannot be used. Its bits are those of plain
    torch."""
    if importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels.quantized.token_codes_triton import int8_product_fits, int8_product_triton

    if not int8_product_fits(codes_TK, codes_NK) or not _fused_int8_works(codes_TK.device, dtype):
        return None
    return int8_product_triton(codes_TK, scales_T1, codes_NK, scales_N1, dtype)


@cache
def _fused_int8_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernel gives the bits of plain torch for numbers of rows with different tiles (the trial)."""
    from lockstep.kernels.fused_modules_triton import KERNELS
    from lockstep.kernels.quantized.token_codes_triton import int8_product_triton

    draw = torch.Generator().manual_seed(0)

    def codes(rows: int) -> torch.Tensor:
        return torch.randint(-127, 128, (rows, 208), generator=draw, dtype=torch.int8).to(device)

    inputs, weight = [codes(rows) for rows in (20, 140, 300, 17000)], codes(80)
    scales = torch.rand(17000, 1, generator=draw).to(device)

    def plain(rows: torch.Tensor) -> torch.Tensor:
        sums = _integer_sums(rows, weight).float()
        return (sums * scales[: len(rows)] * scales[:80].t()).to(dtype)

    def fused(rows: torch.Tensor) -> torch.Tensor:
        return int8_product_triton(rows, scales[: len(rows)], weight, scales[:80], dtype)

    exact = KernelTrial({dtype: 0.0}, smallest=1e-20, gradients=False, wait=lambda: None, errors=KERNELS.trial.errors)
    return exact.alike(
        "the product of int8 matrices", "the Triton kernel", lambda: [plain(rows) for rows in inputs],
        lambda: [fused(rows) for rows in inputs],
    )  # fmt: skip


def dequantized_product(
    x_TK: torch.Tensor | TokenCodes, codes_NK: torch.Tensor, scales_N1: torch.Tensor, format: str
) -> torch.Tensor:
    """The same product without the device's matrix units for eight bits: both matrices are dequantised to fp32."""
    codes_TK, scales_T1, dtype = _quantised(x_TK, format)
    return ((codes_TK.float() @ codes_NK.float().t()) * scales_T1 * scales_N1.t()).to(dtype)
