"""The CPUs that Ray reserves for a rank and the processes it starts, and how many ranks the nodes have room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch.ray_placement import Placement
from lockstep.recipe import load_recipe


def placement(file: Path, nodes: list[dict[str, float]], resource: str, *words: str) -> Placement:
    alive: list[dict[str, Any]] = [{"Alive": True, "Resources": node} for node in nodes]
    dead = {"Alive": False, "Resources": {"CPU": 1000.0, "GPU": 1000.0}}
    return Placement(SimpleNamespace(nodes=lambda: [*alive, dead]), load_recipe(str(file), list(words)), resource)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], [4.0, 4.0]),  # the rank and three processes of the reward function
        (["rollout.max_staleness=1"], [5.0, 5.0]),
        (["rollout.engine=vllm"], [5.0, 4.0]),  # rank 0 starts the server
        (["rollout.engine=vllm", "rollout.url=http://far:8000"], [4.0, 4.0]),
        (["rollout.engine=vllm", "parallel.ray.cpus_per_rank=6"], [6.0, 6.0]),
    ],
)
def test_a_bundle_has_a_cpu_for_each_process_of_the_rank(
    online_file: Path, words: list[str], wanted: list[float]
) -> None:
    found = placement(online_file, [], "GPU", "reward.workers=3", *words).bundles(2)
    assert found == [{"CPU": count, "GPU": 1.0} for count in wanted]


def test_a_run_without_generation_needs_one_cpu_a_rank(recipe_file: Path) -> None:
    assert placement(recipe_file, [], "CPU").bundles(2) == [{"CPU": 1.0}, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("strategy", "cpus", "room"),
    [
        # Nodes of 8 GPUs and 64 CPUs, 8 and 9, none and 32.
        ("PACK", 1, 16),
        ("PACK", 4, 8 + 2),
        ("STRICT_PACK", 4, 8),
        ("SPREAD", 16, 4),
        ("STRICT_SPREAD", 4, 2),
        ("STRICT_SPREAD", 10, 1),
    ],
)
def test_room_is_counted_node_by_node(recipe_file: Path, strategy: str, cpus: int, room: int) -> None:
    nodes = [{"GPU": 8.0, "CPU": 64.0}, {"GPU": 8.0, "CPU": 9.0}, {"CPU": 32.0}]
    words = [f"parallel.ray.strategy={strategy}", f"parallel.ray.cpus_per_rank={cpus}", "parallel.launcher=ray"]
    words += ["parallel.devices=2"]
    assert placement(recipe_file, nodes, "GPU", *words).room() == room
