"""SwiGLU: the first half of a dimension, through SiLU, gates the second."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import limit, reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@reference("npu_swiglu")
def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    limit("npu_swiglu", x.dtype in _DTYPES and 1 <= x.dim() <= 8, f"{x.dtype} with {x.dim()} dimensions: 1 to 8")
    limit("npu_swiglu", x.shape[dim] % 2 == 0, f"{x.shape[dim]} cannot be halved")
    gate, value = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype)


@reference("npu_swiglu_backward")
def swiglu_backward(gradient: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, value = x.float().chunk(2, dim)
    wide, slope = gradient.float(), gate.sigmoid()
    by_gate = wide * value * slope * (1 + gate * (1 - slope))
    return torch.cat([by_gate, wide * gate * slope], dim).to(x.dtype)
