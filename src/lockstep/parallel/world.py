"""The processes of a run: who we are, and the few collectives the loops need. One process needs none of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.device.base import Device

T = TypeVar("T")

# A rank that waits longer than this for the others gives up with an error instead of hanging.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Rank 0 alone writes and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, on the host in double precision: exact for counts, whatever the device can add."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor on the host, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: Device) -> Iterator[World]:
    """The world that torchrun's environment describes; a lone process without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    world = World(int(os.environ.get("RANK", "0")), size, int(os.environ.get("LOCAL_RANK", "0")))
    with device.explained():
        device.use(world.local_rank)
        if size == 1:
            yield world
            return
        host = "cpu:gloo"
        own = f"{device.name}:{device.collective}"
        dist.init_process_group(host if own == host else f"{host},{own}", timeout=TIMEOUT)
        try:
            yield world
        finally:
            dist.destroy_process_group()
