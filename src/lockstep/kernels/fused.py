"""Replaces operators of transformers modules by fused ones. The name of the device's attention kernel selects the fused
operators.

With `model.attention: sdpa` every operator is plain torch, so no fused operator is used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from torch import nn

from lockstep.kernels.adapted_linear import join_adapters
from lockstep.kernels.experts.grouped_experts import grouped_experts, stacks_experts
from lockstep.kernels.fused_modules import Gather, KernelForward, plug_in
from lockstep.kernels.invariant import products_by_row
from lockstep.kernels.recurrent.package_kernels import guard_packages

# Optional packages that provide kernels.
KERNEL_PACKAGES = ("triton", "torch_npu")


def _by_npu(model: nn.Module, gather: Gather) -> list[str]:
    from lockstep.kernels import fused_modules_npu as npu_modules

    # transformers counts the tokens of experts with torch.histc, for which a device may have no integer kernel.
    for module in model.modules():
        if stacks_experts(module) and "forward" not in vars(module):
            module.forward = KernelForward(grouped_experts, module)
    return plug_in(model, npu_modules.KERNELS, gather)


def _by_triton(model: nn.Module, gather: Gather, by_row: bool = False) -> list[str]:
    first = next(model.parameters(), None)
    if importlib.util.find_spec("triton") is None or first is None:
        return []
    from lockstep.kernels import fused_modules_triton as triton_modules
    from lockstep.kernels.recurrent.rule_functions import plug_rules
    from lockstep.kernels.triton_math import runs_on

    if not runs_on(first):
        return []
    kernels = triton_modules.KERNELS
    if by_row:
        kernels = kernels._replace(modules=tuple(kernel for kernel in kernels.modules if not kernel.generates))
        return plug_in(model, kernels, gather)
    return plug_in(model, kernels, gather) + plug_rules(model)


# Batch-invariant attention uses the fused modules too, because they compute each row independently. Kernels for
# generation alone give other bits than training.
BY_ROW = "invariant"
FUSED: dict[str, Callable[[nn.Module, Gather], list[str]]] = {
    "npu_fusion": _by_npu,
    "flash_varlen": _by_triton,
    BY_ROW: partial(_by_triton, by_row=True),
}


# Name of the model attribute in which `fuse` lists the replaced modules.
REPLACED = "lockstep_fused"


def fuse(model: nn.Module, kernel: str, gather: Gather = nullcontext) -> None:
    """Installs the device's fused kernels in the model; `replaced` lists them. If the model is sharded, the caller
    first gathers the parameters of the root module. The context manager `gather` gathers the parameters of the other
    modules layer by layer."""
    products_by_row(kernel == BY_ROW)
    guard_packages(model)
    setattr(model, REPLACED, FUSED[kernel](model, gather) if kernel in FUSED else [])


def fuse_adapters(decoder: nn.Module, kernel: str) -> None:
    """Lets the layers of a decoder compute their LoRA adapters together with their own products, if the device's
    kernels are used. Other kernels would give other bits for one row than for many (`invariant`)."""
    if kernel in FUSED and kernel != BY_ROW:
        join_adapters(decoder)


def replaced(model: nn.Module) -> list[str]:
    """Returns the names of what `fuse` replaced in a model, even if another module (e.g. a PEFT adapter) wraps the
    model now."""
    # `vars` is used instead of `getattr`, because adapters forward attribute access to the module they wrap.
    return [entry for module in model.modules() for entry in vars(module).get(REPLACED, ())]
