"""Weights by broadcast, both ends of it: a run and all workers of one server are the ranks of a group of their own.

A run imports it from lockstep, a server from this folder, where lockstep need not be: it imports torch alone.
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
"""The rank of whoever has the weights."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def joined(backend: str, store: dist.Store, name: Any, rank: int, size: int, seconds: float) -> dist.ProcessGroup:
    """A group beside the default one, which a run in one process does not have and of which a server's workers have
    their own. The others are waited for, for `seconds` at most."""
    with _undivided():
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
    # Without which it could not be destroyed.
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def met(
    address: str, port: int, name: str, backend: str, rank: int, size: int, seconds: float
) -> tuple[dist.ProcessGroup, dist.Store]:
    """The group as a worker joins it; the store must live as long."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
    return joined(backend, store, name, rank, size, seconds), store


def left(group: dist.ProcessGroup) -> None:
    """Destroy this end, without a wait for the others: they may be gone, with something of ours half way."""
    with suppress(RuntimeError):  # a backend that cannot
        group.abort()
    dist.destroy_process_group(group)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as whole numbers, modulo 2^64: one number that tells most changes."""
    return tensor.detach().contiguous().view(_WHOLE[tensor.element_size()]).sum(dtype=torch.int64)


class Arriving(Iterator[tuple[str, torch.Tensor]]):
    """Tensors in the order in which they were announced, one at a time; each is held against its announced sum.

    All of them are taken from the group whatever becomes of them (`take_rest`): whoever stops half way leaves the other
    ranks waiting for it.
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
            raise ValueError("what was announced is no list of different names, each with its shape and its sum")
        self._group, self._dtype, self._device = group, getattr(torch, dtype), device
        self._left = iter(list(zip(names, shapes, sums, strict=True)))
        self.spoiled: list[str] = []
        """Names of tensors that did not come as they were sent."""

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, shape, announced = next(self._left)
        tensor = torch.empty(list(shape), dtype=self._dtype, device=self._device)
        self._group.broadcast(tensor, RUN).wait()
        if int(bit_sum(tensor)) != announced:
            self.spoiled.append(name)
        return name, tensor

    def take_rest(self) -> list[str]:
        """The names of what nobody has asked for."""
        return [name for name, _ in self]


@contextmanager
def _undivided() -> Iterator[None]:
    """Where the default group is bound to a device, torch would make a new group by dividing it, and the run, which is
    not in it, would never be reached."""
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or default.bound_device_id is None:
        yield
        return
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
