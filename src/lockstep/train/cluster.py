"""A cluster that need not be here, as `lockstep plan --cluster` names it, and what its links take for collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.device.chips import CHIPS, LINKS, ChipFacts, chip_named, nearest_chip
from lockstep.device.cpu import host_memory
from lockstep.errors import Refusal

GRAMMAR = "NODESxDEVICES:DEVICE, as 2x8:h200 for two nodes of eight"


class Members(NamedTuple):
    """The ranks of a group: on how many nodes, and how many on each."""

    nodes: int
    each: int

    @property
    def size(self) -> int:
        return self.nodes * self.each


@dataclass(frozen=True)
class TargetCluster:
    nodes: int
    each: int
    chip: ChipFacts

    @property
    def devices(self) -> int:
        return self.nodes * self.each

    @property
    def memory(self) -> int:
        """Bytes of one device."""
        return self.chip.memory if self.chip.memory is not None else host_memory().total // self.each

    def __str__(self) -> str:
        return f"{self.nodes}x{self.each}:{self.chip.name}"

    def neighbours(self, size: int) -> Members:
        """Of a group of ranks that follow each other."""
        return Members(1, size) if size <= self.each else Members(-(-size // self.each), self.each)

    def apart(self, size: int, stride: int) -> Members:
        """Of a group in which a rank and the next are `stride` apart."""
        on_a_node = max(1, self.each // stride)
        return Members(1, size) if size <= on_a_node else Members(-(-size // on_a_node), on_a_node)

    def gather_seconds(self, whole: float, group: Members) -> float:
        """All-gather of `whole` bytes, or a reduce-scatter of them, which goes the same way back.

        Each device gets what the others have: over the links of its node, all of it; over those between nodes what is
        on other nodes, which comes to a node once, over the links of all its members of the group. Both go on at a
        time.
        """
        if group.size == 1:
            return 0.0
        inside = whole * (group.size - 1) / group.size / self.chip.inside if group.each > 1 else 0.0
        outside = whole * (group.nodes - 1) / group.nodes / (group.each * self.chip.between)
        return max(inside, outside) / LINKS

    def sum_seconds(self, each: float, group: Members) -> float:
        """All-reduce of `each` bytes on every member: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(each, group)

    def exchange_seconds(self, each: float, group: Members) -> float:
        """All-to-all, or the hops of a ring: `each` bytes leave every member, maybe for another node."""
        if group.size == 1:
            return 0.0
        return each / (self.chip.inside if group.nodes == 1 else self.chip.between) / LINKS


def cluster_named(text: str) -> TargetCluster:
    """The cluster that `--cluster` says; refused with the grammar and the known devices."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3}):(\S+)", text.strip(), re.IGNORECASE)
    if found is None:
        raise Refusal.at("--cluster", f"{text!r} is not {GRAMMAR}", f"known devices: {', '.join(CHIPS)}")
    name = found[3]
    chip = chip_named(name)
    if chip is None:
        nearest = nearest_chip(name)
        raise Refusal.at(
            "--cluster",
            f"unknown device {name!r}",
            f"known devices: {', '.join(CHIPS)}" + (f"; did you mean {nearest}?" if nearest else ""),
        )
    cluster = TargetCluster(int(found[1]), int(found[2]), chip)
    if chip.most_devices is not None and cluster.each > chip.most_devices:
        raise Refusal.at(
            "--cluster",
            f"{cluster.each} devices in a node, and a node of {chip.name} has up to {chip.most_devices}",
            f"say more nodes: {-(-cluster.devices // chip.most_devices)}x{chip.most_devices}:{chip.name}",
        )
    if chip.most_nodes is not None and cluster.nodes > chip.most_nodes:
        raise Refusal.at(
            "--cluster",
            f"{cluster.nodes} nodes, and the links between nodes of {chip.name} are known for up to {chip.most_nodes}",
            f"plan for {chip.most_nodes} nodes or fewer",
        )
    return cluster
