"""Judgements on Python, the compiler, the disk and the cache of compiled extensions."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.facts import Facts
from lockstep.doctor.finding import Finding, broken, warning
from lockstep.doctor.packages import PYTHON
from lockstep.doctor.versions import older, release

GIB = 2**30


def python_is_supported(facts: Facts, device: str) -> Iterator[Finding]:
    minor = ".".join(facts.python.split(".")[:2])
    oldest, newest = PYTHON
    if older(minor, oldest) or older(newest, minor):
        yield broken(
            "python",
            f"lockstep runs on Python {oldest} to {newest}, this is {release(facts.python)}",
            f"make the environment with one of these, for example python{newest} -m venv .venv",
        )


def compiler_for_kernels(facts: Facts, device: str) -> Iterator[Finding]:
    if device == "cuda" and facts.compiler is None:
        yield warning("compiler", "no gcc: Triton compiles a small launcher with it", "install gcc")


def disk_has_room(facts: Facts, device: str) -> Iterator[Finding]:
    free, total = facts.disk.free, facts.disk.total
    where = f"{free / GIB:.1f} GiB of {total / GIB:.0f} GiB are free in this folder"
    if free < GIB:
        yield broken("disk", where, "free some, or set run.folder to another disk: a checkpoint would not fit")
    elif free < 10 * GIB or free < 0.05 * total:
        yield warning(
            "disk", where, "checkpoints hold weights and optimizer state: free some, or set run.folder to another disk"
        )


def extensions_are_fresh(facts: Facts, device: str) -> Iterator[Finding]:
    for extension in facts.extensions:
        if extension.locked:
            yield warning(
                "torch_extensions",
                f"{extension.folder} has the lock of a build: unless one is running now, the next waits for ever",
                f"stop what builds, then rm -r {extension.folder}",
            )
        elif extension.older_than_torch:
            yield warning(
                "torch_extensions",
                f"{extension.folder} was built before the installed torch was, and may not load with it",
                f"rm -r {extension.folder}; it is built again when needed",
            )


JUDGEMENTS = (python_is_supported, compiler_for_kernels, disk_has_room, extensions_are_fresh)
