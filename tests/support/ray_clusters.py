"""Ray clusters on this machine for tests, which start on a busy machine too."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

_NODE_SECONDS = 300.0
_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def ports() -> dict[str, int]:
    """Free ports for the agents of a node."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in _PORTS]
        for each in found:
            each.bind(("", 0))
        return {name: int(each.getsockname()[1]) for name, each in zip(_PORTS, found, strict=True)}


@contextmanager
def patient() -> Iterator[None]:
    """Ray gives up on a node that has not started after 30 s, and a raylet ends if its agents have not written their
    ports after 15 s. A busy machine may need longer: this waits longer for a node, and writes the ports (`ports`) for
    the agents, which bind them when they are up."""
    from ray._private import node, services

    own_node, own_start = services.get_node, node.Node.start_raylet

    def found(*words: Any, **more: Any) -> Any:
        given_up = time.monotonic() + _NODE_SECONDS
        while True:
            try:
                return own_node(*words, **more)
            except RuntimeError:
                if time.monotonic() > given_up:
                    raise
            time.sleep(0.5)

    def started(self: Any, *words: Any, **more: Any) -> Any:
        for name in _PORTS:
            port = getattr(self._ray_params, name)
            if port:
                Path(self._session_dir, f"{name}_{self._node_id}").write_text(str(port), encoding="utf-8")
        return own_start(self, *words, **more)

    with patch.object(services, "get_node", found), patch.object(node.Node, "start_raylet", started):
        yield


@contextmanager
def ray_cluster(head: dict[str, Any], *nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster of a head and nodes, each with these arguments."""
    from ray.cluster_utils import Cluster

    with patient():
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **ports(), **head})
    try:
        with patient():
            for node in nodes:
                cluster.add_node(**ports(), **node)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def addressed_cluster(head: dict[str, Any], *nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster that the commands of the tests find by `RAY_ADDRESS`."""
    with ray_cluster(head, *nodes) as found:
        os.environ["RAY_ADDRESS"] = found.address
        yield found
        del os.environ["RAY_ADDRESS"]


def bearers(variables: dict[str, str], *words: str) -> dict[int, list[str]]:
    """The command lines of living processes that were given these variables, and have these words, by process."""
    wanted, found = {f"{name}={value}" for name, value in variables.items()}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while it was looked at
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            given = (folder / "environ").read_text(errors="replace").split("\0")
            if wanted <= set(given) and set(words) <= set(command):
                found[int(folder.name)] = command
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_on(process: int, node: Any) -> bool:
    """Whether a process is one of a node's: Ray starts the workers of a node from its raylet."""
    raylet = node.all_processes["raylet"][0].process.pid
    while process not in (0, 1, raylet):
        process = parent(process)
    return bool(process == raylet)
