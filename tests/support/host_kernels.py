"""Kernels of the host for a model's modules, of torch's own functions: what a device's own row is on others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.kernels.fused_modules import (
    DeviceKernels,
    KernelTrial,
    ModuleKernel,
    RotaryKernel,
    epsilon_of,
    is_gated,
    is_rms_norm,
    scales_of,
)

turned: list[tuple[int, ...]] = []


def host_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, self.weight.shape, self.weight, epsilon_of(self))


def host_gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def host_rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    turned.append(tuple(q.shape))
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat(
            [
                low * cos.chunk(2, -1)[0] - high * sin.chunk(2, -1)[0],
                high * cos.chunk(2, -1)[0] + low * sin.chunk(2, -1)[0],
            ],
            -1,
        )

    return turn(q), turn(k)


def takes_all(*given: Any) -> bool:
    return True


def unscaled(module: nn.Module) -> bool:
    return all(abs(scale) <= 1 for scale in scales_of(module))


HOST = DeviceKernels(
    (ModuleKernel("host_norm", is_rms_norm, host_norm), ModuleKernel("host_gated", is_gated, host_gated)),
    RotaryKernel("host_rotary", host_rotate, takes_all, unscaled, only_tried=True),
    KernelTrial({torch.float32: 1e-5, torch.bfloat16: 3e-2}, smallest=1.0, gradients=True, wait=lambda: None),
)
