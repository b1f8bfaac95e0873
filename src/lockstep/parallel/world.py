"""The processes of a run (`World`): this rank, its process groups and the collective operations of training."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.rendezvous import connected_store, launcher_holds_store, log_wait
from lockstep.parallel.stall import Stall
from lockstep.parallel.watchdog import Watch, watching

T = TypeVar("T")

# Timeout of collective operations: a rank that waits longer than this for other ranks fails with an error.
TIMEOUT = timedelta(minutes=30)
# Backend of collective operations on host tensors, for every device type.
HOST_COLLECTIVE = "gloo"
HOST = f"cpu:{HOST_COLLECTIVE}"
_turns = count()


@dataclass(frozen=True)
class Counter:
    """A counter in the rendezvous store, which all ranks can increase."""

    key: str

    def take(self, count: int) -> int:
        """Increases the counter by `count` and returns the previous value. No two calls get the same value."""
        return int(_store().add(self.key, count)) - count

    def remove(self) -> None:
        """Deletes the counter from the rendezvous store."""
        _store().delete_key(self.key)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@dataclass(frozen=True)
class World:
    """Describes this rank and its process groups. The rows of an update are split over `dp_size` data-parallel
    replicas. The ranks of a context- or tensor-parallel group form one data-parallel replica and return the same
    results."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    watch: Watch | None = field(default=None, compare=False, repr=False)
    context: ContextGroup | None = None
    """The context-parallel group of this rank, which splits every micro-batch. None without context parallelism."""
    tensor: int = 1
    """Tensor-parallel size: the number of neighbouring ranks that split the modules of a model and process the same
    micro-batches."""
    dp_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """The data-parallel group of this rank. All its ranks have the same index in their context- or tensor-parallel
    groups."""
    turn: int = 0
    """How often this process joined a process group before this world."""

    @property
    def _ranks_per_replica(self) -> int:
        return self.tensor * (self.context.size if self.context else 1)

    @property
    def dp_size(self) -> int:
        return self.size // self._ranks_per_replica

    @property
    def dp_rank(self) -> int:
        """The index of this rank's data-parallel replica."""
        return self.rank // self._ranks_per_replica

    @property
    def engines(self) -> int:
        """The number of rollout engines. Each rank, or each tensor-parallel group, is one engine."""
        return self.size // self.tensor

    @property
    def engine(self) -> int:
        """The index of this rank's rollout engine."""
        return self.rank // self.tensor

    @property
    def is_tp_rank0(self) -> bool:
        """Whether this is the first rank of its tensor-parallel group. All ranks of a group generate the same
        responses; only the first rank returns them."""
        return self.rank % self.tensor == 0

    @property
    def main(self) -> bool:
        """Whether this is rank 0, the only rank that writes files and logs."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums values over the data-parallel replicas. The sum is computed on the host in fp64, which is exact for
        counts."""
        if self.dp_size == 1:
            return list(values)
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a host tensor over the data-parallel replicas, in place (all-reduce)."""
        if self.dp_size > 1:
            with self._watched("an all-reduce"):
                dist.all_reduce(tensor, group=self.dp_group)
        return tensor

    def max_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Computes the elementwise maximum of a host tensor over the data-parallel replicas, in place (all-reduce)."""
        if self.dp_size > 1:
            with self._watched("an all-reduce"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.dp_group)
        return tensor

    def ranks_of(self, dp_rank: int) -> range:
        """Returns the ranks of the data-parallel replica `dp_rank`."""
        each = self.size // self.dp_size
        return range(dp_rank * each, (dp_rank + 1) * each)

    def exchange(self, parcels: Sequence[T]) -> list[T]:
        """Sends the object `parcels[i]` to rank i. Returns the objects that this rank received, ordered by sender
        (all-to-all)."""
        if self.size == 1:
            return list(parcels)
        packed = [pickle.dumps(parcel, pickle.HIGHEST_PROTOCOL) for parcel in parcels]
        sent = torch.tensor([len(one) for one in packed])
        received = torch.empty_like(sent)
        with self._watched("an all-to-all"):
            dist.all_to_all_single(received, sent)
            arriving = torch.empty(int(received.sum()), dtype=torch.uint8)
            leaving = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
            dist.all_to_all_single(arriving, leaving, received.tolist(), sent.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in arriving.split(received.tolist())]

    def gather(self, value: T) -> list[T]:
        """Returns the `value` of each rank, in rank order (all-gather)."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._watched("an all-gather"):
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def counters(self, count: int) -> list[Counter]:
        """Creates counters that all ranks share in the rendezvous store. All ranks must call this function."""
        name = self.gather(secrets.token_hex(8))[0]
        return [Counter(f"lockstep/counter/{name}/{number}") for number in range(count)]

    def barrier(self) -> None:
        if self.size > 1:
            with self._watched("a barrier"):
                dist.barrier()

    def new_gloo_group(self) -> dist.ProcessGroup:
        """Creates a gloo process group of all ranks, for use in a background thread."""
        group: dist.ProcessGroup = dist.new_group(backend=HOST.partition(":")[2], timeout=TIMEOUT)
        return group

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Names the stage of this rank inside the `with` block. Ranks that wait for this rank log the name."""
        return nullcontext() if self.watch is None else self.watch.stage(name)

    def progress(self, next_part: str | None = None) -> None:
        """Reports progress within a long stage, so that the watchdog does not end the run as stalled. `next_part` may
        name what comes next."""
        if self.watch is not None:
            self.watch.progress(next_part)

    def started(self) -> None:
        """Must be called when the first step begins. After this call the watchdog no longer counts CPU use as
        progress."""
        if self.watch is not None:
            self.watch.started()

    def _watched(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.collective(name)


@contextmanager
def joined(device: Device, stall: Stall | None = None) -> Iterator[World]:
    """Joins the process group that torchrun's environment variables describe. Without these variables the world is this
    single process.

    `stall` says after which time without progress the run is ended. None means never.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    with device.explained(), ExitStack() as stack:
        device.use(local_rank)
        if size == 1:
            watch = None if stall is None else stack.enter_context(watching(rank, size, stall))
            yield World(rank, size, local_rank, watch)
            return
        device_backend = f"{device.name}:{device.collective}"
        backend = HOST if device_backend == HOST else f"{HOST},{device_backend}"
        meeting = f"all {size} ranks at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if launcher_holds_store():
            # The watchdog starts before the process group, so that it also logs a wait for ranks that have not joined.
            watch = stack.enter_context(watching(rank, size, stall))
            with watch.collective("joining"), log_wait(f"{meeting} (this is rank {rank})"):
                store = connected_store("world", TIMEOUT)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        else:
            with log_wait(f"{meeting} (this is rank {rank})"):
                dist.init_process_group(backend, timeout=TIMEOUT)
            watch = stack.enter_context(watching(rank, size, stall))
        try:
            yield World(rank, size, local_rank, watch, turn=next(_turns))
        finally:
            dist.destroy_process_group()


def refuse_ranks(context: int, processes: int) -> None:
    """Raises `Refusal` if the number of processes is not a multiple of the group size."""
    if processes % context:
        raise Refusal.at(
            "parallel.context_parallel",
            f"{processes} process(es) cannot be divided into groups of {context}",
            f"start {context} or a multiple of it (torchrun --nproc-per-node {context}), "
            "or set parallel.context_parallel=1",
            code="wrong-process-count",
        )


def with_context(world: World, device: Device, context: int, layout: str) -> World:
    """Returns the world with its ranks in context-parallel groups of size `context`. All ranks must call this
    function."""
    refuse_ranks(context, world.size)
    if context == 1:
        return world
    ranks = range(world.size)
    groups = [tuple(ranks[first : first + context]) for first in range(0, world.size, context)]
    # A data-parallel group has the ranks with the same index in every context-parallel group.
    dp_members = [tuple(ranks[first::context]) for first in range(context)]
    # torch.distributed requires that every rank creates every process group.
    cp_groups = [dist.new_group(members, backend=device.collective, timeout=TIMEOUT) for members in groups]
    dp_groups = [dist.new_group(members, backend=HOST_COLLECTIVE, timeout=TIMEOUT) for members in dp_members]
    dp_rank, index = divmod(world.rank, context)
    group = ContextGroup(index, context, layout, groups[dp_rank], cp_groups[dp_rank])
    return replace(world, context=group, dp_group=dp_groups[index])


# A problem that one rank finds must be raised on all ranks. If only one rank raised a problem, the other ranks would
# hang in their next collective operation.


@contextmanager
def refused_together(what: str) -> Iterator[None]:
    """Collects the problems that the `with` block raises on any rank. At the end of the block, all ranks raise all
    collected problems. `what` says what the problems are about, such as weights."""
    problems: list[Problem] = []
    try:
        yield
    except Refusal as refusal:
        problems = refusal.problems
    every: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, problems)
    # Duplicates are removed, because several ranks with slices of one tensor may report the same problem.
    refuse_all(list(dict.fromkeys(problem for rank_problems in every for problem in rank_problems)), what)
