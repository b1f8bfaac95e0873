"""The cache of compiled torch extensions. It is kept by Python version alone, so a new torch finds the old builds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from lockstep.doctor.machine import Machine


@dataclass(frozen=True)
class Extension:
    folder: str
    locked: bool
    """A build left its lock: the next one waits for it, without a word and without an end."""
    older_than_torch: bool


def find_extensions(machine: Machine) -> tuple[Extension, ...]:
    root = machine.variables.get("TORCH_EXTENSIONS_DIR") or f"{machine.home()}/.cache/torch_extensions"
    torch_installed = machine.installed("torch")
    found: dict[str, Extension] = {}
    # With TORCH_EXTENSIONS_DIR the builds lie in it directly, otherwise in a folder for each Python.
    for pattern in (f"{root}/*/lock", f"{root}/*/*/lock", f"{root}/*/*.so", f"{root}/*/*/*.so"):
        for path in machine.matching(pattern):
            place = PurePosixPath(path)
            folder = str(place.parent)
            written = machine.modified(path)
            stale = written is not None and torch_installed is not None and written < torch_installed
            before = found.get(folder, Extension(folder, False, False))
            is_lock = place.name == "lock"
            found[folder] = Extension(
                folder, before.locked or is_lock, before.older_than_torch or (stale and not is_lock)
            )
    return tuple(found.values())
