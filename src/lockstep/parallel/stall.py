"""Stalled runs: stack dumps of every process, and the end of a run in which no rank makes progress."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from lockstep.errors import STALLED

# Where every thread of a process is, in a file: of this process, and of another one that does not answer any more.
# And whether a process of this machine is at work, also where it cannot say so.

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


# `parallel.stall_seconds`: how a run ends in which no rank makes progress any more.
#
# The first rank that sees it writes a verdict into the store where the ranks meet. Every rank that lives reads it
# there, leaves its stacks in the run folder and waits for the others to have done so; the first one on each machine
# gets the stacks of those that give no sign of life, and kills what cannot be woken. Then all of them end, none of
# them alone: a rank that ends early makes the others fail of another reason.

_VERDICT = "stalled"
_STALL_PAUSE = 0.02
# Within which a process that was stopped answers when it goes on.
_WAKING_SECONDS = 5.0


@dataclass(frozen=True)
class Stall:
    """Seconds without progress of any rank, and the run folder, which keeps the stacks."""

    seconds: float
    folder: Path


@dataclass(frozen=True)
class StallVerdict:
    author: int
    living: list[int]
    lines: list[str]


def pronounce(store: dist.Store, verdict: StallVerdict) -> None:
    """The first verdict holds."""
    store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))


def pronounced(store: dist.Store) -> StallVerdict | None:
    return StallVerdict(**json.loads(store.get(_VERDICT))) if store.check([_VERDICT]) else None


def tell_address(store: dist.Store, rank: int, address: Address) -> None:
    store.set(f"address/{rank}", json.dumps(asdict(address)))


def address_of(store: dist.Store, rank: int) -> Address | None:
    """None where the rank has not told it."""
    key = f"address/{rank}"
    return Address(**json.loads(store.get(key))) if store.check([key]) else None


class Ending:
    """The last deeds of one rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, stall: Stall, verdict: StallVerdict):
        self.store, self.rank, self.stall, self.verdict = store, rank, stall, verdict
        self.silent = [other for other in range(size) if other not in verdict.living]
        # Each rank reads the verdict at its next beat, a quarter of the time from now at the latest.
        self.patience = stall.seconds / 2 + _WAKING_SECONDS

    def run(self) -> None:
        """Does not return."""
        store, verdict = self.store, self.verdict
        if self.rank in self.silent:
            # Woken by another rank, which reads this process's stacks first.
            store.set(f"awake/{self.rank}", "")
            self._meet("asked", verdict.living)
            time.sleep(1)
            os._exit(STALLED)
        keep(self.stall, self.rank, verdict.lines)
        if self.rank == verdict.author:
            say(verdict.lines, self.stall)
        self._meet("written", verdict.living)
        woken = self._ask_the_silent()
        _hush()
        self._meet("asked", verdict.living)
        for rank, address in woken.items():
            if not store.check([f"awake/{rank}"]):
                end(address, 0)
        os._exit(STALLED)

    def _meet(self, name: str, ranks: list[int]) -> None:
        """All of these ranks have come as far, or have had the time to."""
        if self.rank in ranks:
            self.store.set(f"{name}/{self.rank}", "")
        given_up = time.monotonic() + self.patience
        while not self.store.check([f"{name}/{rank}" for rank in ranks]) and time.monotonic() < given_up:
            time.sleep(_STALL_PAUSE)

    def _ask_the_silent(self) -> dict[int, Address]:
        """The silent ranks of this machine, where this rank is the first that lives on it."""
        addresses = {rank: address_of(self.store, rank) for rank in (*self.verdict.living, *self.silent)}
        own = addresses[self.rank]
        if own is None:
            return {}
        here = {rank: address for rank, address in addresses.items() if address and address.machine == own.machine}
        if self.rank != min(rank for rank in here if rank in self.verdict.living):
            return {}
        asked = {rank: address for rank, address in here.items() if rank in self.silent}
        for rank, address in asked.items():
            keep(self.stall, rank, self.verdict.lines, ask(address, _WAKING_SECONDS))
        return asked


def end_alone(rank: int, stall: Stall, lines: list[str]) -> None:
    """End this process where the others cannot be reached."""
    keep(stall, rank, lines)
    say(lines, stall)
    _hush()
    os._exit(STALLED)


def say(lines: list[str], stall: Stall) -> None:
    there = [f"  stacks of the ranks: {stall.folder / 'stacks'}"] if stall.folder.is_dir() else []
    print("\n".join([*lines, *there]), file=sys.stderr, flush=True)


def keep(stall: Stall, rank: int, lines: list[str], told: str | None = None) -> None:
    """Add the stacks of a rank, this process's where none are given, to its file; to stderr before there is a folder.

    The folder is not made here: a run that must not find one would be refused at its next start.
    """
    folder = stall.folder / "stacks"
    try:
        if not stall.folder.is_dir():
            if told is None:
                write_own(sys.stderr)
            return
        folder.mkdir(exist_ok=True)
        with (folder / f"rank_{rank}.txt").open("a", encoding="utf-8") as file:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), *lines, "", sep="\n", file=file)
            if told is None:
                write_own(file)
            else:
                file.write(told or "it could not be asked for its stacks\n")
            print(file=file)
    except OSError as error:
        # The run ends all the same, and says why it has stalled.
        print(f"the stacks of rank {rank} could not be written: {error}", file=sys.stderr, flush=True)


def _hush() -> None:
    """From here on a collective that fails because the others end has nothing to say."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
