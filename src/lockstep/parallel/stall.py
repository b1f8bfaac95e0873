"""`parallel.stall_seconds`: how a run ends in which no rank makes progress any more.

The first rank that sees it writes a verdict into the store where the ranks meet. Every rank that lives reads it there,
leaves its stacks in the run folder and waits for the others to have done so; the first one on each machine gets the
stacks of those that give no sign of life, and kills what cannot be woken. Then all of them end, none of them alone:
a rank that ends early makes the others fail of another reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from lockstep.parallel import stacks
from lockstep.parallel.restarts import STALLED

_VERDICT = "stalled"
_PAUSE = 0.02
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


def tell_address(store: dist.Store, rank: int, address: stacks.Address) -> None:
    store.set(f"address/{rank}", json.dumps(asdict(address)))


def address_of(store: dist.Store, rank: int) -> stacks.Address | None:
    """None where the rank has not told it."""
    key = f"address/{rank}"
    return stacks.Address(**json.loads(store.get(key))) if store.check([key]) else None


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
                stacks.end(address, 0)
        os._exit(STALLED)

    def _meet(self, name: str, ranks: list[int]) -> None:
        """All of these ranks have come as far, or have had the time to."""
        if self.rank in ranks:
            self.store.set(f"{name}/{self.rank}", "")
        given_up = time.monotonic() + self.patience
        while not self.store.check([f"{name}/{rank}" for rank in ranks]) and time.monotonic() < given_up:
            time.sleep(_PAUSE)

    def _ask_the_silent(self) -> dict[int, stacks.Address]:
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
            keep(self.stall, rank, self.verdict.lines, stacks.ask(address, _WAKING_SECONDS))
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
                stacks.write_own(sys.stderr)
            return
        folder.mkdir(exist_ok=True)
        with (folder / f"rank_{rank}.txt").open("a", encoding="utf-8") as file:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), *lines, "", sep="\n", file=file)
            if told is None:
                stacks.write_own(file)
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
