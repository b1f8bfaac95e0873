"""`parallel.devices` and SLURM: one process per device, started by torch's launcher."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import MutableMapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lockstep.device.process_setup import share
from lockstep.errors import STALLED, Problem, Refusal, refuse_all
from lockstep.launch.restarts import status_of, with_restarts
from lockstep.launch.supervisor import die_with_parent

if TYPE_CHECKING:
    from lockstep.recipe import Recipe
    from lockstep.recipe.keys_parallel import Parallel


# `parallel.devices`: one command starts a process for each device of this machine, by torch's own launcher.

# Says to a rank which process started it.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# After Ctrl-C the ranks finish their step and write a checkpoint; then they are killed.
PATIENCE_SECONDS = 600
# How soon a rank follows a launcher that was killed.
LOOK_SECONDS = 0.5


def is_rank() -> bool:
    """Whether somebody has started this process as one of several already."""
    return "RANK" in os.environ


def ranks_here(ranks: int) -> int:
    """Those of so many that are on this machine; all of them where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)


def refuse_other_count(devices: int | None) -> None:
    """`parallel.devices` and the processes that there are must agree; a lone process may be told by the command."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if devices is not None and devices != ranks:
        remedy = "remove the key, or start as many"
        if not is_rank():
            remedy = "from Python start the processes with torchrun, or use the command `lockstep train`"
        raise Refusal.at("parallel.devices", f"is {devices}, and there are {ranks} processes", remedy)


def refuse_unread(settings: Parallel) -> None:
    """Keys of the process that starts the ranks are not read where another one has started them."""
    if LAUNCHER in os.environ:
        return
    why = "is for ranks that `lockstep train` starts, and it did not start this one"
    remedy = "remove it; torchrun has --max-restarts" if is_rank() else "use the command `lockstep train`"
    asked = {"launcher": settings.launcher == "ray", "max_restarts": settings.max_restarts > 0}
    refuse_all([Problem(f"parallel.{key}", why, remedy) for key, wanted in asked.items() if wanted])


def starts_ranks(settings: Parallel) -> bool:
    """Whether `lockstep train` runs in processes that it starts; a single one too, if it is to be started again."""
    return (settings.devices or 1) > 1 or settings.max_restarts > 0 or settings.launcher == "ray"


def start_ranks(recipe: Recipe, words: Sequence[str]) -> int:
    """Run `lockstep` with these words in the processes that the recipe asks for, until they end well or have been
    started again as often as it allows; the exit status."""
    settings = recipe.parallel
    # A restart finds the folder of the run, and a checkpoint or none.
    again = [] if recipe.run.resume == "auto" else ["run.resume=auto"]
    if settings.launcher == "ray":
        from lockstep.launch.ray_launcher import ray_cluster

        with ray_cluster(recipe) as start:
            return with_restarts(lambda turn: start([*words, *(again if turn else [])], turn), settings.max_restarts)
    devices = settings.devices or 1
    return with_restarts(lambda turn: launch(devices, [*words, *(again if turn else [])]), settings.max_restarts)


def launch(devices: int, words: Sequence[str]) -> int:
    """Run `lockstep` with these words in so many processes; the exit status of the first that failed, else 0.

    Ctrl-C reaches every rank once; a second one, or SIGTERM, ends them. A rank whose launcher is killed ends itself.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("multiprocessing.api", "agent.server.api"):
        # What they would say of a rank that ended, it has said itself or is said below.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER] = str(os.getpid())
    share(devices)
    # Not every version has it; the others wait half a minute.
    known = {one.name for one in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": PATIENCE_SECONDS} if "shutdown_timeout" in known else {}
    with tempfile.TemporaryDirectory(prefix="lockstep-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **patience,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "lockstep", *words)
        except ChildFailedError as error:
            if STALLED in [failure.exitcode for failure in error.failures.values()]:
                return STALLED  # and those that could not be woken were killed
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                print(f"rank {rank} was ended by {name}; the other ranks were stopped", file=sys.stderr, flush=True)
            return status_of(failure.exitcode)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def follow_launcher() -> None:
    """End this rank when the process that started it is gone: nobody else would."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not is_rank():
        return

    # Also one that is stopped, which cannot look for itself.
    die_with_parent()

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


# SLURM's variables as those of torchrun: `srun lockstep train RECIPE` is a run of as many processes as tasks.

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
