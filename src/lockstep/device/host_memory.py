"""Memory of the host: what the machine has, what a container may use of it, and what this process takes."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.device.base import Memory

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


class Group(NamedTuple):
    """A control group's limit, and what its processes use of it (file cache that can be dropped not counted)."""

    limit: int
    used: int


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Memory:
    page = os.sysconf("SC_PAGE_SIZE")
    physical = os.sysconf("SC_PHYS_PAGES") * page
    own = _kilobytes(proc / "self" / "status")
    peak = own.get("VmHWM", _peak_from_rusage())
    allocated = own.get("VmRSS", peak)
    # Systems without /proc do not say what is free; what we have not taken ourselves is the nearest figure.
    available = _kilobytes(proc / "meminfo").get("MemAvailable", physical - allocated)
    limited = list(groups(proc, cgroups))
    total = min([physical, *(group.limit for group in limited)])
    free = min([available, *(max(group.limit - group.used, 0) for group in limited)])
    return Memory(total=total, free=min(free, total), allocated=allocated, peak=max(peak, allocated))


def reset_host_peak(proc: Path = PROC) -> bool:
    """Start the peak of this process anew; False where the kernel does not offer that, and the old peak stays."""
    try:
        # 5 resets the peak resident size and nothing else (proc(5)).
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def groups(proc: Path, cgroups: Path) -> Iterator[Group]:
    """Every control group with a memory limit that this process is in, innermost first."""
    membership = proc / "self" / "cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            base, names = cgroups / "memory", _V1
        else:
            continue
        # A container often sees its own group mounted as the root while the path is the host's: the walk up to the
        # mount finds it in either case.
        folder = base / path.lstrip("/")
        for candidate in [folder, *folder.parents][: len(folder.parts) - len(base.parts) + 1]:
            group = _group(candidate, names)
            if group is not None:
                yield group


def _group(folder: Path, names: _Names) -> Group | None:
    limit, usage = folder / names.limit, folder / names.usage
    if not (limit.exists() and usage.exists()):
        return None
    text = limit.read_text().strip()
    if text == "max":
        return None
    used = int(usage.read_text())
    statistics = folder / "memory.stat"
    if statistics.exists():
        rows = (row.split() for row in statistics.read_text().splitlines())
        used -= sum(int(row[1]) for row in rows if row[0] == names.reclaimable)
    return Group(int(text), max(used, 0))


def _kilobytes(file: Path) -> dict[str, int]:
    """The `Name:   123 kB` lines of a /proc file, in bytes; empty where the file does not exist."""
    if not file.exists():
        return {}
    rows = (row.split() for row in file.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _peak_from_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
