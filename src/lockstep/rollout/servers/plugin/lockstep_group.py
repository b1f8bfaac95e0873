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


def flat_bucket(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Returns the bytes of a bucket, which is broadcast at once: the checksum of each tensor, and then all tensors."""
    converted = [tensor.detach().to(dtype).contiguous() for tensor in tensors]
    sums = torch.stack([bit_sum(tensor) for tensor in converted])
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (sums, *converted)])


class Arriving(Iterator[tuple[str, torch.Tensor]]):
    """Receives the tensors that the run has announced, bucket by bucket, and compares each tensor with its checksum.
    While a bucket is loaded, the next one arrives. `counts` is the number of tensors of each bucket.

    After an error, call `take_rest` to receive the remaining tensors; otherwise the other ranks hang.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        counts: Sequence[int],
        dtype: str,
        device: torch.device,
    ):
        if not len(names) == len(shapes) == sum(counts) == len(set(names)):
            raise ValueError("the announcement needs distinct names, each with a shape and a bucket")
        self._group, self._dtype, self._device = group, getattr(torch, dtype), device
        entries = iter(zip(names, map(torch.Size, shapes), strict=True))
        self._buckets = iter([[next(entries) for _ in range(count)] for count in counts])
        self.spoiled: list[str] = []
        """Names of tensors with a wrong checksum."""
        self._ready: list[tuple[str, torch.Tensor]] = []
        self._next = self._receive()

    def __next__(self) -> tuple[str, torch.Tensor]:
        if not self._ready:
            if self._next is None:
                raise StopIteration
            entries, buffer, work = self._next
            work.wait()
            self._next = self._receive()
            self._ready = list(reversed(self._unpacked(entries, buffer)))
        return self._ready.pop()

    def _receive(self) -> tuple[list[tuple[str, torch.Size]], torch.Tensor, Any] | None:
        """Starts to receive the next bucket, if there is one."""
        entries = next(self._buckets, None)
        if entries is None:
            return None
        size = sum(8 + shape.numel() * self._dtype.itemsize for _, shape in entries)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return entries, buffer, self._group.broadcast(buffer, RUN)

    def _unpacked(
        self, entries: Sequence[tuple[str, torch.Size]], buffer: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        sizes = [shape.numel() * self._dtype.itemsize for _, shape in entries]
        sums, *parts = buffer.split([8 * len(entries), *sizes])
        made = []
        for (name, shape), part, announced in zip(entries, parts, sums.view(torch.int64).tolist(), strict=True):
            tensor = part.view(self._dtype).view(shape)
            if int(bit_sum(tensor)) != announced:
                self.spoiled.append(name)
            made.append((name, tensor))
        return made

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
