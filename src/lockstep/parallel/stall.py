"""Ends a run in which no rank makes progress, after writing stack dumps of every process."""

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

# Functions that write stack dumps of this process, or of an unresponsive process on the same host. `Activity` measures
# whether a process of this host that sends no heartbeats is busy.

# On this signal, faulthandler writes the stacks in its C signal handler. So the dump works even if a thread holds the
# GIL or waits inside a library.
ASKING = signal.SIGUSR1
_PAUSE = 0.05
# A process is busy if it uses at least _BUSY_SHARE of a processor, or reads at least _BUSY_BYTES from disk, between two
# checks. The idle threads of the watchdog use less CPU time and disk reads than these limits.
_BUSY_SHARE, _BUSY_BYTES = 0.02, 2**16


@dataclass(frozen=True)
class Address:
    """Identifies a process for other processes on the same host. The start time (`began`) shows whether its PID was
    reused."""

    machine: str
    number: int
    began: str
    stacks: int
    """The file descriptor to which the process writes its stack dumps."""

    @property
    def folder(self) -> Path:
        return Path("/proc", str(self.number))


@contextmanager
def dump_on_signal() -> Iterator[Address]:
    """Inside the `with` block, this process writes its stacks to an unnamed temporary file when it receives the signal
    `ASKING`. So a run that ends normally leaves no file."""
    with tempfile.TemporaryFile() as file:
        faulthandler.register(ASKING, file=file, all_threads=True)
        try:
            yield Address(_machine(), os.getpid(), _began(os.getpid()), file.fileno())
        finally:
            faulthandler.unregister(ASKING)


def write_own(file: IO[str]) -> None:
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)


def request_stacks(address: Address, seconds: float) -> str:
    """Returns the stacks of another process on this host. Resumes the process if it was stopped. Returns an empty text
    if the process cannot be signalled or does not respond. If the PID was reused, the new process gets no signal."""
    if not _on_this_host(address):
        return ""
    try:
        process = os.pidfd_open(address.number)
    except OSError:
        return ""
    try:
        # While the pidfd is open, the PID cannot be reused.
        if _began(address.number) != address.began:
            return ""
        signal.pidfd_send_signal(process, ASKING)
        signal.pidfd_send_signal(process, signal.SIGCONT)
        return _read_stacks(address, seconds)
    except OSError:
        return ""
    finally:
        os.close(process)


class Activity:
    """Measures whether a process of this host, or one of its descendants, computes or reads from disk. Requires
    /proc."""

    def __init__(self, number: int):
        self._number = number
        self._spent = 0.0
        """CPU time that these measurements used themselves."""
        self._last = self._used()

    def advanced(self) -> bool:
        """Returns whether the process was busy since the last call."""
        (then, seconds, read), self._last = self._last, self._used()
        now, seconds_now, read_now = self._last
        return seconds_now - seconds >= max(_BUSY_SHARE * (now - then), 1e-6) or read_now - read >= _BUSY_BYTES

    def _used(self) -> tuple[float, float, int]:
        """Returns the current time, and how many CPU seconds the process tree has used and how many bytes it has read
        from disk."""
        begun = time.thread_time()
        children: dict[int, list[int]] = {}
        ticks: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # the process has ended
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
                # The CPU time of a process includes that of its ended and reaped children.
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
    """Returns an `Activity` for the process, or None if the process is on another host or has ended."""
    return Activity(address.number) if _on_this_host(address) and _began(address.number) == address.began else None


def _bytes_read(number: int) -> int:
    with suppress(OSError, ValueError):
        lines = Path("/proc", str(number), "io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return 0


def _read_stacks(address: Address, seconds: float) -> str:
    deadline, stacks = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)
        previous, stacks = stacks, (address.folder / "fd" / str(address.stacks)).read_text(errors="replace")
        if stacks and stacks == previous:
            break
    return stacks


def end(address: Address, seconds: float) -> None:
    """Kills a process on this host unless it ends within `seconds`."""
    if not _on_this_host(address):
        return
    with suppress(OSError):
        process = os.pidfd_open(address.number)
        try:
            deadline = time.monotonic() + seconds
            while _began(address.number) == address.began and time.monotonic() < deadline:
                time.sleep(_PAUSE)
            if _began(address.number) == address.began:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _on_this_host(address: Address) -> bool:
    return bool(address.began) and address.machine == _machine() and hasattr(os, "pidfd_open")


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _began(number: int) -> str:
    """Returns the start time of a live process in kernel ticks, or an empty string if the process has ended."""
    try:
        state, *rest = Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


# `parallel.stall_seconds`: ends a run in which no rank makes progress. The first rank that detects the stall writes a
# verdict to the rendezvous store. Every live rank reads the verdict, writes its stacks to the run folder and waits for
# the others. The first live rank on each host collects the stacks of silent ranks and kills those that do not respond.
# Then all ranks exit together. If one rank exited early, the others would fail with a misleading error.

_VERDICT = "stalled"
_STALL_PAUSE = 0.02
# Maximum time in which a stopped process must respond after it is resumed.
_WAKING_SECONDS = 5.0


