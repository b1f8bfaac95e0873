"""Explains device errors: causes and remedies for the error codes of CUDA, CANN, HCCL and torch_npu."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from lockstep.errors import Refusal, first_line

# Errors of CANN, HCCL and torch_npu. To extend the table, add a row.


class KnownError(NamedTuple):
    pattern: str
    """Regular expression for the error message."""
    cause: str
    remedy: str


def _code(*codes: str) -> str:
    """Matches codes as complete words. A code without letters must follow a word such as `error` or `code`, because
    sizes of tensors are numbers too."""
    named = "|".join(code for code in codes if not code.isdigit())
    numbers = "|".join(code for code in codes if code.isdigit())
    patterns = [rf"(?<![0-9A-Za-z])(?:{named})(?![0-9])"] if named else []
    if numbers:
        patterns.append(rf"(?i:\berr\w*|code|result|\bret\w*)\W+(?:\w+\W+){{0,2}}?(?:{numbers})(?![0-9])")
    return "|".join(patterns)


NPU_ERRORS: tuple[KnownError, ...] = (
    KnownError(
        _code("EI0006"),
        "HCCL could not connect the processes: a socket to another rank timed out",
        "check that all ranks started and none died earlier (see their logs), that HCCL_SOCKET_IFNAME names the right "
        "network card, and that the ports from HCCL_IF_BASE_PORT (60000) on are free; or raise HCCL_CONNECT_TIMEOUT",
    ),
    KnownError(
        _code("EI0002"),
        "a rank waited too long for another rank in a collective operation",
        "one rank is slow, hangs or died: look at the logs of the other ranks; raise HCCL_EXEC_TIMEOUT if the "
        "operation really takes that long",
    ),
    KnownError(
        _code("EI0001", "EI0004"),
        "HCCL does not accept an environment variable or the rank table",
        "check the HCCL_* variables and RANK_TABLE_FILE (not needed with torchrun) that the message names",
    ),
    KnownError(
        _code("507015", "507018", "507035"),
        "a kernel stopped with an exception on the device (AI Core, AI CPU or vector core)",
        "often an index is out of range or a shape is not supported: set ASCEND_LAUNCH_BLOCKING=1 to find the "
        "operator, and look for the first EZ9999 line of the log (ASCEND_PROCESS_LOG_PATH)",
    ),
    KnownError(
        _code("507014", "507017", "507034", "507046"),
        "a kernel did not finish in time",
        "one kernel call has too much work, or the device is faulty: lower batch.tokens, and check `npu-smi info`",
    ),
    KnownError(
        _code("207001", "207018") + "|NPU out of memory",
        "the device has no memory left",
        "lower batch.tokens or rollout.cache_gb, set model.gradient_checkpointing, train an adapter (model.lora.rank), "
        "or use more devices; `npu-smi info` shows whether another process uses the memory",
    ),
    KnownError(
        _code("107001"),
        "there is no device with the requested number",
        "ASCEND_RT_VISIBLE_DEVICES must name existing devices in ascending order, and torchrun must start no more "
        "processes than devices are visible",
    ),
    KnownError(
        _code("107002", "107003"),
        "the call has no device context, or uses a stream of a different device context",
        "set the device first in each process; once a process has used the device, spawn new processes instead of "
        "forking",
    ),
    KnownError(
        _code("EZ9999", "EZ1001", "EZ3003"),
        "an operator failed inside CANN",
        "the lines after the code name the operator and the rejected shape; incompatible versions of torch, torch_npu "
        "and CANN are a common cause: run `lockstep doctor`",
    ),
    KnownError(
        _code("E19999", "E40021", "EE9999", "EE1001"),
        "CANN failed inside its runtime or graph engine",
        "run `lockstep doctor`: driver, CANN and torch_npu must be compatible; the device log shows the original error",
    ),
    KnownError(
        r"libhccl\.so|libascendcl\.so",
        "the CANN libraries are not found",
        "install the CANN toolkit and source its set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without "
        "CANN",
    ),
    KnownError(
        r"fall back to run on the CPU",
        "an operator without a kernel for this device ran on the CPU",
        "use another version of torch_npu, or accept the fallback with run.allow_fallback",
    ),
)


MEMORY = KnownError(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    "the device has no memory left",
    "lower batch.tokens or rollout.cache_gb, set model.gradient_checkpointing, train an adapter (model.lora.rank), or "
    "use more devices; if this happens while a model is loaded, another process may use the memory: check nvidia-smi "
    "or npu-smi",
)
HOST_MEMORY = KnownError(
    r"DefaultCPUAllocator",
    "the machine has no memory left for the host's tensors",
    "run fewer processes on this machine; on a CPU lower batch.tokens or rollout.cache_gb, set "
    "model.gradient_checkpointing or train an adapter (model.lora.rank); on an accelerator, offloading "
    "(parallel.offload, model.activation_offload) takes memory of the host",
)
# The first matching entry is used. Entries about a missing operator come before entries about any failed device call.
DEVICE_ERRORS: tuple[KnownError, ...] = (
    HOST_MEMORY,
    MEMORY,
    KnownError(
        r"no kernel image is available|driver version is insufficient|forward compatibility was attempted|"
        r"provided PTX was compiled with an unsupported toolchain|system not yet initialized|no CUDA-capable device|"
        r"driver initialization failed|Found no NVIDIA driver",
        "this build of torch is not compatible with the driver or the chip",
        "run `lockstep doctor`, and install the torch version that it names, or a newer driver",
    ),
    KnownError(
        r"Could not run '[^']+' with arguments from the|\"\w+\" not implemented for '\w+'|"
        r"is not currently (?:implemented|supported) (?:for|on) the|No available kernel|no kernel found to dispatch",
        "torch has no kernel for this operator on this device, or none for this dtype",
        "if the message names attention, set model.attention=sdpa; if it names a dtype, set another model.dtype; "
        "otherwise use another version of torch (and torch_npu) that `lockstep doctor` lists",
    ),
    KnownError(
        r"CUDA error|CUDA driver error|device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error",
        "a call failed on the device",
        "set CUDA_LAUNCH_BLOCKING=1 to find the operator, and run `lockstep doctor`",
    ),
)


def explanation(message: str, *, npu: bool = True) -> str | None:
    """Returns the causes and remedies of the known errors that match the message, or None if there are none. The
    message of an NPU may have several codes: all of them count."""
    rows = [row for row in NPU_ERRORS if npu and re.search(row.pattern, message)]
    rows = rows or [row for row in DEVICE_ERRORS if re.search(row.pattern, message)][:1]
    return "\n".join(f"what it means: {row.cause}\n-> {row.remedy}" for row in rows) or None


def trouble(error: BaseException) -> KnownError | None:
    """Returns the known cause and remedy of a device error, or None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY
    if not isinstance(error, RuntimeError | ImportError):
        return None
    text = str(error)
    return next((row for row in (*NPU_ERRORS, *DEVICE_ERRORS) if re.search(row.pattern, text)), None)


# Matches the error messages of collective operations in which another process has ended or does not respond.
LOST_PEER = (
    r"gloo[/\\].*(?:Connection|Timed out|timeout)|Connection (?:closed|reset) by peer|ncclRemoteError|Socket Timeout"
)


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether a collective operation failed because of another process. After the failure of another process, a
    run may be restarted."""
    collective = isinstance(error, torch.distributed.DistError) if torch.distributed.is_available() else False
    return collective or (isinstance(error, RuntimeError) and re.search(LOST_PEER, str(error)) is not None)


def refuse_trouble(error: BaseException, device: torch.device) -> None:
    """If `error` is a device error, raises it as a `Refusal` with its text, so that it is not mistaken for a bug of the
    model. Errors that another process caused are raised again unchanged."""
    if is_lost_peer(error):
        raise error
    row = trouble(error)
    if row is not None:
        raise Refusal.at(
            f"device {device}", f"{first_line(error)} ({row.cause})", row.remedy, code="device-error"
        ) from error
