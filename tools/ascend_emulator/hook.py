"""Puts the host kernels in place as soon as an interpreter has imported torch_npu, whoever imports it, and no earlier.

The interpreters that never do (pip, a compiler's helper) pay nothing: this module imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "torch_npu"


class _KernelInstaller(Loader):
    """The loader of the package, with a step before and a step after."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from ascend_emulator import kernels

        # The loader binds torch_npu's symbols while it is imported, so the interposer has to be there before.
        kernels.load_interposer()
        self._inner.exec_module(module)
        kernels.install()


class _TorchNpuFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _KernelInstaller(spec.loader)
        return spec


def wait_for_torch_npu() -> None:
    sys.meta_path.insert(0, _TorchNpuFinder())