@dataclass(frozen=True)
class Stall:
    """A run has stalled if no rank makes progress for `seconds`. The stacks are written to the run folder `folder`."""

    seconds: float
    folder: Path


@dataclass(frozen=True)
class StallVerdict:
    author: int
    living: list[int]
    lines: list[str]


def write_verdict(store: dist.Store, verdict: StallVerdict) -> None:
    """Writes the stall verdict to the store, unless another rank has written one."""
    store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))


def read_verdict(store: dist.Store) -> StallVerdict | None:
    return StallVerdict(**json.loads(store.get(_VERDICT))) if store.check([_VERDICT]) else None


def publish_address(store: dist.Store, rank: int, address: Address) -> None:
    store.set(f"address/{rank}", json.dumps(asdict(address)))


def address_of(store: dist.Store, rank: int) -> Address | None:
    """Returns the process address of a rank, or None if the rank has not published it yet."""
    key = f"address/{rank}"
    return Address(**json.loads(store.get(key))) if store.check([key]) else None


class Ending:
    """Shuts one rank down after a stall."""

    def __init__(self, store: dist.Store, rank: int, size: int, stall: Stall, verdict: StallVerdict):
        self.store, self.rank, self.stall, self.verdict = store, rank, stall, verdict
        self.silent = [other for other in range(size) if other not in verdict.living]
        # Each rank reads the verdict at its next heartbeat, after a quarter of `stall.seconds` at most.
        self.patience = stall.seconds / 2 + _WAKING_SECONDS

    def run(self) -> None:
        """Writes stack dumps, waits for the other ranks and exits this process. Does not return."""
        store, verdict = self.store, self.verdict
        if self.rank in self.silent:
            # Another rank resumed this process to read its stacks, so this process waits before it exits.
            store.set(f"awake/{self.rank}", "")
            self._meet("asked", verdict.living)
            time.sleep(1)
            os._exit(STALLED)
        keep(self.stall, self.rank, verdict.lines)
        if self.rank == verdict.author:
            say(verdict.lines, self.stall)
        self._meet("written", verdict.living)
        woken = self._dump_silent_ranks()
        _hush()
        self._meet("asked", verdict.living)
        for rank, address in woken.items():
            if not store.check([f"awake/{rank}"]):
                end(address, 0)
        os._exit(STALLED)

    def _meet(self, name: str, ranks: list[int]) -> None:
        """Waits until all given ranks have reached the point `name`, or until a timeout."""
        if self.rank in ranks:
            self.store.set(f"{name}/{self.rank}", "")
        deadline = time.monotonic() + self.patience
        while not self.store.check([f"{name}/{rank}" for rank in ranks]) and time.monotonic() < deadline:
            time.sleep(_STALL_PAUSE)

    def _dump_silent_ranks(self) -> dict[int, Address]:
        """If this rank is the first live rank on its host, collects the stacks of the silent ranks on this host.
        Returns their addresses."""
        addresses = {rank: address_of(self.store, rank) for rank in (*self.verdict.living, *self.silent)}
        local = addresses[self.rank]
        if local is None:
            return {}
        on_host = {rank: address for rank, address in addresses.items() if address and address.machine == local.machine}
        if self.rank != min(rank for rank in on_host if rank in self.verdict.living):
            return {}
        dumped = {rank: address for rank, address in on_host.items() if rank in self.silent}
        for rank, address in dumped.items():
            keep(self.stall, rank, self.verdict.lines, request_stacks(address, _WAKING_SECONDS))
        return dumped


def end_alone(rank: int, stall: Stall, lines: list[str]) -> None:
    """Ends this process if the other ranks cannot be reached."""
    keep(stall, rank, lines)
    say(lines, stall)
    _hush()
    os._exit(STALLED)


def say(lines: list[str], stall: Stall) -> None:
    footer = [f"  stacks of the ranks: {stall.folder / 'stacks'}"] if stall.folder.is_dir() else []
    print("\n".join([*lines, *footer]), file=sys.stderr, flush=True)


def keep(stall: Stall, rank: int, lines: list[str], stacks: str | None = None) -> None:
    """Appends the stacks of a rank (by default of this process) to the file `rank_N.txt`. If there is no run folder,
    prints this process's stacks to stderr.

    This function does not create the run folder, because a later start that requires a new folder would be refused.
    """
    folder = stall.folder / "stacks"
    try:
        if not stall.folder.is_dir():
            if stacks is None:
                write_own(sys.stderr)
            return
        folder.mkdir(exist_ok=True)
        with (folder / f"rank_{rank}.txt").open("a", encoding="utf-8") as file:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), *lines, "", sep="\n", file=file)
            if stacks is None:
                write_own(file)
            else:
                file.write(stacks or "its stacks could not be read\n")
            print(file=file)
    except OSError as error:
        # A write error is only reported, so that the run still ends and reports the stall.
        print(f"the stacks of rank {rank} could not be written: {error}", file=sys.stderr, flush=True)


def _hush() -> None:
    """Redirects stdout and stderr to /dev/null, because operations that fail when other ranks exit would print
    misleading errors."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
