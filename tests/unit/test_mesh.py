"""How a recipe lays ranks out as copies and slices, and what does not come out even."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.parallel.sharding import grid_of, sharding_of
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Parallel


@pytest.mark.parametrize(
    ("shard", "replicate", "tensor", "ranks", "grid"),
    [
        (None, None, 1, 1, (1, 1, 1)),
        (None, None, 1, 6, (1, 6, 1)),
        (2, None, 1, 6, (3, 2, 1)),
        (None, 2, 1, 6, (2, 3, 1)),
        (6, 1, 1, 6, (1, 6, 1)),
        (1, 6, 1, 6, (6, 1, 1)),
        (None, None, 2, 6, (1, 3, 2)),
        (2, None, 2, 8, (2, 2, 2)),
        (1, None, 2, 6, (3, 1, 2)),
    ],
)
def test_copies_times_slices_times_parts_are_the_ranks(shard, replicate, tensor, ranks, grid) -> None:
    assert grid_of(Parallel(shard=shard, replicate=replicate, tensor_parallel=tensor), ranks) == (*grid, 1)


@pytest.mark.parametrize(
    ("shard", "replicate", "tensor", "ranks", "where", "why"),
    [
        (4, None, 1, 6, "parallel.shard", "4 does not divide 6 processes"),
        (None, 4, 1, 6, "parallel.replicate", "4 does not divide 6 processes"),
        (2, 2, 1, 6, "parallel.shard", "2 x parallel.replicate=2 is 4, but there are 6 processes"),
        (2, None, 1, 1, "parallel.shard", "2 does not divide 1 processes"),
        (None, None, 2, 3, "parallel.tensor_parallel", "3 process(es) cannot be divided into groups of 2"),
        (
            2,
            None,
            2,
            6,
            "parallel.shard",
            "3 groups of 2 processes (parallel.tensor_parallel=2 of 6)",
        ),
    ],
)
def test_what_does_not_come_out_even_is_refused(shard, replicate, tensor, ranks, where, why) -> None:
    with pytest.raises(Refusal) as caught:
        grid_of(Parallel(shard=shard, replicate=replicate, tensor_parallel=tensor), ranks)
    (problem,) = caught.value.problems
    assert (problem.where, problem.code) == (where, "wrong-process-count")
    assert why in problem.why


def test_what_is_computed_after_another_joining_belongs_to_the_groups_of_this_one() -> None:
    """torch remembers by a mesh's ranks and names what an operator gives, and on which mesh that is."""
    for turn in range(2):
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        try:
            sharding = sharding_of(Parallel(shard=2), Cpu(), World(0, 4, turn=turn))
            assert sharding is not None
            sliced = distribute_tensor(torch.ones(4, 4), sharding.mesh, [Shard(0), Shard(0)], src_data_rank=None)
            assert (sliced + sliced).device_mesh is sharding.mesh
        finally:
            dist.destroy_process_group()
