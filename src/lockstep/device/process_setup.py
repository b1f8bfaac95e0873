"""Process settings that must be made before torch is imported: OpenMP threads and deferred loading of torch_npu."""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Deferred loading of torch_npu. An installed torch_npu registers itself with torch's backend entry points. If CANN is
# missing, broken or incompatible, `import torch` raises for every device, and a failed `import torch` cannot be
# repeated in the same process. So automatic loading is disabled, and `device/npu.py` imports torch_npu itself and
# reports failures. A value set by the user is kept. After a successful load the variable is restored, so that child
# processes behave as without lockstep.

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_deferred = False


def defer() -> None:
    """Prevents `import torch` from loading torch_npu, if it is installed and torch is not imported yet."""
    global _deferred
    if VARIABLE in os.environ or "torch" in sys.modules or find_spec("torch_npu") is None:
        return
    os.environ[VARIABLE] = "0"
    _deferred = True


def restore() -> None:
    """Undoes `defer` for processes started later."""
    global _deferred
    if _deferred:
        os.environ.pop(VARIABLE, None)
        _deferred = False


# Number of OpenMP threads, and their wait policy. By default waiting threads of GNU OpenMP spin. If their core is
# shared (with a second process, or in a virtual machine), the thread they wait for cannot run. So they sleep instead.
# Measured once with the tiny model on two cores, in tokens per second: next to a busy loop 4,400 spinning and 7,200
# sleeping (next to another training, uncontrolled: 430 and 6,600); alone on the machine 15,800 spinning and 12,700
# sleeping. For a tiny model alone on a machine set OMP_WAIT_POLICY=ACTIVE.

THREADS = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")


def wait_asleep() -> None:
    """Makes waiting OpenMP threads sleep, unless the user has set a policy. Must be called before torch is loaded,
    because the library reads the variable once."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def follow_quota() -> None:
    """Limits the threads to the container's CPU quota, unless the user has set a number. Otherwise a container with 2
    of 64 cores would use 64 threads. Must be called before torch is loaded."""
    if "torch" in sys.modules or THREADS in os.environ:
        return
    allowed = quota()
    if allowed is not None and allowed < cores():
        os.environ[THREADS] = os.environ[FOLLOWED] = str(allowed)


# This variable marks the number of threads as set by lockstep; child processes inherit both.
FOLLOWED = "LOCKSTEP_THREADS_FOLLOW_QUOTA"


def _is_ours() -> bool:
    return THREADS not in os.environ or os.environ.get(FOLLOWED) == os.environ[THREADS]


def share(processes: int) -> None:
    """Divides the threads over processes that run concurrently on this machine, unless the user has set a number."""
    if _is_ours():
        allowed = min(cores(), quota() or cores())
        # The number stays marked as set by lockstep, so that a child process may divide it further.
        os.environ[THREADS] = os.environ[FOLLOWED] = str(max(1, allowed // processes))


def each_of(processes: int, threads: int) -> int:
    """Divides `threads` over concurrent processes: returns the number of threads per process. A number set by the user
    is not divided."""
    return max(1, threads // processes) if _is_ours() else threads


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(groups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the CPU quota of this process's control group or of a group above it; None without a limit."""
    limits = [limit for folder in _folders(groups, membership) if (limit := _limit(folder)) is not None]
    return max(1, math.ceil(min(limits))) if limits else None


def _folders(groups: Path, membership: Path) -> list[Path]:
    """Returns the cgroup folders with limits, of both versions, from the process's group upwards."""
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
