"""Process settings that must be made before torch is imported: worker threads, and who loads torch_npu."""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Who loads torch_npu: lockstep, when the device is asked for, and not `import torch` on its own.
#
# An installed torch_npu registers itself with torch's backend entry points. Where CANN is missing, broken or of
# another version, `import torch` then raises for everybody, also for a run on another device, and no reason can be
# given: a failed `import torch` cannot be repeated in the same process. So the automatic load is put off, and
# `device/npu.py` imports torch_npu itself, where a failure is a reason and not a traceback.
#
# A value that the user has set is left alone, and after a successful load the variable is as it was, so that child
# processes behave as they would without lockstep.

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_deferred = False


def defer() -> None:
    """Keep `import torch` from loading torch_npu, if that is installed and torch is not imported yet."""
    global _deferred
    if VARIABLE in os.environ or "torch" in sys.modules or find_spec("torch_npu") is None:
        return
    os.environ[VARIABLE] = "0"
    _deferred = True


def restore() -> None:
    """Undo `defer` for the processes started from here on."""
    global _deferred
    if _deferred:
        os.environ.pop(VARIABLE, None)
        _deferred = False


# How many worker threads the CPU has, and how they wait: asleep, not spinning.
#
# GNU OpenMP lets a thread that waits for the others spin on its core. Where that core is shared (a second process, a
# virtual machine), the one waited for cannot run. Measured once with the tiny model on two cores, tokens a second:
# beside one busy loop 4,400 spinning, 7,200 asleep (beside another training, uncontrolled: 430 and 6,600); alone on
# the machine 15,800 spinning, 12,700 asleep. Whoever has the machine alone and trains something as small sets
# OMP_WAIT_POLICY=ACTIVE.

THREADS = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")


def wait_asleep() -> None:
    """Must come before torch is loaded: the library reads the variable once. The user's own setting stays."""
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def follow_quota() -> None:
    """No more threads than a container may run at once: with two of 64 cores there would be 64 that take turns. Must
    come before torch is loaded; the user's own setting stays."""
    if "torch" in sys.modules or THREADS in os.environ:
        return
    allowed = quota()
    if allowed is not None and allowed < cores():
        os.environ[THREADS] = os.environ[FOLLOWED] = str(allowed)


# Tells children that the variable is ours: they inherit both.
FOLLOWED = "LOCKSTEP_THREADS_FOLLOW_QUOTA"


def _is_ours() -> bool:
    return THREADS not in os.environ or os.environ.get(FOLLOWED) == os.environ[THREADS]


def share(processes: int) -> None:
    """Threads of processes that are started to run side by side on this machine; the user's own setting stays."""
    if _is_ours():
        allowed = min(cores(), quota() or cores())
        # Ours still: a process that is started so may divide them further.
        os.environ[THREADS] = os.environ[FOLLOWED] = str(max(1, allowed // processes))


def each_of(processes: int, threads: int) -> int:
    """Threads of one of several processes that compute at the same time, where one alone has `threads`; the user's own
    setting stays."""
    return max(1, threads // processes) if _is_ours() else threads


def cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(groups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Processors that the control group of this process, or one above it, may use; None without a limit."""
    found = [limit for folder in _folders(groups, own) if (limit := _limit(folder)) is not None]
    return max(1, math.ceil(min(found))) if found else None


def _folders(groups: Path, own: Path) -> list[Path]:
    """Where limits may stand, of either version of control groups, from the process's own group upwards."""
    places = [groups, groups / "cpu"]
    try:
        lines = own.read_text().splitlines()
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
