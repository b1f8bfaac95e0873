"""How a recipe lays ranks out as copies and slices, and what does not come out even."""

from __future__ import annotations

import pytest

from lockstep.errors import Refusal
from lockstep.parallel.mesh import grid_of
from lockstep.recipe.parallel import Parallel


@pytest.mark.parametrize(
    ("shard", "replicate", "ranks", "grid"),
    [
        (None, None, 1, (1, 1)),
        (None, None, 6, (1, 6)),
        (2, None, 6, (3, 2)),
        (None, 2, 6, (2, 3)),
        (6, 1, 6, (1, 6)),
        (1, 6, 6, (6, 1)),
    ],
)
def test_copies_times_slices_are_the_ranks(shard, replicate, ranks, grid) -> None:
    assert grid_of(Parallel(shard=shard, replicate=replicate), ranks) == grid


@pytest.mark.parametrize(
    ("shard", "replicate", "ranks", "where", "why"),
    [
        (4, None, 6, "parallel.shard", "4 does not divide 6 processes"),
        (None, 4, 6, "parallel.replicate", "4 does not divide 6 processes"),
        (2, 2, 6, "parallel.shard", "2 x parallel.replicate=2 is 4, and there are 6 processes"),
        (2, None, 1, "parallel.shard", "2 does not divide 1 processes"),
    ],
)
def test_what_does_not_come_out_even_is_refused(shard, replicate, ranks, where, why) -> None:
    with pytest.raises(Refusal) as caught:
        grid_of(Parallel(shard=shard, replicate=replicate), ranks)
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == (where, why)
