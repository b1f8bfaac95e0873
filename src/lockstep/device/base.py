"""The device interface: all properties that differ between devices, and the common base class of accelerators."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from lockstep.device.device_errors import explanation
from lockstep.errors import Refusal

# An emulator sets this variable to the emulated device's name, so that a run is not mistaken for one on hardware.
EMULATED = "LOCKSTEP_EMULATED"


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. `total` is the memory of the device, and `free` is available to this process. `allocated` and
    `peak` are the current and the maximum memory use of this process."""

    total: int
    free: int
    allocated: int
    peak: int


class Device(ABC):
    """A kind of device. All differences between devices, except kernels, are attributes or methods of this class."""

    name: ClassVar[str]
    collective: ClassVar[str]
    """Name of the torch.distributed backend."""
    visible_variable: ClassVar[str | None]
    """Environment variable that selects the visible devices."""
    package_variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables with folders of the vendor's Python packages, which every Python that uses the device needs
    on its PYTHONPATH."""
    ray_resource: ClassVar[str | None] = None
    """Name of the device as a Ray resource, or None if Ray has no resource for it (CPU)."""
    fused_optimizer: ClassVar[bool]
    """Whether torch.optim.AdamW supports `fused=True` with a float learning rate (not a tensor)."""
    adamw: ClassVar[str] = "torch"
    """Name of the AdamW implementation with fp32 master weights (see `train/optim.py`)."""
    lean_layers: ClassVar[bool] = False
    """Whether the device's fused norms and MLPs (`kernels/fused.py`) save no more activations than the memory estimate
    assumes."""
    graph_capture: ClassVar[bool]
    attention: str
    """Name of the attention kernel for packed rows; see `kernels/attention/varlen.py`."""
    paged_attention: str = "gather"
    """Name of the paged decode attention kernel; see `kernels/attention/paged.py`."""
    sampler: ClassVar[str] = "plain"
    """Name of the sampling kernel; see `rollout/native/sampler.py`."""
    generating_layers: str = "modules"
    """Name of the decoder layer implementation used in generation (see `kernels/decode/decode_layers.py`)."""
    scored_by: str = "sampler"
    """What computes the log-prob of a sampled token: the sampling kernel (`sampler`) or the training kernel
    (`trainer`)."""
    generates_beside: ClassVar[bool] = False
    """Whether a second process may generate on the device while the run trains on it."""
    meets_itself: ClassVar[bool] = False
    """Whether the device's torch.distributed backend supports two processes on one device."""
    shares_memory: ClassVar[bool] = False
    """Whether another process of this machine can open a tensor in device memory (IPC)."""
    prefill_tokens: ClassVar[int] = 8192
    """Default number of prompt tokens per prefill pass; fewer tokens are used if memory is too small."""
    determinism: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Environment variables of deterministic runs, each with its accepted values. The first value is the default."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Returns the reason why this device cannot be used on this machine, or None if it can be used."""

    @abstractmethod
    def count(self) -> int:
        """Returns the number of visible devices."""

    @abstractmethod
    def torch_device(self, index: int = 0) -> torch.device: ...

    @abstractmethod
    def use(self, index: int) -> None:
        """Makes device `index` the current device of this process."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Returns the state of the current device's random generator, as a CPU tensor."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None: ...

    @abstractmethod
    def synchronise(self) -> None:
        """Waits until the current device has finished all queued work."""

    @contextmanager
    def watched(self, *, allow_fallback: bool) -> Iterator[Mapping[str, int]]:
        """Counts operators that fall back to the CPU, by name.

        Counting is slow, so use this method for one step only. If `allow_fallback` is false, the first operator that
        falls back raises an error.
        """
        yield {}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds causes and remedies of known device errors to exceptions."""
        try:
            yield
        except (RuntimeError, ImportError) as error:
            explained = explanation(str(error), npu=self.name == "npu")
            if explained is not None and error.args and explained not in str(error):
                text = f"{error.args[0]}\n{explained}"
                error.args = (text, *error.args[1:])
                if isinstance(error, ImportError):
                    error.msg = text
            raise

    def capture(self, step: Callable[[], None], pool_of: Callable[[], None] | None = None) -> Callable[[], None]:
        """Captures `step` as a device graph. Calling the result replays the graph on the same tensors.

        The new graph uses the memory pool of `pool_of`, an earlier graph that is never replayed at the same time.
        """
        raise NotImplementedError(f"device {self.name} does not support graph capture")

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @property
    @abstractmethod
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the reduced-precision dtypes that the device supports natively."""

    @abstractmethod
    def chip(self) -> str:
        """Returns the name of the chip as reported by the device."""

    @abstractmethod
    def versions(self) -> dict[str, str | None]:
        """Returns the driver and runtime versions. A version that is unavailable is None."""

    def seed(self, seed: int) -> None:
        """Seeds torch's generators of the CPU and of every visible device."""
        torch.manual_seed(seed)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or dtype in self.autocast_dtypes

    def no_low_precision(self, precision: str) -> str | None:
        """Returns why the device has no matmul in `precision` (fp8 or int8), or None if it has one."""
        return None

    def slowed_by(self, dtype: torch.dtype, inner: int, outer: int) -> list[str]:
        """Runs short benchmarks. Returns warnings about settings that slow down a model with weight matrices of `outer`
        x `inner`."""
        return []

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Returns the dense matrix FLOP/s that the vendor states for this chip, or None if they are unknown."""
        return None

    def deterministic(self, on: bool) -> dict[str, str]:
        """Switches deterministic computation on or off. Returns all settings with their values, for the run record.

        Call this before the first tensor is on the device and before the process group is created, because libraries
        read their environment variables only once.
        """
        torch.use_deterministic_algorithms(on)
        switches = {"torch.use_deterministic_algorithms": str(on)}
        if not on:
            _restore_variables(self.determinism)
            return switches
        for variable, accepted in self.determinism.items():
            switches[variable] = _ensure_variable(variable, accepted)
        return switches

    def facts(self) -> dict[str, Any]:
        """Returns the device section of the run's env.json."""
        return {
            "name": self.name,
            "chip": self.chip(),
            "count": self.count(),
            "torch": torch.__version__,
            **self.versions(),
            "memory": asdict(self.memory()),
            "visible": os.environ.get(self.visible_variable) if self.visible_variable else None,
            "ray_resource": self.ray_resource,
            "emulated": os.environ.get(EMULATED) == self.name,
        }


