"""NVIDIA devices through torch.cuda."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from lockstep.device.base import Accelerator, Memory, first_sentence

DRIVER = Path("/proc/driver/nvidia/version")


class _Peak(NamedTuple):
    half: float
    """Dense FLOP/s of bfloat16 and float16 with float32 accumulation."""
    single: float
    """Dense FLOP/s of float32 without TF32, because TF32 is off by default in torch."""


# Peak FLOP/s from NVIDIA's data sheets, where values "with sparsity" are halved. A key must match complete words of the
# device's name. More specific names come first.
PEAKS: dict[str, _Peak] = {
    "H100 PCIe": _Peak(756e12, 51e12),
    "H100 NVL": _Peak(835e12, 60e12),
    "H100": _Peak(989e12, 67e12),
    "H200 NVL": _Peak(836e12, 60e12),
    "H200": _Peak(989e12, 67e12),
    "GH200": _Peak(989e12, 67e12),
    "H800 PCIe": _Peak(756e12, 51e12),
    "H800": _Peak(989e12, 67e12),
    "H20": _Peak(148e12, 44e12),
    "A100": _Peak(312e12, 19.5e12),
    "A800": _Peak(312e12, 19.5e12),
    "A40": _Peak(149.7e12, 37.4e12),
    "A10": _Peak(125e12, 31.2e12),
    "L40S": _Peak(362e12, 91.6e12),
    "L40": _Peak(181e12, 90.5e12),
    "L20": _Peak(119.5e12, 59.8e12),
    "L4": _Peak(121e12, 30.3e12),
}


class Cuda(Accelerator):
    name = "cuda"
    collective = "nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    fused_optimizer = True
    adamw = "triton"
    lean_layers = True
    graph_capture = True
    generates_beside = True
    shares_memory = True
    ray_resource = "GPU"
    paged_attention = "triton"
    sampler = "triton"
    generating_layers = "triton"
    prefill_tokens = 65_536
    attention = "flash_varlen"
    determinism: ClassVar[Mapping[str, tuple[str, ...]]] = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")}

    @property
    def api(self) -> Any:
        return torch.cuda

    def unavailable(self) -> str | None:
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is built without CUDA"
            if DRIVER.exists():
                reason += ", although this machine has an NVIDIA driver: install a CUDA build of torch"
            return reason
        if torch.cuda.is_available():
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and visible.strip() in ("", "-1"):
            return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
        # is_available() gives no reason. init() raises an error with the reason, such as no driver, an old driver or no
        # device.
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
            return f"torch {torch.__version__} (CUDA {torch.version.cuda}) reports: {first_sentence(error)}{shown}"
        return f"torch {torch.__version__} sees no NVIDIA device"

    def use(self, index: int) -> None:
        super().use(index)
        # The thread of the backward pass gets its CUDA context from the first kernel. If that were one of cuBLAS, torch
        # would print a warning.
        torch.ones((), device=self.torch_device(index), requires_grad=True).neg().backward()

    @property
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        # Below compute capability 8.0, bfloat16 is emulated and slower than float32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return (torch.bfloat16, torch.float16)
        return (torch.float16,)

    def no_low_precision(self, precision: str) -> str | None:
        """fp8 needs the matrix units of Ada or Hopper. int8 runs from Turing on."""
        needed = {"fp8": (8, 9), "int8": (7, 5)}[precision]
        found = torch.cuda.get_device_capability()
        if found >= needed:
            return None
        return (
            f"{self.chip()} has compute capability {found[0]}.{found[1]}, and {precision} needs {needed[0]}.{needed[1]}"
        )

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Returns the peak FLOP/s of `dtype`. The value for float32 assumes that TF32 is off, which is torch's
        default."""
        peak = peak_of(self.chip())
        if peak is None:
            return None
        if dtype == torch.float32:
            return peak.single
        return peak.half if self.supports(dtype) else None

    def capture(self, step: Callable[[], None], pool_of: Callable[[], None] | None = None) -> Callable[[], None]:
        # Runs the step before the capture, because CUDA libraries initialise in their first calls, which must not be
        # captured.
        side = _trial_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2 if pool_of is None else 1):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = pool_of.graph.pool() if isinstance(pool_of, _CapturedGraph) else None
        with torch.cuda.graph(graph, pool=pool):
            step()
        return _CapturedGraph(graph)

    def memory(self) -> Memory:
        memory = super().memory()
        # Memory that torch reserves but does not use is also free for this process.
        return replace(memory, free=memory.free + torch.cuda.memory_reserved() - memory.allocated)

    def deterministic(self, on: bool) -> dict[str, str]:
        switches = super().deterministic(on)
        torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]
        if on:
            # cuDNN's benchmark mode selects kernels by measured time, so the selected kernels can differ between runs.
            torch.backends.cudnn.benchmark = False
            switches["torch.backends.cudnn.benchmark"] = "False"
            # In deterministic mode, torch fills every new tensor with NaN to expose reads of uninitialised memory.
            # Filling takes 6 of the 40 ms of a decoding round, so lockstep switches it off.
            switches["torch.utils.deterministic.fill_uninitialized_memory"] = "False"
        if on and importlib.util.find_spec("triton") is not None:
            # With batch-invariant kernels, a token gets bitwise the same result in generation and in training.
            self.attention = self.paged_attention = "invariant"
            self.generating_layers, self.scored_by = "modules", "trainer"
            switches["kernels"] = "invariant"
        return switches

    def versions(self) -> dict[str, str | None]:
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        cudnn = torch.backends.cudnn.version()
        return {
            "driver": driver_version(DRIVER.read_text()) if DRIVER.exists() else None,
            "cuda": torch.version.cuda,
            "cudnn": str(cudnn) if cudnn is not None else None,
            "nccl": ".".join(str(part) for part in nccl) if nccl else None,
        }


@dataclass(frozen=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


@cache
def _trial_stream(index: int) -> torch.cuda.Stream:
    """Returns the warm-up stream of a device. The stream is cached, because CUDA libraries keep a workspace per
    stream."""
    return torch.cuda.Stream(index)


def peak_of(chip: str) -> _Peak | None:
    for name, peak in PEAKS.items():
        if re.search(rf"\b{re.escape(name)}\b", chip, re.IGNORECASE):
            return peak
    return None


def driver_version(text: str) -> str | None:
    """Returns the driver version in the text of /proc/driver/nvidia/version, for the closed or the open kernel
    module."""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    return match.group(1) if match else None
