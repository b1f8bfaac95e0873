"""Linear layers with a LoRA adapter as one operation: x W + scale (x A) B.

PEFT computes both products and their sum one after the other, and so does its backward pass. Here the second product is
added to the output of the first by its matrix product (`addmm`), in both passes. So no output of the layer's size is
written and read again. The saved tensors are those of PEFT's layer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep.kernels.fused_modules import KernelForward


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        narrow = rows @ a.T
        out = functional.linear(rows, weight, bias)
        out.addmm_(narrow, b.T, alpha=scale)
        ctx.save_for_backward(x, weight, a, b, narrow)
        ctx.scale = scale
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, a, b, narrow = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        grad_narrow = (grad @ b) * ctx.scale
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            grad_x = grad_x.addmm_(grad_narrow, a).view_as(x)
        if ctx.needs_input_grad[3]:
            grad_a = grad_narrow.T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[4]:
            grad_b = (grad.T @ narrow) * ctx.scale
        return grad_x, None, None, grad_a, grad_b, None


def _forward(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    """Replaces the forward of PEFT's LoRA layer, and calls it for everything but one plain adapter."""
    names = [name for name in self.active_adapters if name in self.lora_A]
    if len(args) != 1 or more or self.disable_adapters or self.merged or len(names) != 1:
        return type(self).forward(self, *args, **more)
    (x,), (name,) = args, names
    base, a, b, dropout = self.base_layer, self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
    drops = not isinstance(dropout, nn.Identity) and dropout.training and dropout.p > 0
    if drops or name in self.lora_variant or torch.is_autocast_enabled(x.device.type) or b.bias is not None:
        return type(self).forward(self, x)
    if base.weight.requires_grad or not all(is_plain_linear(one, x) for one in (base, a, b)):
        return type(self).forward(self, x)
    out: torch.Tensor = _AdaptedLinear.apply(x, base.weight, base.bias, a.weight, b.weight, self.scaling[name])
    return out


def is_plain_linear(module: nn.Module, x: torch.Tensor) -> bool:
    """Returns whether the module is a plain `nn.Linear` without hooks in the dtype of `x`, so that a kernel may use its
    weight directly."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    has_hooks = any(hooks) or nn.modules.module._has_any_global_hook()
    return not has_hooks and type(module.weight.data) is torch.Tensor and module.weight.dtype == x.dtype


def join_adapters(decoder: nn.Module) -> None:
    """Lets the linear layers with an adapter compute the adapter together with their own product."""
    if "peft" not in sys.modules:  # no layer is PEFT's, and its import takes a second
        return
    from peft.tuners.lora.layer import Linear

    for module in decoder.modules():
        if type(module) is Linear and "forward" not in vars(module):
            vars(module)["forward"] = KernelForward(_forward, module)
