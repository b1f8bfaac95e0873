"""Entry points of child processes: the rollout worker and inference servers. They import little."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NoReturn


def serve_worker(connection: int) -> None:
    """The rollout worker. It imports in the worker, not in its supervisor."""
    from lockstep.rollout.worker.worker_loop import work

    work(connection)


# Variables with the rank of the run: the processes of the server must not inherit them.
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_")


def run_server(connection: int, command: list[str]) -> NoReturn:
    """Runs under the supervisor and executes the server. The connection sends the environment, including the key, as
    one line of JSON."""
    with os.fdopen(connection, "rb") as pipe:
        environment: dict[str, str] = json.loads(pipe.readline())
    os.execvpe(command[0], command, {**_without_rank(os.environ), **environment})


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _RANK_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }
