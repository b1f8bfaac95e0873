"""Entry points of child processes (the rollout worker and inference servers), with few imports."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NoReturn


def serve_worker(connection: int) -> None:
    """Runs the rollout worker. Its modules are imported here, so the supervisor process does not load them."""
    from lockstep.rollout.worker.worker_loop import work

    work(connection)


# Environment variables with the rank of the run. The server processes must not inherit them.
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_")


def run_server(connection: int, command: list[str]) -> NoReturn:
    """Replaces this supervised process with the server. Its environment, including the API key, is read from the
    connection as one line of JSON."""
    with os.fdopen(connection, "rb") as pipe:
        environment: dict[str, str] = json.loads(pipe.readline())
    os.execvpe(command[0], command, {**_without_rank(os.environ), **environment})


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _RANK_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }
