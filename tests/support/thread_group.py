"""A context group whose ranks are threads of one process: the same exchanges without processes or collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from hang import HANG
from lockstep.parallel.context import ContextGroup

T = TypeVar("T")


class Meeting:
    """Where all ranks lay something down and see what the others have."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks)
        self.laid: list[torch.Tensor] = [torch.empty(0)] * ranks

    def swap(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.laid[rank] = tensor.clone()
        self.barrier.wait(HANG)
        found = list(self.laid)
        self.barrier.wait(HANG)
        return found


@dataclass(frozen=True)
class ThreadGroup(ContextGroup):
    meeting: Meeting | None = None

    def _swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self.meeting is not None
        return self.meeting.swap(self.rank, tensor)

    def pass_on(self, tensor: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        arriving = self._swap(tensor)[self.rank - 1]
        assert tuple(arriving.shape) == tuple(shape)
        return lambda: arriving

    def gather(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        found = self._swap(tensor)
        assert len({one.shape for one in found}) == 1
        return lambda: torch.cat(found)

    def sum_shares(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._swap(tensor)).sum(0).chunk(self.size)[self.rank]

    def exchange(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        splits, parts = self._swap(torch.tensor(sent)), self._swap(tensor)
        arriving = [part.split(split.tolist())[self.rank] for part, split in zip(parts, splits, strict=True)]
        assert [len(part) for part in arriving] == list(received)
        return torch.cat(arriving)


def on_every_rank(ranks: int, layout: str, work: Callable[[ContextGroup], T]) -> list[T]:
    """What `work` gives on each rank; the first error of any of them is raised."""
    meeting = Meeting(ranks)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, ranks, layout, tuple(range(ranks)), meeting=meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        running = [pool.submit(run, rank) for rank in range(ranks)]
        errors = [future.exception() for future in running]
        for error in sorted(filter(None, errors), key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in running]
