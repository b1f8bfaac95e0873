"""Fused operators inside the modules of transformers, by the name of the device's attention kernel.

`model.attention: sdpa` asks for plain torch throughout, so it switches these off too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

from torch import nn

from lockstep.kernels.fused_modules import Gather, plug_in
from lockstep.kernels.invariant import products_by_row

# Packages that bring kernels of their own, where they are installed.
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


# Where every token gets the same bits whatever stands beside it; the other kernels of its row look at one row anyway.
BY_ROW = "invariant"
FUSED: dict[str, Callable[[nn.Module, Gather], list[str]]] = {
    "npu_fusion": _by_npu,
    "flash_varlen": _by_triton,
    BY_ROW: _by_triton,
}


# Where on a model stands what was replaced in it.
REPLACED = "lockstep_fused"


def fuse(model: nn.Module, kernel: str, gather: Gather = nullcontext) -> None:
    """Put in what the device has; `replaced` tells what that was. Of a model in slices the root is whole by now, and
    `gather` makes the rest so, layer by layer."""
    products_by_row(kernel == BY_ROW)
    setattr(model, REPLACED, FUSED[kernel](model, gather) if kernel in FUSED else [])


def replaced(model: nn.Module) -> list[str]:
    """What `fuse` replaced in a model, also where it stands inside of another module by now."""
    # Of each module's own: adapters hand the attributes of what they stand around on.
    return [line for module in model.modules() for line in vars(module).get(REPLACED, ())]
