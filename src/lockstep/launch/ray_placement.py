"""Places ranks and engines on the nodes of a Ray cluster: bundles, strategies, waits for nodes, `parallel.elastic`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import Problem, Refusal
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, say
from lockstep.parallel.sharding import grid_of, refuse_offload
from lockstep.parallel.world import refuse_ranks
from lockstep.recipe.keys_parallel import Parallel
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES

if TYPE_CHECKING:
    from lockstep.recipe import Recipe

# Time limits: of one attempt to place the ranks, of placement at the start of the run, and of the wait for lost devices
# after a failure. `parallel.ray.wait_seconds` replaces the last two.
_TRY_SECONDS, _PLACE_SECONDS, _RETURN_SECONDS = 10.0, 120.0, 300.0
_PAUSE_SECONDS = 1.0
# The number of values of one node label in a message.
_TOLD_VALUES = 8


# `parallel.elastic`: selects the number of devices with which a run continues after devices were lost.


def fitting_devices(settings: Parallel, available: int) -> int:
    """Returns the largest number of devices with which the parallel layout works. The result is at most the number of
    available devices and the number of devices in the recipe. Returns 0 if there are too few devices."""
    most = min(settings.devices or 1, available)
    return next((devices for devices in range(most, 0, -1) if _fits(settings, devices)), 0)


def _fits(settings: Parallel, devices: int) -> bool:
    try:
        grid_of(settings, devices)
        refuse_ranks(settings.group, devices)  # context- and tensor-parallel groups must be complete
        refuse_offload(settings, devices)
    except Refusal:
        return False
    return True


def layout_of(settings: Parallel) -> str:
    """Returns as text the recipe keys (and their values) that constrain the number of devices."""
    constraints = {
        "shard": settings.shard is not None,
        "replicate": settings.replicate is not None,
        "tensor_parallel": settings.tensor_parallel > 1,
        "expert_parallel": settings.expert_parallel > 1,
        "context_parallel": settings.context_parallel > 1,
        "offload": settings.offload in ("params", "all"),
        "offload_critic": settings.offload_critic in ("params", "all"),
    }
    return " and ".join(f"parallel.{key}={getattr(settings, key)}" for key, is_set in constraints.items() if is_set)


def refuse_rigid(settings: Parallel) -> None:
    """Raises `Refusal` if `parallel.elastic` is set, but the parallel layout cannot use fewer devices than the recipe
    requests."""
    requested = settings.devices or 1
    if not settings.elastic or requested == 1 or fitting_devices(settings, requested - 1):
        return
    both = settings.shard is not None and settings.replicate is not None
    way = (
        "remove parallel.shard or parallel.replicate, so that the removed value is derived from the remaining key"
        if both
        else "use more devices"
    )
    raise Refusal.at(
        "parallel.elastic",
        f"{layout_of(settings)} cannot use fewer than {requested} devices",
        f"{way}, or remove parallel.elastic, so that a restart waits until lost devices are back",
        code="wrong-process-count",
    )


# The bundles of the placement groups, one per rank and one per engine of `rollout.server.replicas`.

Bundle = dict[str, float]


def cpus_per_rank(recipe: Recipe) -> int:
    """Returns the number of CPUs of a bundle: one for the rank, and one for each process that the rank starts."""
    if recipe.parallel.ray.cpus_per_rank is not None:
        return recipe.parallel.ray.cpus_per_rank
    if recipe.method not in ONLINE:
        return 1
    rollout = recipe.rollout
    rewards = recipe.reward.workers if recipe.reward.function is not None else 0
    environments = rollout.environment_workers if rollout.interactive else 0
    return 1 + rewards + environments + int(rollout.max_staleness is not None)


def starts_server(recipe: Recipe) -> int:
    """Returns 1 if rank 0 starts a serving engine, which needs a CPU of its own, else 0."""
    own = recipe.parallel.ray.cpus_per_rank is None and recipe.method in ONLINE and not replicas(recipe)
    return int(own and ENGINES[recipe.rollout.engine].served and recipe.rollout.url is None)


def replicas(recipe: Recipe) -> int:
    """Returns the number of engines that have bundles of their own."""
    return (recipe.rollout.server.replicas or 0) if recipe.method in ONLINE else 0


def cpus_per_engine(recipe: Recipe) -> int:
    server = recipe.rollout.server
    return server.cpus or server.tensor_parallel + 2


def _ready(groups: Sequence[Any]) -> bool:
    """Waits for a while until all groups are placed. Returns whether they are."""
    given_up = time.monotonic() + _TRY_SECONDS
    return all(group.wait(max(1.0, given_up - time.monotonic())) for group in groups)


def _resources(bundle: Bundle, labels: Mapping[str, str]) -> str:
    found = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
    return found + (f" on a node with {_selected(labels)}" if labels else "")


def _selected(labels: Mapping[str, str]) -> str:
    return " and ".join(f"{key}={value}" for key, value in labels.items())


def has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Returns whether Ray's label selectors select a node. A selector with `!` also selects nodes without the label."""
    own = node.get("Labels", {})
    for key, selector in labels.items():
        values = selector.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        if (own.get(key) in [value.strip() for value in values]) == selector.startswith("!"):
            return False
    return True


