"""Ray clusters on this machine for tests."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

_NODE_SECONDS = 300.0
# A raylet waits only 15 s until its agents have written the ports that they chose, which a busy machine may exceed. It
# does not wait for ports that it is given.
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
    """Ray gives up on a node that has not started after 30 s, which a busy machine may need. This waits longer."""
    from ray._private import services

    own = services.get_node

    def found(*words: Any, **more: Any) -> Any:
        given_up = time.monotonic() + _NODE_SECONDS
        while True:
            try:
                return own(*words, **more)
            except RuntimeError:
                if time.monotonic() > given_up:
                    raise
            time.sleep(0.5)

    with patch.object(services, "get_node", found):
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
