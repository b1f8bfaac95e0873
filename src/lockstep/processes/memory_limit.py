"""A limit of memory for a process that runs a function of the user's."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(memory_bytes: int) -> None:
    """Bound the address space to what the loaded file has mapped and `memory_bytes` more.

    Libraries reserve far more addresses than they use memory; counting those would forbid to import them.
    A system that does not tell what is mapped (no /proc) has no limit.
    """
    told_by = Path("/proc/self/statm")
    if not told_by.exists():
        return
    mapped = int(told_by.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
