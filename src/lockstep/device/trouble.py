"""Errors of a device, told from errors of what was asked of it: what each means and what helps."""

from __future__ import annotations

import re

import torch

from lockstep.device import npu_errors
from lockstep.device.npu_errors import Known
from lockstep.errors import Refusal, first_line

MEMORY = Known(
    r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED",
    "the device has no memory left",
    "lower batch.tokens or rollout.cache_gb, set model.gradient_checkpointing, train an adapter (model.lora.rank), or "
    "use more devices; while a model is loaded it is often another process that holds the memory: look with nvidia-smi "
    "or npu-smi",
)
# The first row that fits is told. What names an operator comes before what only names a device.
TABLE: tuple[Known, ...] = (
    MEMORY,
    Known(
        r"no kernel image is available|driver version is insufficient|forward compatibility was attempted|"
        r"provided PTX was compiled with an unsupported toolchain|system not yet initialized|no CUDA-capable device|"
        r"driver initialization failed|Found no NVIDIA driver",
        "this build of torch and the driver or the chip do not belong together",
        "run `lockstep doctor`, and install the torch that it names, or a newer driver",
    ),
    Known(
        r"Could not run '[^']+' with arguments from the|not implemented for '\w+'|"
        r"is not currently (?:implemented|supported) (?:for|on) the|No available kernel|no kernel found to dispatch",
        "torch has no kernel for this operator on this device, or not in this dtype",
        "set model.attention=sdpa where the message names an attention, another model.dtype where it names a type; "
        "otherwise use another version of torch (and torch_npu), which `lockstep doctor` knows",
    ),
    Known(
        r"CUDA error|CUDA driver error|device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error",
        "a call failed on the device",
        "set CUDA_LAUNCH_BLOCKING=1 to see which operator it was, and run `lockstep doctor`",
    ),
)


def trouble(error: BaseException) -> Known | None:
    """What is known of an error of the device; None for one that is not the device's."""
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY
    if not isinstance(error, RuntimeError | ImportError):
        return None
    text = str(error)
    return next((known for known in (*npu_errors.TABLE, *TABLE) if re.search(known.pattern, text)), None)


# What collectives say when a process at the other end is gone or silent.
LOST_PEER = (
    r"gloo[/\\].*(?:Connection|Timed out|timeout)|Connection (?:closed|reset) by peer|ncclRemoteError|Socket Timeout"
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because of another process: the error of a run that may be started again."""
    collective = isinstance(error, torch.distributed.DistError) if torch.distributed.is_available() else False
    return collective or (isinstance(error, RuntimeError) and re.search(LOST_PEER, str(error)) is not None)


def refuse_trouble(error: BaseException, device: torch.device) -> None:
    """Refuse an error of the device with its own text, so that nobody takes it for one of the model. One of another
    process is raised as it is."""
    if is_lost_peer(error):
        raise error
    known = trouble(error)
    if known is not None:
        raise Refusal.at(f"device {device}", f"{first_line(error)} ({known.cause})", known.remedy) from error
