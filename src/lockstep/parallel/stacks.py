"""Where every thread of a process is, in a file: of this process, and of another one that does not answer any more."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# The interpreter writes the stacks in the handler of this signal itself: a thread that holds the interpreter's lock, or
# waits inside of a library, does not hinder it.
ASKING = signal.SIGUSR1
_PAUSE = 0.05


@dataclass(frozen=True)
class Address:
    """A process as others on the same machine find it, also when its number was given to another one since then."""

    machine: str
    number: int
    began: str
    stacks: int
    """Its descriptor of the file that it writes its stacks to when it is asked."""

    @property
    def folder(self) -> Path:
        return Path("/proc", str(self.number))


@contextmanager
def answering() -> Iterator[Address]:
    """This process writes its stacks when it is asked. To a file without a name: a run that ends well leaves none."""
    with tempfile.TemporaryFile() as file:
        faulthandler.register(ASKING, file=file, all_threads=True)
        try:
            yield Address(_machine(), os.getpid(), _began(os.getpid()), file.fileno())
        finally:
            faulthandler.unregister(ASKING)


def write_own(file: IO[str]) -> None:
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)


def ask(address: Address, seconds: float) -> str:
    """The stacks of another process on this machine, which goes on if it was stopped; empty where it cannot be asked
    or does not answer. Nothing is sent to a process that has come to its number since."""
    if not _here(address):
        return ""
    try:
        process = os.pidfd_open(address.number)
    except OSError:
        return ""
    try:
        # From here on its number cannot pass to another one.
        if _began(address.number) != address.began:
            return ""
        signal.pidfd_send_signal(process, ASKING)
        signal.pidfd_send_signal(process, signal.SIGCONT)
        return _answer(address, seconds)
    except OSError:
        return ""
    finally:
        os.close(process)


def _answer(address: Address, seconds: float) -> str:
    given_up, told = time.monotonic() + seconds, ""
    while time.monotonic() < given_up:
        time.sleep(_PAUSE)
        before, told = told, (address.folder / "fd" / str(address.stacks)).read_text(errors="replace")
        if told and told == before:
            break
    return told


def end(address: Address, seconds: float) -> None:
    """See to it that a process on this machine is gone, within these seconds by itself."""
    if not _here(address):
        return
    with suppress(OSError):
        process = os.pidfd_open(address.number)
        try:
            given_up = time.monotonic() + seconds
            while _began(address.number) == address.began and time.monotonic() < given_up:
                time.sleep(_PAUSE)
            if _began(address.number) == address.began:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _here(address: Address) -> bool:
    return bool(address.began) and address.machine == _machine() and hasattr(os, "pidfd_open")


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _began(number: int) -> str:
    """When a living process began, in the kernel's ticks; empty for one that is gone."""
    try:
        state, *rest = Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]
