"""The device interface: every fact that differs between devices, and what accelerators share."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from lockstep.errors import Refusal

# What a device must say about itself. All that differs between devices outside the kernels is in these classes.

# Set to a device's name by whoever stands in for it, so that no run on an emulator passes for one on hardware.
EMULATED = "LOCKSTEP_EMULATED"


@dataclass(frozen=True)
class Memory:
    """Bytes. `total` is the device's, `free` what this process can still take; `allocated` and `peak` are its own."""

    total: int
    free: int
    allocated: int
    peak: int


class Device(ABC):
    """One kind of device. Each fact is an attribute or a small method; nothing else asks which kind it is."""

    name: ClassVar[str]
    collective: ClassVar[str]
    """Name of the torch.distributed backend."""
    visible_variable: ClassVar[str | None]
    """Environment variable that says which devices a process sees."""
    ray_resource: ClassVar[str | None] = None
    """What Ray calls a device of this kind; None where it only counts processors."""
    fused_optimizer: ClassVar[bool]
    """Whether torch.optim.AdamW takes `fused=True`, with the learning rate as a number (not a tensor)."""
    adamw: ClassVar[str] = "torch"
    """Name of the step of AdamW with fp32 masters; see `train/optim.py`."""
    lean_layers: ClassVar[bool] = False
    """Whether its fused norms and feed-forwards (`kernels/fused.py`) keep only what the memory plan counts for them."""
    graph_capture: ClassVar[bool]
    attention: str
    """Name of the attention kernel for packed rows; `kernels/attention/varlen.py` maps it to a function."""
    paged_attention: str = "gather"
    """Name of the attention kernel for one token of each of many cached sequences; see `kernels/attention/paged.py`."""
    sampler: ClassVar[str] = "plain"
    """Name of the kernel that draws tokens from logits; see `rollout/native/sampler.py`."""
    generating_layers: str = "modules"
    """Name of what runs the decoder layers when the engine generates; see `kernels/decode_layers.py`."""
    scored_by: str = "sampler"
    """Whether a drawn token's log-probability comes from the sampler on its way, or from the trainer's own kernel."""
    generates_beside: ClassVar[bool] = False
    """Whether a second process may generate on it while the run trains on it."""
    meets_itself: ClassVar[bool] = False
    """Whether its collective joins two processes that are on one device."""
    shares_memory: ClassVar[bool] = False
    """Whether another process of this machine opens a tensor where it is, in the device's own memory."""
    prefill_tokens: ClassVar[int] = 8192
    """Prompt tokens that the engine gives to one forward pass, where the recipe does not say and memory allows."""
    determinism: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Environment variables of deterministic runs, each with its accepted values; the first is the one we set."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this device cannot be used here; None when it can."""

    @abstractmethod
    def count(self) -> int:
        """How many devices this process sees."""

    @abstractmethod
    def torch_device(self, index: int = 0) -> torch.device: ...

    @abstractmethod
    def use(self, index: int) -> None:
        """Make device `index` the current one of this process."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the current device's own random generator, as a tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None: ...

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until everything given to the current device is done."""

    @contextmanager
    def watched(self, *, allow_fallback: bool) -> Iterator[Mapping[str, int]]:
        """Counts the operators that this device does not have and that run on the CPU instead, by name.

        Slow, so meant for one step. Without `allow_fallback` the first one is an error.
        """
        yield {}

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds what is known of the device's own error codes to errors that hold them."""
        yield

    def capture(self, step: Callable[[], None], beside: Callable[[], None] | None = None) -> Callable[[], None]:
        """Record what `step` gives to the device; calling the result repeats it on the same tensors.

        `beside` is an earlier recording, which is never repeated at the same time: they share their working memory.
        """
        raise NotImplementedError(f"{self.name} does not capture graphs")

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @property
    @abstractmethod
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """The reduced precisions this device really computes in."""

    @abstractmethod
    def chip(self) -> str:
        """The chip's name as the device gives it."""

    @abstractmethod
    def versions(self) -> dict[str, str | None]:
        """Driver and runtime versions; None for one that cannot be read here."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators: the CPU's and those of every visible device."""
        torch.manual_seed(seed)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or dtype in self.autocast_dtypes

    def slowed_by(self, dtype: torch.dtype, inner: int, outer: int) -> list[str]:
        """What makes a model with such matrices slower here than it need be, in words; measured in milliseconds."""
        return []

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense matrix FLOP/s that the maker promises for this chip; None where we do not know it."""
        return None

    def deterministic(self, on: bool) -> dict[str, str]:
        """Switch deterministic computation on or off; returns every switch with its value, for the run's record.

        To be called before the first tensor reaches the device and before the process group is made: the libraries
        read their variables once.
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
        """What the run's env.json records of the device."""
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


# What the variables were before `deterministic(True)`; None for unset.
_before: dict[str, str | None] = {}


def _ensure_variable(variable: str, accepted: tuple[str, ...]) -> str:
    """The user's own value stays when it is deterministic too."""
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


# What the accelerators have in common: torch gives each a module with the same function names.


class Accelerator(Device):
    """A device behind a torch module such as `torch.cuda`."""

    @property
    @abstractmethod
    def api(self) -> Any:
        """The torch module of this device. To be asked for only when `unavailable()` is None."""

    def count(self) -> int:
        return int(self.api.device_count())

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device(self.name, index)

    def use(self, index: int) -> None:
        if index >= self.count():
            raise Refusal.at(
                "device",
                f"{self.name} device {index} was asked for and {self.count()} are visible",
                f"start no more processes on a machine than it has devices, or show more of them in "
                f"{self.visible_variable}",
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
    """A library's message without the advice, log lines and colour codes that follow it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    line = text.splitlines()[0].strip()
    return re.split(r"(?<=[a-z)])\. ", line, maxsplit=1)[0].rstrip(".")


# Numbers on their way between host and device, without a wait for what the device still does.


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device. An ordinary copy waits until the device has done all that was asked of it before."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    # Other memory may be used again before a copy has read it.
    return tensor.to(device, non_blocking=tensor.is_pinned())


def fetched(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to bring a tensor to the host; the result waits for it, not for what the device is asked to do later."""
    if tensor.device.type != "cuda":
        return lambda: tensor.cpu()
    host = tensor.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()

    def arrived() -> torch.Tensor:
        ready.synchronize()
        return host

    return arrived
