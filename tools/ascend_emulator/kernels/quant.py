"""Products of int8 matrices with scales: what torch_npu documents for Atlas A2 and A3."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import limit, reference, refuse

_HALF = (torch.float16, torch.bfloat16)
_LONGEST = 65535


@reference("npu_dynamic_quant")
def dynamic_quant(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of int8 with one scale each: scale = largest magnitude / 127, code = round(x / scale)."""
    name = "npu_dynamic_quant"
    refuse(name, smooth_scales=smooth_scales, group_index=group_index, dst_type_max=dst_type_max)
    # 1 is the number of torch.int8.
    limit(name, dst_type in (None, 1) and quant_mode == "pertoken", f"{quant_mode} to type {dst_type}")
    limit(name, x.dtype in _HALF and x.dim() > 1, f"{x.dtype} with {x.dim()} dimensions: half precision, at least 2")
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, wide / scale, torch.zeros_like(wide)).round().clamp(-127, 127)
    return codes.to(torch.int8), scale[..., 0]


@reference("npu_quant_matmul")
def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | int | None = None,
    **others: object,
) -> torch.Tensor:
    """x1 [m, k] @ x2 [k, n] in integers, times the scale of each row and of each column."""
    name = "npu_quant_matmul"
    refuse(name, offset=offset, bias=bias, **others)
    limit(name, x1.dtype == x2.dtype == torch.int8, f"{x1.dtype} and {x2.dtype}: both int8")
    limit(name, x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], f"{tuple(x1.shape)} @ {tuple(x2.shape)}")
    limit(name, max(x1.shape[1], x2.shape[1]) <= _LONGEST, f"rows of {x1.shape[1]} and {x2.shape[1]}")
    limit(name, x1.numel() > 0 and x2.numel() > 0, "an empty matrix")
    limit(name, pertoken_scale is not None, "no pertoken_scale")
    assert pertoken_scale is not None
    kept = pertoken_scale.dtype == torch.float32 and pertoken_scale.shape == (x1.shape[0],)
    limit(name, kept, f"pertoken_scale {pertoken_scale.dtype} {tuple(pertoken_scale.shape)}")
    # The numbers of torch.float16 and torch.bfloat16.
    dtype = {5: torch.float16, 15: torch.bfloat16}.get(output_dtype, output_dtype)  # type: ignore[call-overload]
    limit(name, dtype in _HALF, f"output {output_dtype}")
    scales = (torch.float32, torch.bfloat16) if dtype is torch.bfloat16 else (torch.float32,)
    kept = scale.dtype in scales and scale.shape in ((1,), (x2.shape[1],))
    limit(name, kept, f"scale {scale.dtype} {tuple(scale.shape)} for {dtype}")
    sums = x1.int() @ x2.int()
    return (sums.float() * scale.float() * pertoken_scale[:, None]).to(dtype)
