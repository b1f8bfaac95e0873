"""Uses torch_npu's fused operators for transformers modules, within their documented limits.

npu_rotary_mul takes cos and sin within [-1, 1] only. Some rotary embeddings (such as YaRN) multiply cos and sin by
`attention_scaling`. If `attention_scaling` is above 1, plain torch computes the rotation. Only `attention_scaling` is
checked, because reading the values of cos and sin would sync with the device in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.kernels.attention.npu_attention import wait
from lockstep.kernels.fused_modules import (
    DeviceKernels,
    KernelTrial,
    ModuleKernel,
    RotaryKernel,
    epsilon_of,
    is_gated,
    is_rms_norm,
    own_forward,
    scales_of,
)
from lockstep.kernels.npu_limits import norm_problem, rotary_problem, swiglu_problem


def rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    import torch_npu

    if norm_problem(hidden_states, self.weight) is not None:
        return own_forward(self, hidden_states)
    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=epsilon_of(self))[0]


def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    import torch_npu

    both = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
    if swiglu_problem(both) is not None:
        return own_forward(self, x)
    return self.down_proj(torch_npu.npu_swiglu(both, dim=-1))


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch_npu

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


def _rotary_fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> bool:
    if q.device.type != "npu":
        return False
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return all(rotary_problem(x, cos, sin) is None for x in (q, k))


def _unscaled(embedding: nn.Module) -> bool:
    return all(abs(scale) <= 1 for scale in scales_of(embedding))


KERNELS = DeviceKernels(
    modules=(ModuleKernel("npu_rms_norm", is_rms_norm, rms_norm), ModuleKernel("npu_swiglu", is_gated, gated)),
    rotary=RotaryKernel("npu_rotary_mul", rotate, _rotary_fits, _unscaled, only_tried=True),
    # The torch_npu operators round intermediate results at different points than the transformers modules.
    trial=KernelTrial(
        {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}, smallest=1.0, gradients=False, wait=wait
    ),
)
