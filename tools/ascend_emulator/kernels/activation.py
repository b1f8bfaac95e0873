"""SwiGLU: the first half of a dimension, through SiLU, gates the second."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import reference


@reference("npu_swiglu")
def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, value = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * value).to(x.dtype)


@reference("npu_swiglu_backward")
def swiglu_backward(gradient: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, value = x.float().chunk(2, dim)
    wide, slope = gradient.float(), gate.sigmoid()
    by_gate = wide * value * slope * (1 + gate * (1 - slope))
    return torch.cat([by_gate, wide * gate * slope], dim).to(x.dtype)
