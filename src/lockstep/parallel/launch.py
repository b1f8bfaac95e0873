"""`parallel.devices`: one command starts a process for each device of this machine, by torch's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lockstep.errors import Refusal

# Says to a rank which process started it.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# After Ctrl-C the ranks finish their step and write a checkpoint; then they are killed.
PATIENCE_SECONDS = 600
# How soon a rank follows a launcher that was killed.
LOOK_SECONDS = 0.5


def is_rank() -> bool:
    """Whether somebody has started this process as one of several already."""
    return "RANK" in os.environ


def refuse_other_count(devices: int | None) -> None:
    """`parallel.devices` and the processes that there are must agree; a lone process may be told by the command."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if devices is not None and devices != ranks:
        remedy = "remove the key, or start as many"
        if not is_rank():
            remedy = "from Python start the processes with torchrun, or use the command `lockstep train`"
        raise Refusal.at("parallel.devices", f"is {devices}, and there are {ranks} processes", remedy)


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
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
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
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                print(f"rank {rank} was ended by {name}; the other ranks were stopped", file=sys.stderr, flush=True)
            return _status(failure.exitcode)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def _status(code: int) -> int:
    """As a shell tells it: a signal as 128 and its number."""
    return code if code >= 0 else 128 - code


def follow_launcher() -> None:
    """End this rank when the process that started it is gone: nobody else would."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not is_rank():
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
