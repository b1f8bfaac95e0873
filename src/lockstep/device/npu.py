"""Huawei Ascend devices through torch_npu, and a counter of operators that fall back to the CPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.device import process_setup as autoload
from lockstep.device.base import Accelerator, first_sentence
from lockstep.errors import Refusal

# Detects operators that do not run on the device's AI Cores. An operator without a device kernel falls back to the CPU
# of the host, with copies to the host and back. If the device kernel of an operator does not support the dtype on the
# AI Cores, the operator runs on the device's AI CPU, which is also slow.

KEY = "PrivateUse1"
# Dispatch keys of composite kernels. A composite kernel calls other operators, which are checked when they run.
COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
# Dispatch key of operators implemented by their `out=` variant. The `out=` variant is not dispatched separately, so
# `has_kernel` checks it.
BY_OUT = "CompositeExplicitAutogradNonFunctional"


def has_kernel(name: str) -> bool:
    """Returns whether the operator runs on the device, either with its own kernel or as a composition of other
    operators."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has(name, key) for key in (KEY, *COMPOSITE)):
        return True
    out = f"{name.split('.')[0].rstrip('_')}.out"
    exists = has(name, BY_OUT) and torch._C._dispatch_has_kernel(out)
    return exists and any(has(out, key) for key in (KEY, *COMPOSITE))


# These operators run on the AI CPU: sorting of integers (torch_npu 2.13.0 reports it) and all operators on float64
# (Ascend's profiler shows it).
WIDE = (torch.float64, torch.complex128)
SORTS = ("aten::sort", "aten::argsort", "aten::msort")
INTEGERS = (torch.int32, torch.int64)
# Operators that only allocate or move data and compute nothing.
MOVES = ("aten::empty", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::detach")


def on_ai_cpu(name: str, views: bool, dtypes: Sequence[torch.dtype]) -> bool:
    """Returns whether the operator `name` runs on the AI CPU for device tensors of `dtypes`."""
    if views or name.startswith(MOVES):
        return False
    if any(dtype in WIDE for dtype in dtypes):
        return True
    return name.split(".")[0] in SORTS and any(dtype in INTEGERS for dtype in dtypes[:1])


class FallbackWatch(TorchDispatchMode):
    """Context manager that counts the operators on device tensors that do not run on the AI Cores."""

    def __init__(self, device: str, *, allow: bool):
        super().__init__()
        self.device, self.allow = device, allow
        self.counts: Counter[str] = Counter()
        self._known: dict[str, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name not in self._known:
            self._known[name] = has_kernel(name)
        dtypes = [tensor.dtype for tensor in _tensors([*args, kwargs]) if tensor.device.type == self.device]
        if dtypes and not self._known[name]:
            self._count(name, f"the operator {name} has no kernel on this device and would run on the CPU")
        elif dtypes and on_ai_cpu(name, func.is_view, dtypes):
            why = f"the operator {name} runs on the device's AI CPU for {dtypes[0]}, not on its AI Cores"
            self._count(f"{name} (AI CPU)", why)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, why: str) -> None:
        self.counts[name] += 1
        if not self.allow:
            raise Refusal.at(
                "run.allow_fallback",
                why,
                "set it to true to accept slow operators, or use a torch_npu version that has a kernel for this "
                "operator",
                code="cpu-fallback",
            )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


# The code below was tested on an emulated CANN. The code has not yet run on Ascend hardware.

DRIVER_NODE = Path("/dev/davinci_manager")

# FLOP/s of the matrix unit in float16 and bfloat16, computed as cores x 8192 x clock. The totals in data sheets (376
# TFLOP/s for a 910B2) include the vector unit, which computes no matmuls.
PEAKS: dict[str, float] = {
    "Ascend910B1": 373.9e12,
    "Ascend910B2": 353.9e12,
    "Ascend910B3": 294.9e12,
    "Ascend910B4": 245.8e12,
    "Ascend910_9362": 353.9e12,
    "Ascend910_9392": 353.9e12,
}

_CANN_LIBRARIES = ("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libruntime", "libopapi")
_DRIVER_LIBRARIES = ("libascend_hal", "libdrvdsmi", "libdcmi", "libmmpa")


NO_FP8 = "Ascend 910 chips have no fp8 matmuls"


class Npu(Accelerator):
    name = "npu"
    collective = "hccl"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    package_variables = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
    ray_resource = "NPU"
    # torch_npu registers torch's fused AdamW for a learning rate that is a float, not for one that is a tensor.
    fused_optimizer = True
    # torch_npu.npu.NPUGraph is marked beta, so graphs are not used until a capture is verified on hardware.
    graph_capture = False
    attention = "npu_fusion"
    paged_attention = "npu_infer"
    determinism: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "HCCL_DETERMINISTIC": ("true", "strict"),
        "LCCL_DETERMINISTIC": ("1",),
        "CLOSE_MATMUL_K_SHIFT": ("1",),
        "ATB_MATMUL_SHUFFLE_K_ENABLE": ("0",),
        "ATB_LLM_LCOC_ENABLE": ("0",),
    }

    @property
    def api(self) -> Any:
        import torch_npu

        return torch_npu.npu

    def use(self, index: int) -> None:
        super().use(index)
        # Weights stay in the standard memory layout. In Ascend's private layout (FRACTAL_NZ), in-place updates and
        # copies to a rollout engine would access the wrong elements.
        self.api.config.allow_internal_format = False

    @contextmanager
    def watched(self, *, allow_fallback: bool) -> Iterator[Mapping[str, int]]:
        with FallbackWatch(self.name, allow=allow_fallback) as watch:
            yield watch.counts

    def unavailable(self) -> str | None:
        return _package_problem() or _load_problem() or _visibility_problem()

    @property
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.api.is_bf16_supported():
            return (torch.bfloat16, torch.float16)
        return (torch.float16,)

    def no_low_precision(self, precision: str) -> str | None:
        return NO_FP8 if precision == "fp8" else None

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        if dtype == torch.float32 or not self.supports(dtype):
            return None
        return peak_of(self.chip())

    def versions(self) -> dict[str, str | None]:
        from torch_npu.npu.utils import get_cann_version

        # get_cann_version returns an empty string if the installation has no version files.
        return {
            "torch_npu": installed_version(),
            "cann": get_cann_version("CANN") or None,
            "hccl": get_cann_version("HCCL") or None,
            "driver": get_cann_version("DRIVER") or None,
        }


