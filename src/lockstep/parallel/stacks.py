"""Where every thread of a process is, in a file: of this process, and of another one that does not answer any more.
And whether a process of this machine is at work, also where it cannot say so."""

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
# Of a processor's time, and read from a disk between two looks: less is what threads that only watch take.
_BUSY_SHARE, _BUSY_BYTES = 0.02, 2**16


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


class Activity:
    """Whether a process of this machine, with all that it has started, computes or reads. Unknown without /proc."""

    def __init__(self, number: int):
        self._number = number
        self._spent = 0.0
        """What the looks themselves took of this process's time."""
        self._last = self._used()

    def advanced(self) -> bool:
        """Whether it has done so since the last look."""
        (then, seconds, read), self._last = self._last, self._used()
        now, seconds_now, read_now = self._last
        return seconds_now - seconds >= max(_BUSY_SHARE * (now - then), 1e-6) or read_now - read >= _BUSY_BYTES

    def _used(self) -> tuple[float, float, int]:
        """The time, and by then the seconds on processors and the bytes from disks."""
        begun = time.thread_time()
        children: dict[int, list[int]] = {}
        ticks: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
                # Its own, and those of children that have ended.
                ticks[int(folder.name)] = sum(map(int, fields[11:15]))
        tree = [self._number]
        for number in tree:
            tree += children.get(number, [])
        seconds = sum(ticks.get(number, 0) for number in tree) / os.sysconf("SC_CLK_TCK")
        read = sum(map(_bytes_read, tree))
        if self._number == os.getpid():
            seconds -= self._spent
            self._spent += time.thread_time() - begun
        return time.monotonic(), seconds, read


def activity_of(address: Address) -> Activity | None:
    """None where the process is on another machine, or is gone."""
    return Activity(address.number) if _here(address) and _began(address.number) == address.began else None


def _bytes_read(number: int) -> int:
    with suppress(OSError, ValueError):
        lines = Path("/proc", str(number), "io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return 0


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
