"""Sets OpenMP threads and defers the loading of torch_npu, which must happen before torch is imported."""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Defers the loading of torch_npu. An installed torch_npu registers itself with torch's backend entry points. If CANN is
# missing, broken or incompatible, `import torch` raises for every device, and a failed `import torch` cannot be
# repeated in the same process. Therefore automatic loading of torch_npu is disabled, and `device/npu.py` imports
# torch_npu itself and reports failures. If the user has set TORCH_DEVICE_BACKEND_AUTOLOAD, its value is kept. After
# torch_npu was loaded, TORCH_DEVICE_BACKEND_AUTOLOAD is restored, so that child processes behave as without lockstep.

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_deferred = False


def defer() -> None:
    """Prevents `import torch` from loading torch_npu, if torch_npu is installed and torch is not imported yet."""
    global _deferred
    if VARIABLE in os.environ or "torch" in sys.modules or find_spec("torch_npu") is None:
        return
    os.environ[VARIABLE] = "0"
    _deferred = True


def restore() -> None:
    """Undoes `defer`, so that processes started later load torch_npu as usual."""
    global _deferred
    if _deferred:
        os.environ.pop(VARIABLE, None)
        _deferred = False


# Sets the number of OpenMP threads and their wait policy. By default, waiting threads of GNU OpenMP spin. If a spinning
# thread shares its core (with a second process, or in a virtual machine), the thread that it waits for cannot run.
# Lockstep therefore makes waiting OpenMP threads sleep. The speeds below are from one measurement with the tiny model
# on two cores. Next to a busy loop, a run reaches 4,400 tokens per second with spinning threads and 7,200 with sleeping
# threads. Next to another training run, whose load was not controlled, a run reaches 430 tokens per second with
# spinning threads and 6,600 with sleeping threads. Alone on the machine, a run reaches 15,800 tokens per second with
# spinning threads and 12,700 with sleeping threads. For a tiny model alone on a machine, set OMP_WAIT_POLICY=ACTIVE.

THREADS = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")


def wait_asleep() -> None:
    """Makes waiting OpenMP threads sleep, unless the user has set a wait policy. Call this function before torch is
    loaded, because OpenMP reads the variable only once."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def follow_quota() -> None:
    """Limits the OpenMP threads to the container's CPU quota, unless the user has set OMP_NUM_THREADS. Without this
    limit, a container with 2 of 64 cores would use 64 threads. Call this function before torch is loaded."""
    if "torch" in sys.modules or THREADS in os.environ:
        return
    allowed = quota()
    if allowed is not None and allowed < cores():
        os.environ[THREADS] = os.environ[FOLLOWED] = str(allowed)


# The variable FOLLOWED marks OMP_NUM_THREADS as set by lockstep. Child processes inherit both variables.
FOLLOWED = "LOCKSTEP_THREADS_FOLLOW_QUOTA"


def _is_ours() -> bool:
    return THREADS not in os.environ or os.environ.get(FOLLOWED) == os.environ[THREADS]


def share(processes: int) -> None:
    """Divides the OpenMP threads over processes that run concurrently on this machine, unless the user has set
    OMP_NUM_THREADS."""
    if _is_ours():
        allowed = min(cores(), quota() or cores())
        # The number of threads stays marked as set by lockstep, so that a child process may divide it further.
        os.environ[THREADS] = os.environ[FOLLOWED] = str(max(1, allowed // processes))


def each_of(processes: int, threads: int) -> int:
    """Divides `threads` over concurrent processes: returns the number of threads per process. A number of threads that
    the user has set is not divided."""
    return max(1, threads // processes) if _is_ours() else threads


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(groups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the lowest CPU quota of this process's control group (cgroup) and its parent groups, in cores. Returns
    None if there is no limit."""
    limits = [limit for folder in _folders(groups, membership) if (limit := _limit(folder)) is not None]
    return max(1, math.ceil(min(limits))) if limits else None


def _folders(groups: Path, membership: Path) -> list[Path]:
    """Returns the folders that may hold CPU limits (cgroup v1 and v2), from the process's cgroup upwards."""
    places = [groups, groups / "cpu"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return places
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        inside = root / path.lstrip("/")
        places += [inside, *(above for above in inside.parents if above.is_relative_to(root))]
    return places


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if most in ("max", "-1") else int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
