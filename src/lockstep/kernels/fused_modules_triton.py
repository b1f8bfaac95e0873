"""Triton kernels that replace the RMSNorm, gated MLP and rotary embedding of transformers models."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError

from lockstep.kernels.fused_modules import (
    PROJECTIONS,
    DeviceKernels,
    KernelTrial,
    ModuleKernel,
    RotaryKernel,
    epsilon_of,
    is_rms_norm,
    is_silu_gated,
)
from lockstep.kernels.norm_triton import norm_fits, rms_norm
from lockstep.kernels.rotary_triton import rotary_fits, rotate
from lockstep.kernels.swiglu_triton import gated, swiglu
from lockstep.kernels.triton_math import runs_on


def _norm(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or torch.is_autocast_enabled(args[0].device.type) or not norm_fits(args[0], self.weight):
        return type(self).forward(self, *args, **more)
    epsilon = epsilon_of(self)
    assert epsilon is not None
    return rms_norm(args[0], self.weight, epsilon)


def _gated(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or not runs_on(args[0]) or torch.is_autocast_enabled(args[0].device.type):
        return type(self).forward(self, *args, **more)
    (x,) = args
    projections = [getattr(self, name) for name in PROJECTIONS]
    if all(_bare(projection, x) for projection in projections):
        return gated(x, *(projection.weight for projection in projections))
    gate, up, down = projections
    return down(swiglu(gate(x), up(x)))


def _bare(module: nn.Module, x: torch.Tensor) -> bool:
    """Returns whether the module is a plain `nn.Linear` without bias and hooks, so that a kernel may use its weight
    directly."""
    if type(module) is not nn.Linear or module.bias is not None or "forward" in vars(module):
        return False
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    has_hooks = any(hooks) or nn.modules.module._has_any_global_hook()
    return not has_hooks and type(module.weight.data) is torch.Tensor and module.weight.dtype == x.dtype


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the rotary embedding to queries and keys. The signature is that of `apply_rotary_pos_emb` in
    transformers. `_rotary_fits` accepts only the default `unsqueeze_dim`, so it is ignored here."""
    return rotate(q, k, cos, sin)


def _rotary_fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> bool:
    return unsqueeze_dim == 1 and rotary_fits(q, k, cos, sin)


KERNELS = DeviceKernels(
    modules=(ModuleKernel("triton_norm", is_rms_norm, _norm), ModuleKernel("triton_swiglu", is_silu_gated, _gated)),
    rotary=RotaryKernel("triton_rotary", _rotate, _rotary_fits, marks=lambda embedding: True, only_tried=False),
    # These Triton kernels round at the same points as the transformers modules, but sum in a different order. Launch
    # errors of a kernel are raised when the trial reads its results, so the trial needs no explicit synchronisation.
    trial=KernelTrial(
        {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3},
        smallest=1e-20,
        gradients=True,
        wait=lambda: None,
        errors=(TypeError, RuntimeError, ValueError, AttributeError, OSError, subprocess.SubprocessError, TritonError),
    ),
)
