"""The aten operators of torch_npu on the host: the Python side of host/host_kernels.cpp."""

from __future__ import annotations

import ctypes

import torch

from ascend_emulator import build

# Kernels of torch_npu that touch nothing but memory and metadata, which the emulated runtime has: they run unchanged.
KEPT = """
empty.memory_format empty_strided empty_like new_empty new_empty_strided
as_strided view view.dtype _reshape_alias alias detach unfold
resize_ set_ set_.source_Tensor set_.source_Storage set_.source_Storage_storage_offset
_to_copy to.dtype_layout to.device to.dtype to.other _to_cpu clone_
_local_scalar_dense record_stream is_pinned _pin_memory _has_compatible_shallow_copy_type
_fused_sdp_choice
"""

_library = ctypes.CDLL(str(build.LIBRARIES / "libhost_kernels.so"))
_library.ascend_emulator_install.argtypes = [ctypes.c_char_p]
_library.ascend_emulator_log.argtypes = [ctypes.c_bool]
_library.ascend_emulator_log.restype = ctypes.c_char_p
_library.ascend_emulator_clear_log.restype = None

# Registrations last as long as the object that made them.
_aten = torch.library.Library("aten", "IMPL")


def install(interposer: ctypes.CDLL) -> None:
    _library.ascend_emulator_install(" ".join(KEPT.split()).encode())
    interposer.ascend_emulator_observe_fallbacks(_library.ascend_emulator_count_fallback)
    _aten.impl("matmul_backward", matmul_backward, "PrivateUse1")


def replaced_calls() -> dict[str, int]:
    """Calls of each operator whose NPU kernel was replaced, since the start or `clear_calls`."""
    return _counts(_library.ascend_emulator_log(False))


def fallback_calls() -> dict[str, int]:
    """Calls of each operator that torch_npu has no kernel for and sent to the CPU itself."""
    return _counts(_library.ascend_emulator_log(True))


def clear_calls() -> None:
    _library.ascend_emulator_clear_log()


def matmul_backward(
    gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """torch_npu differentiates matmul with this one operator, for which torch has no CPU kernel."""
    a_matrix = a.unsqueeze(0) if a.dim() == 1 else a
    b_matrix = b.unsqueeze(-1) if b.dim() == 1 else b
    if a.dim() == 1:
        gradient = gradient.unsqueeze(-1 if b.dim() == 1 else -2)
    if b.dim() == 1:
        gradient = gradient.unsqueeze(-1)
    by_a = (gradient @ b_matrix.mT).sum_to_size(a_matrix.shape).reshape(a.shape) if wanted[0] else None
    by_b = (a_matrix.mT @ gradient).sum_to_size(b_matrix.shape).reshape(b.shape) if wanted[1] else None
    return by_a, by_b


def _counts(text: bytes) -> dict[str, int]:
    pairs = (line.rsplit(" ", 1) for line in text.decode().splitlines())
    return {name: int(calls) for name, calls in pairs}
