"""Trained weights in memory that the run and its rollout worker share. It has no name: it ends with both of them."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

# Where a tensor begins: a multiple of what any dtype needs.
ALIGNED = 64


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the memory."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[Place]:
    """The parameters, one behind another."""
    places, start = [], 0
    for name, parameter in parameters:
        places.append(Place(name, start, tuple(parameter.shape), parameter.dtype))
        size = math.prod(parameter.shape) * parameter.dtype.itemsize  # all of it, also where this rank has a slice
        start += -(-size // ALIGNED) * ALIGNED
    return places


class WeightMemory:
    """The memory of one process; `file` is its descriptor, which this object closes."""

    def __init__(self, file: int, places: Sequence[Place]):
        self.file, self.places = file, places
        self._mapped = mmap.mmap(file, _size(places))
        self.weights: dict[str, torch.Tensor] = {
            place.name: torch.frombuffer(
                self._mapped, dtype=place.dtype, count=math.prod(place.shape), offset=place.start
            ).view(place.shape)
            for place in places
        }

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightMemory:
        """New memory with room for the parameters."""
        places = places_of(parameters)
        file = _nameless()
        os.ftruncate(file, _size(places))
        return cls(file, places)

    def give(self, parameters: Iterable[tuple[str, torch.Tensor]], tell: Callable[[], None]) -> None:
        """Put weights into the memory, and tell the worker that they are there."""
        self.write(parameters)
        tell()

    @torch.no_grad()
    def write(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            self.weights[name].copy_(parameter)

    @torch.no_grad()
    def read_into(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            parameter.copy_(self.weights[name])

    def close(self) -> None:
        """The kernel frees the memory when no process has it mapped any more."""
        self.weights.clear()
        os.close(self.file)


def _size(places: Sequence[Place]) -> int:
    last = places[-1]
    return last.start + max(1, math.prod(last.shape)) * last.dtype.itemsize


def _nameless() -> int:
    """A file of memory without a name, so that nothing is left of it however the processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
