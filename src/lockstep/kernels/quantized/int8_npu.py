"""The int8 product with torch_npu's operators. Not yet run on Ascend hardware."""

from __future__ import annotations

import torch


def npu_int8_product(x_TK: torch.Tensor, codes_NK: torch.Tensor, scales_N1: torch.Tensor) -> torch.Tensor:
    """Multiplies the quantised rows of `x_TK` by quantised weights. `npu_limits.quant_problem` checks the limits."""
    import torch_npu

    codes_TK, scales_T = torch_npu.npu_dynamic_quant(x_TK)
    out: torch.Tensor = torch_npu.npu_quant_matmul(
        codes_TK, codes_NK.t(), scales_N1[:, 0].contiguous(), pertoken_scale=scales_T, output_dtype=x_TK.dtype
    )
    return out
