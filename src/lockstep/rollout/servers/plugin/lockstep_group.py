"""Weight transfer by broadcast, in a process group of the run and all workers of one server. Both use this module.

The run imports this file as part of lockstep. The server imports this file without lockstep, so it may only import
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

RUN = 0
"""The rank of the run, which sends the weights."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def joined(backend: str, store: dist.Store, name: Any, rank: int, size: int, seconds: float) -> dist.ProcessGroup:
    """Creates a process group without using the default group of torch.distributed: a single-process run has no default
    group, and the default group of the workers does not include the run. Waits up to `seconds` for the other ranks."""
    with _no_split():
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=seconds),
        )
    assert isinstance(group, dist.ProcessGroup)
    # Required by `destroy_process_group`.
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def met(
    address: str, port: int, name: str, backend: str, rank: int, size: int, seconds: float
) -> tuple[dist.ProcessGroup, dist.Store]:
    """Joins the process group as a worker. Returns the group and its store; the store must live as long as the
    group."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
    return joined(backend, store, name, rank, size, seconds), store


def left(group: dist.ProcessGroup) -> None:
    """Destroys the process group on this rank without waiting for the other ranks, which may have died during a
    broadcast."""
    with suppress(RuntimeError):  # the backend does not support abort
        group.abort()
    dist.destroy_process_group(group)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a checksum: the sum of the tensor's elements, with their bits read as integers, modulo 2^64."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


class Arriving(Iterator[tuple[str, torch.Tensor]]):
    """Receives the tensors that the run has announced one by one, and compares each tensor with its checksum.

    After an error, call `take_rest` to receive the remaining tensors; otherwise the other ranks hang.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        sums: Sequence[int],
        dtype: str,
        device: torch.device,
    ):
        if not len(names) == len(shapes) == len(sums) == len(set(names)):
            raise ValueError("the announcement needs distinct names, each with a shape and a checksum")
        self._group, self._dtype, self._device = group, getattr(torch, dtype), device
        self._left = iter(list(zip(names, shapes, sums, strict=True)))
        self.spoiled: list[str] = []
        """Names of tensors with a wrong checksum."""

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, shape, announced = next(self._left)
        tensor = torch.empty(list(shape), dtype=self._dtype, device=self._device)
        self._group.broadcast(tensor, RUN).wait()
        if int(bit_sum(tensor)) != announced:
            self.spoiled.append(name)
        return name, tensor

    def take_rest(self) -> list[str]:
        """Receives the remaining tensors; returns their names."""
        return [name for name, _ in self]


@contextmanager
def _no_split() -> Iterator[None]:
    """Prevents torch from creating the new group by splitting the default group, because the run is not in the default
    group."""
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or default.bound_device_id is None:
        yield
        return
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
