"""Replaces operators of transformers modules by fused ones. The name of the device's attention kernel selects the fused
operators.

With `model.attention: sdpa` every operator is plain torch, so no fused operator is used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

from torch import nn

from lockstep.kernels.fused_modules import Gather, plug_in
from lockstep.kernels.invariant import products_by_row

# Optional packages that provide kernels.
KERNEL_PACKAGES = ("triton", "torch_npu")


def _by_npu(model: nn.Module, gather: Gather) -> list[str]:
    from lockstep.kernels import fused_modules_npu as npu_modules

    return plug_in(model, npu_modules.KERNELS, gather)


def _by_triton(model: nn.Module, gather: Gather) -> list[str]:
    first = next(model.parameters(), None)
    if importlib.util.find_spec("triton") is None or first is None:
        return []
    from lockstep.kernels import fused_modules_triton as triton_modules
    from lockstep.kernels.triton_math import runs_on

    return plug_in(model, triton_modules.KERNELS, gather) if runs_on(first) else []


# Batch-invariant attention uses the fused modules too, because they compute each row independently.
BY_ROW = "invariant"
FUSED: dict[str, Callable[[nn.Module, Gather], list[str]]] = {
    "npu_fusion": _by_npu,
    "flash_varlen": _by_triton,
    BY_ROW: _by_triton,
}


# Name of the model attribute in which `fuse` lists the replaced modules.
REPLACED = "lockstep_fused"


def fuse(model: nn.Module, kernel: str, gather: Gather = nullcontext) -> None:
    """Installs the device's fused kernels in the model; `replaced` lists them. If the model is sharded, the caller
    first gathers the parameters of the root module. The context manager `gather` gathers the parameters of the other
    modules layer by layer."""
    products_by_row(kernel == BY_ROW)
    setattr(model, REPLACED, FUSED[kernel](model, gather) if kernel in FUSED else [])


def replaced(model: nn.Module) -> list[str]:
    """Returns the names of what `fuse` replaced in a model, even if another module (e.g. a PEFT adapter) wraps the
    model now."""
    # `vars` is used instead of `getattr`, because adapters forward attribute access to the module they wrap.
    return [entry for module in model.modules() for entry in vars(module).get(REPLACED, ())]
