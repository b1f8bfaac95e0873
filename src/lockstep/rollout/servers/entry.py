"""The first moment of a server that lockstep starts. Nothing heavy is imported: the process becomes the server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NoReturn

# What says which rank of the run we are: the server's own processes would take themselves for it.
_OF_A_RANK = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_OF_TORCHRUN = ("TORCHELASTIC_", "ROLE_")


def serve(connection: int, command: list[str]) -> NoReturn:
    """Runs below the warden: this process becomes the server. Its environment, with the server's key, comes by the
    connection as a line of JSON."""
    with os.fdopen(connection, "rb") as told:
        environment: dict[str, str] = json.loads(told.readline())
    os.execvpe(command[0], command, {**_without_rank(os.environ), **environment})


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RANK and not name.startswith(_OF_TORCHRUN)
    }
