"""Triton kernels that replace the RMSNorm, gated MLP, experts and rotary embedding of transformers models."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from triton.errors import TritonError

from lockstep.kernels.adapted_linear import is_plain_linear
from lockstep.kernels.decode.experts_triton import experts, experts_fit
from lockstep.kernels.experts.adapted_experts_triton import adapted
from lockstep.kernels.experts.grouped_experts import (
    ADAPTERS,
    EXCHANGE,
    Moves,
    grouped_experts,
    has_experts_elsewhere,
)
from lockstep.kernels.experts.grouped_experts_triton import gate, to_experts, to_tokens
from lockstep.kernels.experts.router_triton import gates, router_fits
from lockstep.kernels.fused_modules import (
    GELU_TANH,
    PROJECTIONS,
    DeviceKernels,
    KernelTrial,
    ModuleKernel,
    RotaryKernel,
    adds_one,
    are_experts,
    epsilon_of,
    gate_dtype,
    gates_first,
    is_gated_norm,
    is_gelu_gated,
    is_rms_norm,
    is_router,
    is_silu_gated,
    norm_groups,
)
from lockstep.kernels.norm_triton import norm_fits, rms_norm
from lockstep.kernels.recurrent.gated_norm_triton import gated_norm, gated_norm_fits
from lockstep.kernels.rotary_triton import rotary_fits, rotate
from lockstep.kernels.swiglu_triton import gated, swiglu
from lockstep.kernels.triton_math import runs_on


def _norm(self: Any, *args: Any, unit_offset: bool = False, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or torch.is_autocast_enabled(args[0].device.type) or not norm_fits(args[0], self.weight):
        return type(self).forward(self, *args, **more)
    epsilon = epsilon_of(self)
    assert epsilon is not None
    return rms_norm(args[0], self.weight, epsilon, unit_offset)


def _gated_norm(self: Any, *args: Any, first: bool = False, **more: Any) -> torch.Tensor:
    autocast, groups = torch.is_autocast_enabled(self.weight.device.type), norm_groups(self)
    if len(args) != 2 or more or autocast or not gated_norm_fits(*args, self.weight, groups):
        return type(self).forward(self, *args, **more)
    epsilon = epsilon_of(self)
    assert epsilon is not None
    return gated_norm(*args, self.weight, epsilon, first, groups)


def _gated(self: Any, *args: Any, gelu: bool = False, **more: Any) -> torch.Tensor:
    if len(args) != 1 or more or not runs_on(args[0]) or torch.is_autocast_enabled(args[0].device.type):
        return type(self).forward(self, *args, **more)
    (x,) = args
    projections = [getattr(self, name) for name in PROJECTIONS]
    if all(is_plain_linear(one, x) and one.bias is None for one in projections):
        gate, up, down = (projection.weight for projection in projections)
        return gated(x, gate, up, down, gelu)
    gate, up, down = projections
    return down(swiglu(gate(x), up(x), gelu))


def _experts(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    """Computes experts: a fused kernel for few tokens without gradients, and grouped products for many tokens, for
    adapters and for experts that are divided over ranks."""
    own = ADAPTERS in vars(self) or EXCHANGE in vars(self)  # what the forward of transformers does not know
    if len(args) != 3 or more or not runs_on(args[0]) or torch.is_autocast_enabled(args[0].device.type):
        return (grouped_experts if own else type(self).forward)(self, *args, **more)
    gelu = type(self.act_fn).__name__ in GELU_TANH
    if not (own or has_experts_elsewhere(self)) and experts_fit(args[0], args[1], self.gate_up_proj, self.down_proj):
        return experts(*args, self.gate_up_proj, self.down_proj, gelu=gelu)
    return grouped_experts(self, *args, moves=Moves(to_experts, to_tokens, partial(gate, gelu=gelu), adapted))


def _router(self: Any, *args: Any, dtype: torch.dtype | None = None, **more: Any) -> Any:
    weight = self.weight
    if len(args) != 1 or more or not runs_on(args[0]) or torch.is_autocast_enabled(args[0].device.type):
        return type(self).forward(self, *args, **more)
    logits = functional.linear(args[0].reshape(-1, weight.shape[1]), weight)
    normalised = getattr(self, "norm_topk_prob", True)
    return logits, *gates(logits, self.top_k, normalised, dtype or logits.dtype)


def _is_router(module: nn.Module, in_fp32: bool) -> bool:
    if not is_router(module) or not router_fits(cast(Any, module)):
        return False
    dtype, weight = gate_dtype(module), cast(torch.Tensor, module.weight)
    return dtype == torch.float32 != weight.dtype if in_fp32 else dtype == weight.dtype


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the rotary embedding to queries and keys. The signature is that of `apply_rotary_pos_emb` in
    transformers. `_rotary_fits` accepts only the default `unsqueeze_dim`, so it is ignored here."""
    return rotate(q, k, cos, sin)


def _rotary_fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> bool:
    return unsqueeze_dim == 1 and rotary_fits(q, k, cos, sin)


KERNELS = DeviceKernels(
    modules=(
        ModuleKernel("triton_norm", lambda module: is_rms_norm(module) and not adds_one(module), _norm),
        ModuleKernel(
            "triton_norm of 1 + weight",
            lambda module: is_rms_norm(module) and adds_one(module),
            partial(_norm, unit_offset=True),
        ),
        ModuleKernel(
            "triton_gated_norm",
            lambda module: is_gated_norm(module) and not gates_first(module),
            _gated_norm,
            inputs=2,
        ),
        ModuleKernel(
            "triton_gated_norm with the gate first",
            lambda module: is_gated_norm(module) and gates_first(module),
            partial(_gated_norm, first=True),
            inputs=2,
        ),
        ModuleKernel("triton_swiglu", is_silu_gated, _gated),
        ModuleKernel("triton_geglu", is_gelu_gated, partial(_gated, gelu=True)),
        ModuleKernel("triton_experts", are_experts, _experts, generates=True),
        ModuleKernel("triton_router", partial(_is_router, in_fp32=False), _router, routes=True),
        ModuleKernel(
            "triton_router with gates in fp32",
            partial(_is_router, in_fp32=True),
            partial(_router, dtype=torch.float32),
            routes=True,
        ),
    ),
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
