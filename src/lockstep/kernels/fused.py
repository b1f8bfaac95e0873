"""Fused operators inside the modules of transformers, by the name of the device's attention kernel.

`model.attention: sdpa` asks for plain torch throughout, so it switches these off too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lockstep.kernels import npu_modules

# Packages that bring kernels of their own, where they are installed.
KERNEL_PACKAGES = ("triton", "torch_npu")

FUSED: dict[str, Callable[[nn.Module], list[str]]] = {"npu_fusion": npu_modules.plug_in}


def fuse(model: nn.Module, kernel: str) -> list[str]:
    """Put in what the device has; returns what was replaced."""
    return FUSED[kernel](model) if kernel in FUSED else []
