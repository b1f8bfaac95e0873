"""The processes of a run: this rank, its groups, and the collectives that the loops need."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.parallel.rendezvous import connected_store, launcher_holds_store, told_wait
from lockstep.parallel.stall import Stall
from lockstep.parallel.watchdog import Watch, watching

if TYPE_CHECKING:
    from lockstep.parallel.context import ContextGroup


# The processes of a run: who we are, and the few collectives the loops need. One process needs none of them.

T = TypeVar("T")

# A rank that waits longer than this for the others gives up with an error instead of hanging.
TIMEOUT = timedelta(minutes=30)
# What ranks exchange tensors on the host with, whatever the device.
HOST_COLLECTIVE = "gloo"
HOST = f"cpu:{HOST_COLLECTIVE}"
_turns = count()


@dataclass(frozen=True)
class Counter:
    """A number that the ranks count up together."""

    key: str

    def take(self, count: int) -> int:
        """Count on by so many; returns where it stood. No two ranks are told the same."""
        return int(_store().add(self.key, count)) - count

    def remove(self) -> None:
        """Nobody needs it any more."""
        _store().delete_key(self.key)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@dataclass(frozen=True)
class World:
    """All processes. The rows of an update are divided into `shares`; the ranks of a context or tensor group have one
    between them, and each of them says the same of it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    watch: Watch | None = field(default=None, compare=False, repr=False)
    context: ContextGroup | None = None
    """The ranks that divide every micro-batch with this one; None where this rank has its own alone."""
    tensor: int = 1
    """Neighbouring ranks that divide the modules of a model, and see the same micro-batches."""
    column: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """One rank of each context or tensor group, this one among them."""
    turn: int = 0
    """How often this process had joined others before."""

    @property
    def _together(self) -> int:
        return self.tensor * (self.context.size if self.context else 1)

    @property
    def shares(self) -> int:
        return self.size // self._together

    @property
    def share(self) -> int:
        """The number of this rank's share."""
        return self.rank // self._together

    @property
    def engines(self) -> int:
        """How many ranks, or groups that divide a model, generate by themselves."""
        return self.size // self.tensor

    @property
    def engine(self) -> int:
        """The number of this rank's."""
        return self.rank // self.tensor

    @property
    def speaks(self) -> bool:
        """Of the ranks that divide a model, which generate the same, one says what came of it."""
        return self.rank % self.tensor == 0

    @property
    def main(self) -> bool:
        """Rank 0 alone writes and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all shares, on the host in double precision: exact for counts, whatever the device can add."""
        if self.shares == 1:
            return list(values)
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all shares of a tensor on the host, in place."""
        if self.shares > 1:
            with self._meeting("a sum"):
                dist.all_reduce(tensor, group=self.column)
        return tensor

    def max_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all shares' numbers, of a tensor on the host, in place."""
        if self.shares > 1:
            with self._meeting("a maximum"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.column)
        return tensor

    def ranks_of(self, share: int) -> range:
        """The ranks that have a share."""
        each = self.size // self.shares
        return range(share * each, (share + 1) * each)

    def exchange(self, parcels: Sequence[T]) -> list[T]:
        """Parcel i goes to rank i; returns what every rank had for this one, in rank order. Nobody else sees it."""
        if self.size == 1:
            return list(parcels)
        packed = [pickle.dumps(parcel, pickle.HIGHEST_PROTOCOL) for parcel in parcels]
        sent = torch.tensor([len(one) for one in packed])
        received = torch.empty_like(sent)
        with self._meeting("an exchange"):
            dist.all_to_all_single(received, sent)
            arriving = torch.empty(int(received.sum()), dtype=torch.uint8)
            leaving = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
            dist.all_to_all_single(arriving, leaving, received.tolist(), sent.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in arriving.split(received.tolist())]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._meeting("a gathering"):
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def counters(self, count: int) -> list[Counter]:
        """New counters that all ranks share, in the store where they met (a collective)."""
        name = self.gather(secrets.token_hex(8))[0]
        return [Counter(f"lockstep/counter/{name}/{number}") for number in range(count)]

    def barrier(self) -> None:
        if self.size > 1:
            with self._meeting("a barrier"):
                dist.barrier()

    def apart(self) -> dist.ProcessGroup:
        """All ranks as another group over the host's memory: for a thread beside the one that trains."""
        group: dist.ProcessGroup = dist.new_group(backend=HOST.partition(":")[2], timeout=TIMEOUT)
        return group

    def stage(self, name: str) -> AbstractContextManager[None]:
        """What the ranks do inside: told by the others when this rank is waited for."""
        return nullcontext() if self.watch is None else self.watch.stage(name)

    def progress(self, next_part: str | None = None) -> None:
        """A part of a long stage is done, so the run has not stalled; the next one by name, where it is another."""
        if self.watch is not None:
            self.watch.progress(next_part)

    def started(self) -> None:
        """The first step begins: a rank that is only busy counts as stalled from here on."""
        if self.watch is not None:
            self.watch.started()

    def _meeting(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.collective(name)


@contextmanager
def joined(device: Device, stall: Stall | None = None) -> Iterator[World]:
    """The world that torchrun's environment describes; a lone process without it.

    `stall`: when a run counts as stalled, and is ended; None where it never does.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    with device.explained(), ExitStack() as stack:
        device.use(local_rank)
        if size == 1:
            watch = None if stall is None else stack.enter_context(watching(rank, size, stall))
            yield World(rank, size, local_rank, watch)
            return
        own = f"{device.name}:{device.collective}"
        backend = HOST if own == HOST else f"{HOST},{own}"
        meeting = f"all {size} ranks at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if launcher_holds_store():
            # So the first meeting can be watched too.
            watch = stack.enter_context(watching(rank, size, stall))
            with watch.collective("joining"), told_wait(f"{meeting} (this is rank {rank})"):
                store = connected_store("world", TIMEOUT)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        else:
            with told_wait(f"{meeting} (this is rank {rank})"):
                dist.init_process_group(backend, timeout=TIMEOUT)
            watch = stack.enter_context(watching(rank, size, stall))
        try:
            yield World(rank, size, local_rank, watch, turn=next(_turns))
        finally:
            dist.destroy_process_group()


# What one rank refuses, refused by all: the others would wait for it in their next collective.


@contextmanager
def refused_together(what: str) -> Iterator[None]:
    """Every rank of the run does what is inside; all raise the problems with `what` that any of them found there (a
    collective)."""
    problems: list[Problem] = []
    try:
        yield
    except Refusal as refusal:
        problems = refusal.problems
    every: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, problems)
    # Of a tensor that several have slices of, each may say the same.
    refuse_all(list(dict.fromkeys(problem for found in every for problem in found)), what)
