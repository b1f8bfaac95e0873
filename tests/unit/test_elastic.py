"""With how many devices a run goes on that has lost some: the most that its layout comes out even on."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import Refusal
from lockstep.launch.ray_placement import fitting_devices, layout_of, refuse_rigid
from lockstep.parallel.sharding import grid_of
from lockstep.recipe.keys_parallel import Parallel


@pytest.mark.parametrize(
    ("keys", "asked", "there", "taken"),
    [
        ({}, 4, 3, 3),
        ({}, 4, 9, 4),  # never more than were asked for
        ({"shard": 2}, 4, 3, 2),
        ({"shard": 4}, 8, 7, 4),
        ({"shard": 4}, 8, 3, 0),
        ({"replicate": 3}, 9, 8, 6),
        ({"shard": 2, "replicate": 2}, 4, 3, 0),
        ({"tensor_parallel": 2}, 8, 7, 6),
        ({"tensor_parallel": 2, "shard": 2}, 8, 7, 4),
        ({"context_parallel": 3}, 9, 8, 6),
        ({"context_parallel": 2, "shard": 3}, 12, 11, 6),  # 9 has whole slices, 10 whole groups
        ({"offload": "params"}, 2, 1, 0),
    ],
    ids=str,
)
def test_the_most_that_come_out_even(keys: dict[str, Any], asked: int, there: int, taken: int) -> None:
    settings = Parallel(devices=asked, elastic=True, **keys)
    assert fitting_devices(settings, there) == taken
    if taken:
        grid_of(settings, taken)


@pytest.mark.parametrize(
    ("keys", "why", "remedy"),
    [
        (
            {"shard": 2, "replicate": 2},
            "parallel.shard=2 and parallel.replicate=2 cannot use fewer than 4 devices",
            "remove parallel.shard or parallel.replicate",
        ),
        ({"shard": 4}, "parallel.shard=4 cannot use fewer than 4 devices", "use more devices"),
        ({"tensor_parallel": 4}, "parallel.tensor_parallel=4 cannot use fewer than 4 devices", "use more devices"),
    ],
    ids=str,
)
def test_a_layout_that_fits_no_fewer_is_refused_at_the_start(keys: dict[str, Any], why: str, remedy: str) -> None:
    with pytest.raises(Refusal) as caught:
        refuse_rigid(Parallel(devices=4, elastic=True, **keys))
    (problem,) = caught.value.problems
    assert (problem.where, problem.why) == ("parallel.elastic", why)
    assert problem.remedy.startswith(remedy)
    refuse_rigid(Parallel(devices=4, **keys))  # who does not ask for it waits for what was lost


def test_what_may_lose_some_is_not_refused() -> None:
    for keys in ({}, {"shard": 2}, {"tensor_parallel": 2, "context_parallel": 2}):
        refuse_rigid(Parallel(devices=8, elastic=True, **keys))
    refuse_rigid(Parallel(devices=1, elastic=True))
    assert (
        layout_of(Parallel(devices=8, shard=2, context_parallel=2))
        == "parallel.shard=2 and parallel.context_parallel=2"
    )