def _labels_of(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Returns as text the labels of the nodes, without their ids."""
    found: dict[str, dict[str, None]] = {}
    for node in nodes:
        for key, value in sorted(node.get("Labels", {}).items()):
            if key != "ray.io/node-id":
                found.setdefault(key, {})[value] = None
    told = [
        f"{key}={' or '.join(list(values)[:_TOLD_VALUES])}" + (" or others" if len(values) > _TOLD_VALUES else "")
        for key, values in found.items()
    ]
    return ", ".join(told) or "no labels"


class PlacedBundles(NamedTuple):
    """The placement group of the ranks, their number, and the placement group of the engines, if there are any."""

    ranks: Any
    devices: int
    engines: Any = None


class Placement:
    def __init__(self, ray: Any, recipe: Recipe, resource: str):
        self.ray, self.recipe, self.resource = ray, recipe, resource
        self.settings = recipe.parallel.ray
        self.cpus = cpus_per_rank(recipe)
        self.engine_labels = recipe.rollout.server.labels if replicas(recipe) else {}

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def bundles(self, devices: int) -> list[Bundle]:
        """Returns the resources of each rank. The first bundle also has the CPU of a serving engine."""
        device = {} if self.resource == "CPU" else {self.resource: 1.0}
        extra = [starts_server(self.recipe), *[0] * (devices - 1)]
        return [{"CPU": float(self.cpus + more), **device} for more in extra]

    def engine_bundles(self) -> list[Bundle]:
        """Returns the resources of each engine."""
        devices = float(self.recipe.rollout.server.tensor_parallel)
        device = {} if self.resource == "CPU" else {self.resource: devices}
        return [{"CPU": float(cpus_per_engine(self.recipe)), **device} for _ in range(replicas(self.recipe))]

    def room(self) -> int:
        """Returns how many ranks the nodes of the cluster could hold beside the engines if nobody else used them."""
        strategy, engines = self.settings.strategy, self.engine_bundles()
        rank = {**self.bundles(1)[0], "CPU": float(self.cpus)}
        most = {0: 0}
        """The largest number of ranks for each number of engines, on the nodes so far."""
        for node in self._nodes():
            has, after = node["Resources"], dict[int, int]()
            most_engines = len(engines) if has_labels(node, self.engine_labels) else 0
            for beside in range(most_engines + 1):
                left = {name: has.get(name, 0) - sum(one[name] for one in engines[:beside]) for name in rank}
                if min(left.values()) < 0:
                    break
                count = min(int(left[name] // rank[name]) for name in rank)
                count = count if has_labels(node, self.settings.labels) else 0
                count = min(count, 1) if strategy == "STRICT_SPREAD" else count
                for earlier, ranks in most.items():
                    total = max(ranks, count) if strategy == "STRICT_PACK" else ranks + count
                    number = min(earlier + beside, len(engines))
                    after[number] = max(total, after.get(number, 0))
            most = after
        return most.get(len(engines), 0)

    def _groups(self, devices: int) -> tuple[Any, Any]:
        """Creates the placement groups of the ranks and of the engines. What needs most of one node is first."""
        from ray.util.placement_group import placement_group

        name, strategy, engines = self.recipe.run.name, self.settings.strategy, self.engine_bundles()

        def group(bundles: list[Bundle], strategy: str, labels: dict[str, str], name: str) -> Any:
            selectors = [labels] * len(bundles) if labels else None
            return placement_group(bundles, strategy, name, bundle_label_selector=selectors)

        def ranks() -> Any:
            return group(self.bundles(devices), strategy, self.settings.labels, name)

        def beside() -> Any:
            return group(engines, "PACK", self.engine_labels, f"{name}-engines")

        if not engines:
            return ranks(), None
        if strategy.startswith("STRICT_"):
            return ranks(), beside()
        first = beside()
        return ranks(), first

    @contextmanager
    def placed(self, turn: int) -> Iterator[PlacedBundles]:
        """Yields the placement groups. The group of the ranks has as many devices as the recipe requests. With
        `parallel.elastic` it may have fewer devices after a failure. `turn` counts restarts."""
        from ray.util.placement_group import remove_placement_group

        requested, elastic = self.recipe.parallel.devices or 1, turn > 0 and self.recipe.parallel.elastic
        limit = self.settings.wait_seconds or (_RETURN_SECONDS if turn else _PLACE_SECONDS)
        # A placement group that waits is what an autoscaler reads, so it is kept until the time limit.
        scaled = self.settings.wait_seconds is not None and not elastic
        begun = time.monotonic()
        log_at = begun + TELL_SECONDS
        while True:
            room = self.room()
            devices = fitting_devices(self.recipe.parallel, room) if elastic else requested
            if scaled or 0 < devices <= room:
                ranks, engines = self._groups(devices)
                groups = [group for group in (ranks, engines) if group is not None]
                try:
                    while not (ready := _ready(groups)) and scaled and time.monotonic() - begun < limit:
                        log_at = self._log_wait(requested, log_at)
                    if ready:
                        self._say_fewer(requested, devices, room)
                        yield PlacedBundles(ranks, devices, engines)
                        return
                finally:
                    for group in groups:
                        remove_placement_group(group)
            elif turn == 0:
                limit = 0
            if time.monotonic() - begun >= limit:
                raise self._too_few(requested, limit)
            log_at = self._log_wait(requested, log_at)
            # The cluster is asked again, because Ray detects a lost node only after a while, and a new node may replace
            # a lost one.
            time.sleep(_PAUSE_SECONDS)

    def _log_wait(self, requested: int, log_at: float) -> float:
        """Logs a long wait. Returns the time of the next message."""
        if time.monotonic() < log_at:
            return log_at
        say(f"waiting for {requested} ranks on the Ray cluster: {self._missing(requested)}")
        return time.monotonic() + TELL_AGAIN_SECONDS

    def _missing(self, requested: int) -> str:
        """Returns what the ranks need, and what the cluster has."""
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        first, engines = self.bundles(1)[0] | {"CPU": float(self.cpus)}, self.engine_bundles()
        need = _resources(first, self.settings.labels)
        if engines:
            engine = _resources(engines[0], self.engine_labels)
            need += f", and each of the {len(engines)} engines (rollout.server.replicas) needs {engine}"
        names = dict.fromkeys([self.resource, "CPU"])
        have = " and ".join(
            f"{int(total.get(name, 0))} {name} in total ({int(free.get(name, 0))} free)" for name in names
        )
        return (
            f"each needs {need}; the cluster's nodes have {have}, and room for {self.room()} of {requested} ranks with "
            f"parallel.ray.strategy={self.settings.strategy}"
        )

    def _unknown_labels(self, waited: str) -> list[Problem]:
        """Returns a problem for each key with labels that no node has."""
        nodes = self._nodes()
        remedy = (
            "use labels that a node has, start nodes with them (`ray start --labels=KEY=VALUE ...`), or set "
            "parallel.ray.wait_seconds if an autoscaler adds nodes"
        )
        keys = {"parallel.ray.labels": self.settings.labels, "rollout.server.labels": self.engine_labels}
        return [
            Problem(
                key,
                f"no node of the cluster has {_selected(labels)}{waited}; the nodes have {_labels_of(nodes)}",
                remedy,
                code="too-few-devices",
            )
            for key, labels in keys.items()
            if labels and not any(has_labels(node, labels) for node in nodes)
        ]

    def _too_few(self, requested: int, waited: float) -> Refusal:
        after = f" after {waited:g} s" if waited else ""
        if unknown := self._unknown_labels(after):
            return Refusal(unknown)
        return Refusal.at(
            "parallel.devices",
            f"is {requested}, and the ranks could not be placed{after}: {self._missing(requested)}",
            "start more nodes (`ray start --address=...`), wait for other jobs, reduce parallel.devices, "
            "parallel.ray.cpus_per_rank or rollout.server.replicas, or set parallel.ray.wait_seconds if an autoscaler "
            "adds nodes",
            code="too-few-devices",
        )

    def _say_fewer(self, requested: int, devices: int, room: int) -> None:
        if devices < requested:
            layout = layout_of(self.recipe.parallel)
            why = f", the most that {layout} allows" if devices < min(requested, room) else ""
            have = f"the cluster has room for {room} of {requested} ranks"
            say(f"{have}: the run continues with {devices} devices{why}")
