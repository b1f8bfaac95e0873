"""How a recipe lays ranks out as copies and slices, and what does not come out even."""

from __future__ import annotations

import pytest

from lockstep.errors import Refusal
from lockstep.parallel.mesh import grid_of
from lockstep.recipe.parallel import Parallel


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
    assert grid_of(Parallel(shard=shard, replicate=replicate, tensor=tensor), ranks) == grid


@pytest.mark.parametrize(
    ("shard", "replicate", "tensor", "ranks", "where", "why"),
    [
        (4, None, 1, 6, "parallel.shard", "4 does not divide 6 processes"),
        (None, 4, 1, 6, "parallel.replicate", "4 does not divide 6 processes"),
        (2, 2, 1, 6, "parallel.shard", "2 x parallel.replicate=2 is 4, and there are 6 processes"),
        (2, None, 1, 1, "parallel.shard", "2 does not divide 1 processes"),
        (None, None, 2, 3, "parallel.tensor", "3 process(es) cannot be divided into groups of 2"),
        (2, None, 2, 6, "parallel.shard", "2 does not divide 3 groups of 2 processes (parallel.tensor=2 of 6)"),
    ],
)
def test_what_does_not_come_out_even_is_refused(shard, replicate, tensor, ranks, where, why) -> None:
    with pytest.raises(Refusal) as caught:
        grid_of(Parallel(shard=shard, replicate=replicate, tensor=tensor), ranks)
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == (where, why)
