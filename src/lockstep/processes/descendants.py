"""Every process that came from another one, also those that left its group, its session or its parent.

Two traces are followed, and each catches what the other loses: the parents, which `adopt_orphans` keeps within reach of
one process, and a variable of the environment, which stays with a child whose parents are gone. Only a process that
drops its environment and whose adoptive parent was killed leaves neither. Without /proc none can be found.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "LOCKSTEP_FUNCTION_PROCESS"
# In place of a process that is gone, whose number may be another's now.
NOBODY = -1
_PROC = Path("/proc")
# A killed process may take a moment to go; one that hangs in the kernel may take for ever.
_PASSES, _PAUSE = 500, 0.01


def end_descendants(root: int, mark: str) -> bool:
    """Kill all that came from process `root`, until there are none; False where some do not end."""
    for _ in range(_PASSES):
        living = descendants(root, mark)
        if not living:
            return True
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    return False


def any_stopped(root: int, mark: str) -> bool:
    """Whether `root` or what came from it was stopped by a signal and waits to go on."""
    for pid in (root, *descendants(root, mark)):
        with suppress(OSError):  # it has ended meanwhile
            if _parent_and_state((_PROC / str(pid) / "stat").read_bytes())[1] in (b"T", b"t"):
                return True
    return False


def descendants(root: int, mark: str) -> list[int]:
    """Living processes below `root`, or with its mark in their environment; not `root` itself, nor this process."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    ended: set[int] = set()
    trace = f"{MARK}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):  # it ended while it was looked at, or it is somebody else's
            parents[pid], state = _parent_and_state((folder / "stat").read_bytes())
            if state in (b"Z", b"X"):
                ended.add(pid)
            elif trace in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    below = young = {root}
    while young:
        young = {pid for pid, parent in parents.items() if parent in young} - below
        below = below | young
    return sorted((marked | below) - ended - {root, os.getpid()})


def _parent_and_state(stat: bytes) -> tuple[int, bytes]:
    """Fields 4 and 3 of /proc/PID/stat. The second, the name, stands in brackets and may hold anything."""
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0]