def peak_of(chip: str) -> float | None:
    for name, flops in PEAKS.items():
        # A suffix letter in the chip name means a variant of the same die (910B2C). A further digit in the chip name
        # means a different chip.
        if re.match(rf"{name}(?!\d)", chip):
            return flops
    return None


def installed_version() -> str | None:
    """Returns the version of the torch_npu package without importing it."""
    try:
        return metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """Returns the part of a version that must be equal in torch and torch_npu, for example 2.13.0 for 2.13.0+cpu and
    for 2.13.0.post4."""
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match.group(0) if match else version


def _package_problem() -> str | None:
    version = installed_version()
    if version is None and find_spec("torch_npu") is None:
        reason = "package torch_npu is not installed"
        if DRIVER_NODE.exists():
            reason += ", although this machine has an Ascend driver: install torch_npu in the same version as torch"
        return reason
    if version is not None and _release(version) != _release(torch.__version__):
        return (
            f"torch_npu {version} needs torch {_release(version)}, but torch {torch.__version__} is installed; "
            "the two must have the same version"
        )
    return None


@cache
def _load_problem() -> str | None:
    """Returns why torch_npu cannot be imported. The result is cached, because a second import after a failed import
    uses half-initialised modules and gives a worse error."""
    try:
        import torch_npu  # noqa: F401
    except Exception as error:  # noqa: BLE001  a broken installation may raise anything
        return f"torch_npu {installed_version()} does not load: {first_sentence(error)}{_load_hint(str(error))}"
    autoload.restore()
    return None


def _load_hint(message: str) -> str:
    missing = re.search(r"(lib\w+)\.so\S*: cannot open shared object file", message)
    if missing and missing.group(1).startswith(_DRIVER_LIBRARIES):
        return (
            " (this library belongs to the Ascend driver: install the driver, and add its lib64 folders to "
            "LD_LIBRARY_PATH)"
        )
    if missing and missing.group(1).startswith(_CANN_LIBRARIES):
        return " (this library belongs to the CANN toolkit, which was not found: install it, and source its set_env.sh)"
    if "undefined symbol" in message:
        return " (the versions of torch, torch_npu and CANN are not compatible)"
    return ""


def _visibility_problem() -> str | None:
    import torch_npu

    try:
        # is_available() is not used, because it can be true while ASCEND_RT_VISIBLE_DEVICES hides every device.
        if torch_npu.npu.device_count() > 0:
            return None
    except RuntimeError as error:
        return f"the Ascend runtime does not start: {first_sentence(error)}"
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"ASCEND_RT_VISIBLE_DEVICES={visible!r} leaves no device visible "
            "(it takes existing device numbers in ascending order, separated by commas)"
        )
    return (
        "the Ascend runtime sees no device: check that the driver is loaded, and that this process may open "
        "/dev/davinci*"
    )
