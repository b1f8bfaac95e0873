"""The CPU device (the reference for other devices), the memory of the host, and checks for slow CPU settings."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.device.base import Device, Memory

# Functions that read the host memory: the total, the limit of the container, and the use of this process.

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


class Group(NamedTuple):
    """The memory limit and the memory use of a control group (cgroup). The use excludes the reclaimable file cache."""

    limit: int
    used: int


def host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> Memory:
    page = os.sysconf("SC_PAGE_SIZE")
    physical = os.sysconf("SC_PHYS_PAGES") * page
    status = _kilobytes(proc / "self" / "status")
    peak = status.get("VmHWM", _peak_from_rusage())
    allocated = status.get("VmRSS", peak)
    # Without /proc, the free memory is estimated as the total memory minus the memory that this process uses.
    available = _kilobytes(proc / "meminfo").get("MemAvailable", physical - allocated)
    limited = list(groups(proc, cgroups))
    total = min([physical, *(group.limit for group in limited)])
    free = min([available, *(max(group.limit - group.used, 0) for group in limited)])
    return Memory(total=total, free=min(free, total), allocated=allocated, peak=max(peak, allocated))


def reset_host_peak(proc: Path = PROC) -> bool:
    """Resets the peak memory of this process. Returns False if the Linux kernel does not support the reset."""
    try:
        # Writing 5 resets only the peak resident size (see proc(5)).
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def groups(proc: Path, cgroups: Path) -> Iterator[Group]:
    """Yields every control group of this process with a memory limit, innermost first."""
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
        # In a container, the cgroup is often mounted as the root, but /proc gives its path on the host. Checking every
        # parent folder up to the mount works with and without a container.
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
    """Parses the `Name:   123 kB` lines of a /proc file to bytes. Returns an empty dict if the file does not exist."""
    if not file.exists():
        return {}
    rows = (row.split() for row in file.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _peak_from_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Checks for slow CPU settings: a dtype without native arithmetic, and more threads than free cores. Each check times a
# matmul of the model's sizes for a few milliseconds, because no table covers all processors and their load.

ROUNDS = 5
# Number of operations of the timed matmul, and its longest side. With native arithmetic, the timed matmul takes a few
# milliseconds.
OPERATIONS, LONGEST = 1e7, 512
# No further timing round starts after this many seconds.
PATIENCE = 0.05
# Slow-down factors from which a warning is given. The factor for threads is higher, because contention may be
# momentary.
SLOWER_DTYPE, SLOWER_THREADS = 1.1, 1.5
Call = Callable[[], object]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def ratio(one: Call, other: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the time of `one` divided by the time of `other`. The two calls run alternately after a warm-up, and the
    best time of each counts."""
    best, first = [float("inf"), float("inf")], clock()
    for turn in range(ROUNDS + 1):
        for which, call in enumerate((one, other)):
            began = clock()
            call()
            if turn:
                best[which] = min(best[which], clock() - began)
        if turn and clock() - first > PATIENCE:
            break
    return best[0] / best[1]


def slow_dtype(dtype: torch.dtype, inner: int, outer: int) -> str | None:
    """Returns a warning if matmuls in `dtype` are slower than in fp32."""
    if dtype == torch.float32:
        return None
    sizes = _sizes(inner, outer)
    times = ratio(_product(sizes, dtype), _product(sizes, torch.float32))
    if times < SLOWER_DTYPE:
        return None
    return (
        f"{NAMES[dtype]} takes {times:.1f} times as long as fp32 on this CPU (measured on a matmul of "
        f"{' x '.join(map(str, sizes))}): model.dtype=fp32 is faster; {NAMES[dtype]} saves memory only"
    )


def slow_threads(dtype: torch.dtype, inner: int, outer: int) -> str | None:
    """Returns a warning if a matmul on all threads is slower than on one thread."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    product = _product(_sizes(inner, outer), dtype)

    def single_threaded() -> None:
        torch.set_num_threads(1)
        try:
            product()
        finally:
            torch.set_num_threads(threads)

    times = ratio(product, single_threaded)
    if times < SLOWER_THREADS:
        return None
    load = f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)" if hasattr(os, "getloadavg") else ""
    return (
        f"{threads} threads take {times:.1f} times as long as one thread{load}: other processes use the cores, or "
        "the model is too small for several threads; set OMP_NUM_THREADS=1, or a number below the current one"
    )


def _sizes(inner: int, outer: int) -> tuple[int, int, int]:
    """Returns the sizes of the timed matmul: rows, inner and outer. The timed matmul is small, with at least 8 rows."""
    inner, outer = min(inner, LONGEST), min(outer, LONGEST)
    return max(8, int(OPERATIONS / (2 * inner * outer))), inner, outer


def _product(sizes: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    rows, inner, outer = sizes
    # Constants replace random numbers, because the random generator of the run must not advance.
    left, right = torch.full((rows, inner), 0.5, dtype=dtype), torch.full((outer, inner), 0.25, dtype=dtype)
    return lambda: torch.nn.functional.linear(left, right)


def _arm_chip(listing: str) -> str | None:
    """Returns a name for an Arm core, because /proc/cpuinfo gives only numbers: `Arm 0x41 part 0xd0c` for Neoverse
    N1."""
    numbers = dict(re.findall(r"^CPU (implementer|part)\s*: (\S+)$", listing, re.MULTILINE))
    return f"Arm {numbers['implementer']} part {numbers['part']}" if len(numbers) == 2 else None


class Cpu(Device):
    name = "cpu"
    collective = "gloo"
    visible_variable = None
    fused_optimizer = True
    graph_capture = False
    attention = "sdpa"
    generates_beside = True
    meets_itself = True

    def unavailable(self) -> str | None:
        return None

    def count(self) -> int:
        return 1

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def use(self, index: int) -> None:
        """Does nothing, because all processes of a machine share the CPU."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronise(self) -> None:
        """Does nothing, because CPU operators are synchronous."""

    def memory(self) -> Memory:
        return host_memory()

    def reset_peak(self) -> None:
        """Resets the peak memory of this process, if the Linux kernel supports that."""
        reset_host_peak()

    @property
    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        # float16 works in forward and backward, but only saves memory, because most CPUs have no float16 arithmetic.
        return (torch.bfloat16, torch.float16)

    def slowed_by(self, dtype: torch.dtype, inner: int, outer: int) -> list[str]:
        # Only one warning is given, because the thread check is meaningless for a dtype without native arithmetic.
        warning = slow_dtype(dtype, inner, outer) or slow_threads(dtype, inner, outer)
        return [] if warning is None else [warning]

    def chip(self) -> str:
        listing = Path("/proc/cpuinfo")
        if listing.exists():
            for line in listing.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
            return _arm_chip(listing.read_text()) or platform.machine()
        return platform.processor() or platform.machine()

    def versions(self) -> dict[str, str | None]:
        # The vector unit and the thread count determine the order of summation, and so the last bits of a result.
        return {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "kernel": platform.release(),
        }
