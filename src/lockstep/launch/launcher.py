"""Starts one process per device with torch's elastic launcher (`parallel.devices`), or adopts the tasks of SLURM."""

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
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.device.process_setup import share
from lockstep.errors import STALLED, Problem, Refusal, refuse_all
from lockstep.launch.rank_logs import LoggedRanks
from lockstep.launch.restarts import LAUNCHER, status_of, with_restarts
from lockstep.launch.supervisor import die_with_parent

if TYPE_CHECKING:
    from lockstep.recipe import Recipe
    from lockstep.recipe.keys_parallel import Parallel


# Maximum time after Ctrl-C in which the ranks finish their step and write a checkpoint. Ranks that still run after this
# time are killed.
PATIENCE_SECONDS = 600
# Interval at which a rank checks that its launcher is alive.
LOOK_SECONDS = 0.5


def is_rank() -> bool:
    """Returns whether this process was started as a rank (the environment variable RANK is set)."""
    return "RANK" in os.environ


def ranks_here(ranks: int) -> int:
    """Returns the number of ranks on this machine. If LOCAL_WORLD_SIZE is not set, all ranks are assumed to run on this
    machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)


def refuse_other_count(devices: int | None) -> None:
    """Raises `Refusal` if `parallel.devices` differs from the number of processes."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if devices is not None and devices != ranks:
        remedy = "remove the key, or start this number of processes"
        if not is_rank():
            remedy = "start the Python script with torchrun, or use the command `lockstep train`"
        raise Refusal.at(
            "parallel.devices", f"is {devices}, but there are {ranks} processes", remedy, code="wrong-process-count"
        )


def refuse_unread(settings: Parallel) -> None:
    """Raises `Refusal` if keys of lockstep's launcher are set, but another launcher started this process."""
    if LAUNCHER in os.environ:
        return
    why = "applies only to processes that `lockstep train` starts, and `lockstep train` did not start this process"
    remedy = "remove it; torchrun has the option --max-restarts" if is_rank() else "use the command `lockstep train`"
    launcher_keys = {"launcher": settings.launcher == "ray", "max_restarts": settings.max_restarts > 0}
    refuse_all(
        [Problem(f"parallel.{key}", why, remedy, code="unused-key") for key, is_set in launcher_keys.items() if is_set]
    )


def starts_ranks(settings: Parallel) -> bool:
    """Returns whether `lockstep train` starts the ranks as child processes. A single rank is also started as a child
    process if it may be restarted (`parallel.max_restarts`)."""
    return (settings.devices or 1) > 1 or settings.max_restarts > 0 or settings.launcher == "ray"


def start_ranks(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Starts the ranks of the recipe, and restarts them after a failure. Each rank runs `lockstep` with these
    arguments. Returns the exit status."""
    settings = recipe.parallel
    # A restart resumes automatically, because the run folder already exists, with or without a checkpoint.
    again = [] if recipe.run.resume == "auto" else ["run.resume=auto"]
    if settings.launcher == "ray":
        from lockstep.launch.ray_launcher import ray_cluster

        with ray_cluster(recipe) as start:
            return with_restarts(
                lambda turn: start([*arguments, *(again if turn else [])], turn), settings.max_restarts
            )
    devices, run_folder = settings.devices or 1, Path(recipe.run.folder) / recipe.run.name
    return with_restarts(
        lambda turn: launch(devices, [*arguments, *(again if turn else [])], run_folder), settings.max_restarts
    )


def launch(devices: int, arguments: Sequence[str], run_folder: Path) -> int:
    """Runs `lockstep` with these arguments in `devices` processes. Returns the exit status of the first failure, or 0.
    The run folder gets a log file per rank.

    The first Ctrl-C is sent to every rank once. A second Ctrl-C, or SIGTERM, ends the ranks. If the launcher is killed,
    its ranks end too.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("multiprocessing.api", "agent.server.api"):
        # Torch's own error reports are silenced, because the failed rank or the code below reports why a rank ended.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER] = str(os.getpid())
    # Output is unbuffered, so that no output is lost if a rank is killed.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    share(devices)
    # Older versions of torch have no `shutdown_timeout` and wait 30 seconds.
    names = {item.name for item in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": PATIENCE_SECONDS} if "shutdown_timeout" in names else {}

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = super().reify(envs)
            files.stdouts.update(logged.stdouts)
            files.stderrs.update(logged.stderrs)
            return files

    with (
        tempfile.TemporaryDirectory(prefix="lockstep-launch-") as folder,
        closing(LoggedRanks(run_folder, devices)) as logged,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=Logs(log_dir=folder),
            **patience,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "lockstep", *arguments)
        except ChildFailedError as error:
            if STALLED in [failure.exitcode for failure in error.failures.values()]:
                return STALLED  # unresponsive ranks were killed
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                print(f"rank {rank} was killed by {name}; the other ranks were stopped", file=sys.stderr, flush=True)
            return status_of(failure.exitcode)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def follow_launcher() -> None:
    """Ends this rank when its launcher has ended."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not is_rank():
        return

    # The kernel kills even a stopped rank (SIGSTOP), in which the thread below does not run.
    die_with_parent()

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


# SLURM: `srun lockstep train RECIPE` starts a run in which each SLURM task is one rank.

# Jobs on one machine get different values of MASTER_PORT from this range (first port, number of ports).
FIRST_PORT, PORTS = 20_000, 20_000


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets torchrun's variables (RANK, MASTER_PORT and others) if `srun` started this process as one of several tasks.
    Existing values are kept. In the SLURM batch script itself nothing is set, because the script is not an srun
    task."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or tasks == "1":
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        rank, local_rank = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
        job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment["SLURM_STEP_ID"])
    except (KeyError, ValueError) as error:
        raise Refusal.at(
            "SLURM",
            f"the SLURM_* environment variables do not describe an srun step: {error}",
            "start the run with srun or with torchrun",
            code="bad-environment",
        ) from error
    environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"] = rank, local_rank, tasks
    tasks_per_node = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environment.get("SLURM_NODEID", "0"))
    if node < len(tasks_per_node):
        environment["LOCAL_WORLD_SIZE"] = str(tasks_per_node[node])
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + (job + 31 * step) % PORTS))


def tasks_of_nodes(text: str) -> list[int]:
    """Parses SLURM's task counts per node, where `4(x2),3` means 4, 4 and 3. Returns an empty list for any other
    format."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def first_host(nodes: str) -> str:
    """Returns the first host of SLURM's node list, such as gpu03 for `gpu[03-05,11],login1`."""
    # The first host name ends at a comma outside brackets. Of each bracket only its first number is used.
    name = re.match(r"(?:\[[^\]]*\]|[^,\[\]])*", nodes)
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name.group() if name else "")
    if not host:
        raise Refusal.at(
            "SLURM_JOB_NODELIST",
            f"{nodes!r} names no node",
            "set MASTER_ADDR to the first node's name",
            code="bad-environment",
        )
    return host
