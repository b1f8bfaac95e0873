"""The CPU: always there, and the reference that the other devices are held against."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from lockstep.device.base import Device, Memory
from lockstep.device.host_memory import host_memory, reset_host_peak
from lockstep.device.pace import slow_dtype, slow_threads


def _arm_chip(listing: str) -> str | None:
    """Arm's cores have numbers in the place of a name, as `Arm 0x41 part 0xd0c` for Neoverse N1."""
    numbers = dict(re.findall(r"^CPU (implementer|part)\s*: (\S+)$", listing, re.MULTILINE))
    return f"Arm {numbers['implementer']} part {numbers['part']}" if len(numbers) == 2 else None


class Cpu(Device):
    name = "cpu"
    collective = "gloo"
    visible_variable = None
    fused_optimizer = True
    graph_capture = False
    attention = "sdpa"
    generates_beside = True
    meets_itself = True

    def unavailable(self) -> str | None:
        return None

    def count(self) -> int:
        return 1

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def use(self, index: int) -> None:
        """Nothing to choose: all processes of a machine share the one CPU."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronise(self) -> None:
        """Nothing to wait for: operators return when they are done."""

    def memory(self) -> Memory:
        return host_memory()

    def reset_peak(self) -> None:
        """Where the kernel cannot reset it, the peak stays that of the whole process."""
        reset_host_peak()

    @property
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        # float16 is complete (forward and backward) but saves only memory: most CPUs have no arithmetic for it.
        return (torch.bfloat16, torch.float16)

    def slowed_by(self, dtype: torch.dtype, inner: int, outer: int) -> list[str]:
        # One word at a time: threads that wait on arithmetic that is not there tell nothing of the cores.
        said = slow_dtype(dtype, inner, outer) or slow_threads(dtype, inner, outer)
        return [] if said is None else [said]

    def chip(self) -> str:
        listing = Path("/proc/cpuinfo")
        if listing.exists():
            for line in listing.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
            return _arm_chip(listing.read_text()) or platform.machine()
        return platform.processor() or platform.machine()

    def versions(self) -> dict[str, str | None]:
        # Vector unit and thread count decide the order of sums, hence the last bits of a result.
        return {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "kernel": platform.release(),
        }