# Values of the environment variables before `deterministic(True)`, or None for a variable that was unset.
_before: dict[str, str | None] = {}


def _ensure_variable(variable: str, accepted: tuple[str, ...]) -> str:
    """Sets an environment variable to its first accepted value, unless the user has set an accepted value. Returns the
    value."""
    present = os.environ.get(variable)
    if present is not None and present.lower() in accepted:
        return present
    _before.setdefault(variable, present)
    os.environ[variable] = accepted[0]
    return accepted[0]


def _restore_variables(variables: Mapping[str, tuple[str, ...]]) -> None:
    for variable in variables:
        if variable not in _before:
            continue
        before = _before.pop(variable)
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


class Accelerator(Device):
    """A device with its own torch module (`torch.cuda`, `torch_npu.npu`). Both modules have the same function names."""

    @property
    @abstractmethod
    def api(self) -> Any:
        """The torch module of this device. Use the module only if `unavailable()` returns None."""

    def count(self) -> int:
        return int(self.api.device_count())

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device(self.name, index)

    def use(self, index: int) -> None:
        if index >= self.count():
            raise Refusal.at(
                "device",
                f"{self.name} device {index} was requested, but only {self.count()} are visible",
                f"start no more processes on a machine than it has devices, or make more devices visible in "
                f"{self.visible_variable}",
                code="too-few-devices",
            )
        self.api.set_device(index)

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self.api.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.api.set_rng_state(state)

    def synchronise(self) -> None:
        self.api.synchronize()

    def memory(self) -> Memory:
        free, total = self.api.mem_get_info()
        return Memory(
            total=int(total),
            free=int(free),
            allocated=int(self.api.memory_allocated()),
            peak=int(self.api.max_memory_allocated()),
        )

    def reset_peak(self) -> None:
        self.api.reset_peak_memory_stats()

    def chip(self) -> str:
        return str(self.api.get_device_name(self.api.current_device()))


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of a library's message, without advice, log lines and colour codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    line = text.splitlines()[0].strip()
    return re.split(r"(?<=[a-z)])\. ", line, maxsplit=1)[0].rstrip(".")


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to the device. Unlike an ordinary copy, this copy does not wait for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    # Only pinned memory is copied asynchronously, because pageable memory may be reused before the copy has read it.
    return tensor.to(device, non_blocking=tensor.is_pinned())


def fetched(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts a copy of a device tensor to the host. Calling the result waits for the copy, but not for work queued
    later."""
    if tensor.device.type != "cuda":
        return lambda: tensor.cpu()
    host = tensor.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()

    def arrived() -> torch.Tensor:
        ready.synchronize()
        return host

    return arrived
