"""Ray clusters on this machine for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_NODE_SECONDS = 300.0


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
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        with patient():
            for node in nodes:
                cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()
