"""The CPUs that Ray reserves for a rank and the processes it starts, and how many ranks the nodes have room for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.launch.ray_placement import Placement
from lockstep.recipe import load_recipe
from lockstep.rollout.servers.vllm import Vllm
from lockstep.rollout.servers.weight_transports import by_collective, by_memory


def placement(
    file: Path, nodes: list[dict[str, float]], resource: str, *words: str, labels: Sequence[dict[str, str]] = ()
) -> Placement:
    alive: list[dict[str, Any]] = [{"Alive": True, "Resources": node} for node in nodes]
    for node, own in zip(alive, labels, strict=False):
        node["Labels"] = own
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
        # The engines have bundles of their own.
        (["rollout.engine=vllm", "rollout.server.replicas=2", "parallel.launcher=ray"], [4.0, 4.0]),
    ],
)
def test_a_bundle_has_a_cpu_for_each_process_of_the_rank(
    online_file: Path, words: list[str], wanted: list[float]
) -> None:
    found = placement(online_file, [], "GPU", "reward.workers=3", "parallel.devices=2", *words).bundles(2)
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


ENGINES = ["parallel.launcher=ray", "parallel.devices=2", "parallel.ray.cpus_per_rank=1", "rollout.engine=vllm"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {"CPU": 3.0, "GPU": 1.0}),  # a server, an engine and a worker
        (["rollout.server.tensor_parallel=4"], {"CPU": 6.0, "GPU": 4.0}),
        (["rollout.server.tensor_parallel=4", "rollout.server.cpus=16"], {"CPU": 16.0, "GPU": 4.0}),
    ],
)
def test_an_engine_has_its_devices_and_cpus(online_file: Path, words: list[str], wanted: dict[str, float]) -> None:
    found = placement(online_file, [], "GPU", *ENGINES, "rollout.server.replicas=2", *words)
    assert found.engine_bundles() == [wanted, wanted]
    on_cpu = placement(online_file, [], "CPU", *ENGINES, "rollout.server.replicas=2", *words)
    assert on_cpu.engine_bundles() == [{"CPU": wanted["CPU"]}] * 2


@pytest.mark.parametrize(
    ("strategy", "replicas", "devices", "room"),
    [
        # Nodes of 8 and 4 GPUs, and one without. An engine of 8 GPUs leaves the 4 of the other node.
        ("PACK", 1, 8, 4),
        ("PACK", 2, 8, 0),
        ("PACK", 1, 4, 8),
        ("PACK", 3, 2, 6),
        # All ranks on one node: the engines of 2 GPUs go to the smaller node while they fit.
        ("STRICT_PACK", 1, 2, 8),
        ("STRICT_PACK", 2, 2, 8),
        ("STRICT_PACK", 3, 2, 6),
        ("STRICT_PACK", 1, 8, 4),
        # A rank per node: an engine may be beside a rank.
        ("STRICT_SPREAD", 1, 8, 1),
        ("STRICT_SPREAD", 1, 2, 2),
    ],
)
def test_room_for_ranks_is_counted_beside_the_engines(
    online_file: Path, strategy: str, replicas: int, devices: int, room: int
) -> None:
    nodes = [{"GPU": 8.0, "CPU": 64.0}, {"GPU": 4.0, "CPU": 64.0}, {"CPU": 32.0}]
    words = [f"parallel.ray.strategy={strategy}", f"rollout.server.replicas={replicas}"]
    words += [f"rollout.server.tensor_parallel={devices}"]
    assert placement(online_file, nodes, "GPU", *ENGINES, *words).room() == room


LABELS = [
    {"rack": "a", "ray.io/accelerator-type": "H200"},
    {"rack": "b", "ray.io/accelerator-type": "H100"},
    {"zone": "z"},
]


@pytest.mark.parametrize(
    ("words", "room"),
    [
        # Nodes of 8 and 4 GPUs, and one of 2 GPUs that is in no rack. Two engines of 2 GPUs.
        ([], 8 + 4 + 2 - 4),
        (["parallel.ray.labels={rack: a}"], 8),
        (["parallel.ray.labels={rack: a}", "rollout.server.labels={rack: a}"], 4),
        (["parallel.ray.labels={rack: 'in(a, b)'}", "rollout.server.labels={rack: b}"], 8),
        (["parallel.ray.labels={rack: '!a'}", "rollout.server.labels={rack: a}"], 4 + 2),
        (["parallel.ray.labels={rack: '!in(a,b)'}", "rollout.server.labels={rack: a}"], 2),
        (["parallel.ray.labels={rack: a, ray.io/accelerator-type: H100}"], 0),
        (["rollout.server.labels={zone: z}"], 0),  # room for one engine of two
    ],
)
def test_room_is_counted_on_nodes_with_the_labels(online_file: Path, words: list[str], room: int) -> None:
    nodes = [{"GPU": count, "CPU": 64.0} for count in (8.0, 4.0, 2.0)]
    own = ["rollout.server.replicas=2", "rollout.server.tensor_parallel=2"]
    assert placement(online_file, nodes, "GPU", *ENGINES, *own, *words, labels=LABELS).room() == room


@pytest.mark.parametrize("labels", ["{rack: -a}", "{rack: 'in()'}", "{rack: '!!a'}", "{'a rack': b}", "{rack: 1}"])
def test_what_is_no_label_is_refused(online_file: Path, labels: str) -> None:
    with pytest.raises(Refusal) as refused:
        load_recipe(str(online_file), [*ENGINES, f"parallel.ray.labels={labels}"])
    assert refused.value.problems[0].where.startswith("parallel.ray.labels")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["rollout.server.devices=[1]"], "rollout.server.devices"),
        (["rollout.weight_sync=memory"], "rollout.weight_sync"),
        (["rollout.url=http://far:8000"], "rollout.server.replicas"),
        (["rollout.engine=native"], "rollout.server"),
        (["parallel.launcher=local"], "rollout.server.replicas"),
        (["rollout.server.replicas=null", "rollout.server.cpus=2"], "rollout.server.cpus"),
        (["rollout.server.replicas=null", "rollout.server.labels={rack: a}"], "rollout.server.labels"),
    ],
)
def test_keys_that_contradict_engines_of_ray_are_refused(online_file: Path, words: list[str], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        load_recipe(str(online_file), [*ENGINES, "rollout.server.replicas=2", *words])
    assert where in [problem.where for problem in refused.value.problems]


def test_weights_go_to_engines_of_ray_by_broadcast_and_adapters_by_files(online_file: Path) -> None:
    rollout = load_recipe(str(online_file), [*ENGINES, "rollout.server.replicas=1"]).rollout
    assert by_collective(rollout, adapter=False)
    assert not by_collective(rollout, adapter=True)
    assert not by_memory(rollout, Vllm(), Cpu(), 1, adapter=False)
    own = load_recipe(str(online_file), ["rollout.engine=vllm"]).rollout
    assert not by_collective(own, adapter=False)
