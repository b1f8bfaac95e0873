"""Host kernels for what torch_npu would run on the device: aten operators in C++, fused operators in Python."""

from __future__ import annotations

import ctypes

from ascend_emulator import build

_INTERPOSER = build.LIBRARIES / "libfallback_interposer.so"


def load_interposer() -> None:
    """Before torch_npu is loaded: stands between it and torch's CPU fall-back, for everybody."""
    ctypes.CDLL(str(_INTERPOSER), ctypes.RTLD_GLOBAL)


def install() -> None:
    """After torch_npu is imported: every kernel that the emulation has."""
    from ascend_emulator import report
    from ascend_emulator.kernels import aten, fused

    aten.install(ctypes.CDLL(str(_INTERPOSER)))
    fused.install()
    report.write_at_exit()
