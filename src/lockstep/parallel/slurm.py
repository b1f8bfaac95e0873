"""SLURM's variables as those of torchrun: `srun lockstep train RECIPE` is a run of as many processes as tasks."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from lockstep.errors import Refusal

# Ports that jobs of one machine spread over.
FIRST_PORT, PORTS = 20_000, 20_000


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add the variables of torchrun, from RANK to MASTER_PORT, where `srun` started this process as one of several.
    What is set already stays, and so does a process of the batch script itself, which is no task of a step."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or tasks == "1":
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        rank, local_rank = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
        job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment["SLURM_STEP_ID"])
    except (KeyError, ValueError) as error:
        raise Refusal.at(
            "SLURM", f"its variables are not those of a step of srun: {error}", "start with srun, or with torchrun"
        ) from error
    environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"] = rank, local_rank, tasks
    here = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    if node < len(here):
        environment["LOCAL_WORLD_SIZE"] = str(here[node])
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 31 * step) % PORTS))


def tasks_of_nodes(text: str) -> list[int]:
    """Of SLURM's short form, `4(x2),3`: 4, 4 and 3; none where it is not of that form."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def first_host(nodes: str) -> str:
    """Of SLURM's short form, `gpu[03-05,11],login1`: gpu03."""
    # The first name ends at a comma outside of brackets; of each bracket the first number counts.
    name = re.match(r"(?:\[[^\]]*\]|[^,\[\]])*", nodes)
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name.group() if name else "")
    if not host:
        raise Refusal.at("SLURM_JOB_NODELIST", f"{nodes!r} names no node", "set MASTER_ADDR to the first node's name")
    return host
