"""What the accelerators have in common: torch gives each a module with the same function names."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

import torch

from lockstep.device.base import Device, Memory
from lockstep.errors import Refusal


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
