"""Says which rank the others wait for. A collective waits without a word until its time-out; one rank that is stopped
looks like a run that thinks.

The thread that trains only notes where it is, in memory. Threads beside it tell the store that the ranks met at, when a
step begins and four times in the time after which a wait is told, that this process lives and where it is; only a rank
that has not moved for a quarter of it reads what the others told. So a collective costs nothing more, whatever the
device.

With a time after which a run counts as stalled (`parallel.stall_seconds`), the ranks end together when none of them has
made progress for so long; `stall.py` says how. Until its first step a run starts: modules are imported, rows are read,
models loaded, engines started. These tell of no progress themselves, and take long on a busy machine. So a rank that
starts makes progress while its processes compute or read from disk, and one that was never seen is still starting.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from lockstep.errors import Refusal
from lockstep.parallel.rendezvous import connected_store
from lockstep.parallel.stall import (
    Activity,
    Ending,
    Stall,
    StallVerdict,
    activity_of,
    address_of,
    answering,
    end_alone,
    pronounce,
    pronounced,
    tell_address,
)

VARIABLE = "LOCKSTEP_MISSED_AFTER"
SECONDS = 60.0
# The store is asked for what is there.
STORE_TIMEOUT = timedelta(minutes=5)
# Steps that are shorter than this are not all told: what is told of a rank that then stops is at most so old.
_TELL_PAUSE = 0.02
# For a rank to be seen for the first time, where `parallel.stall_seconds` is shorter.
UNSEEN_SECONDS = 600.0
# So long at one place of the start is a stall, however busy the rank is there.
LONGEST_START_SECONDS = 1800.0


class Moment(NamedTuple):
    """Where a rank is: how many stages and collectives it has come and gone by, the last one's name, whether it stands
    in a collective of `World`, since when, and what it has got done there, which other ranks need not do too."""

    passed: int
    where: str
    inside: bool
    since: float
    done: int = 0


@dataclass
class HeardRank:
    """What a rank told last, and when that reached us: the clocks of two machines are not compared."""

    told: str
    at: float
    progress: list[int]
    moved: float

    def words(self) -> Told:
        return Told(*json.loads(self.told))


class Told(NamedTuple):
    """What a rank says of itself. A beat more each time: it lives."""

    beat: int
    passed: int
    done: int
    where: str
    inside: bool
    starting: bool = False


class Watch:
    """The watch of one rank. `after` is how long a wait may be before it is told."""

    def __init__(self, store: dist.Store, rank: int, size: int, after: float, stall: Stall | None = None):
        self.rank, self.size, self.after = rank, size, after
        self._stall, self._ending = stall, False
        self._pace = (after if stall is None else min(after, stall.seconds)) / 4
        self._store = store
        self._stages = ["the start of the run"]
        self._moment = Moment(0, self._stages[-1], inside=False, since=time.monotonic())
        self._awake = time.monotonic()
        self._began, self._starting = time.monotonic(), True
        self._activity = Activity(os.getpid()) if stall is not None else None
        # Only the thread that tells counts these: the moment is the training thread's.
        self._busy_at, self._busy = time.monotonic(), 0
        self._activities: dict[int, Activity | None] = {}
        self._heard: dict[int, HeardRank] = {}
        self._answered = time.monotonic()
        self._stop, self._news = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._tell, self._look)]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """The ranks meet inside; every rank comes by the same ones in the same order."""
        self._move(f"{name}, in {self._stages[-1]}", inside=True)
        try:
            yield
        finally:
            self._move(self._stages[-1])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What this rank does inside, in words."""
        outermost = len(self._stages) == 1
        self._stages.append(name if outermost else f"{self._stages[-1]}, {name}")
        self._move(self._stages[-1])
        if outermost:
            self._news.set()
        try:
            yield
        finally:
            self._stages.pop()
            if outermost:
                self._stages[0] = f"what comes after {name}"
            self._move(self._stages[-1])

    def progress(self, next_part: str | None = None) -> None:
        """Something is done of what this rank is at, which may take long as a whole. What it waits for stays the same
        without a name, and is nothing special with an empty one."""
        where = f"{self._stages[-1]}, {next_part}" if next_part else self._stages[-1]
        if next_part is None:
            where = self._moment.where
        self._moment = self._moment._replace(where=where, since=time.monotonic(), done=self._moment.done + 1)

    def started(self) -> None:
        """The first step begins: from here on a rank is at work only where it says so."""
        self._starting = False

    def _move(self, where: str, inside: bool = False) -> None:
        self._moment = Moment(self._moment.passed + 1, where, inside, time.monotonic())

    def close(self) -> None:
        self._stop.set()
        self._news.set()
        for thread in self._threads:
            thread.join(timeout=5)

    # -- what this rank tells, and hears

    def _tell(self) -> None:
        before = time.monotonic()
        for beat in count():
            try:
                self._news.clear()
                now, moment = time.monotonic(), self._moment
                if slept := now - before > 4 * self._pace:
                    self._awake = now
                before = now
                self._look_at_start(now, moment)
                done = moment.done + self._busy
                told = Told(beat, moment.passed, done, moment.where, moment.inside, self._starting)
                self._store.set(str(self.rank), json.dumps(told))
                if slept or now - moment.since >= self._pace:
                    self._listen()
                    if self._stall is not None:
                        self._end_if_stalled(self._stall, moment)
                self._answered = time.monotonic()
            except RuntimeError:
                return  # the store is gone: `_look` says so if anybody still waits by then
            if self._stop.wait(min(_TELL_PAUSE, self._pace)):
                return
            self._news.wait(self._pace - min(_TELL_PAUSE, self._pace))

    def _look_at_start(self, now: float, moment: Moment) -> None:
        """Count that this rank computes or reads while it starts."""
        if not self._starting or self._activity is None or now - moment.since < self._pace:
            return
        if self._activity.advanced() and now - moment.since < LONGEST_START_SECONDS:
            self._busy_at, self._busy = now, self._busy + 1

    def _idle(self, now: float, moment: Moment) -> float:
        return now - max(moment.since, self._awake, self._busy_at)

    def _listen(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Asking for a name that is not there would wait for it.
        known = others if self._store.check([str(r) for r in others]) else [r for r in others if self._has(r)]
        for rank, value in zip(known, self._store.multi_get([str(r) for r in known]), strict=True):
            told, now, last = value.decode(), time.monotonic(), self._heard.get(rank)
            words = Told(*json.loads(told))
            progress = [words.passed, words.done]
            if last is None or last.told != told:
                moved = last.moved if last is not None and last.progress == progress else now
                self._heard[rank] = HeardRank(told, now, progress, moved)
            elif words.starting and now - last.at < LONGEST_START_SECONDS and self._is_busy(rank):
                last.moved = now

    def _is_busy(self, rank: int) -> bool:
        """Of a rank on this machine that says nothing, as one that loads a library may hold Python's lock."""
        if rank not in self._activities:
            address = address_of(self._store, rank)
            self._activities[rank] = None if address is None else activity_of(address)
        activity = self._activities[rank]
        return activity is not None and activity.advanced()

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([str(rank)]))

    # -- what ends it

    def _end_if_stalled(self, stall: Stall, moment: Moment) -> None:
        verdict = pronounced(self._store)
        if verdict is None and (own := self.stalled(stall, moment)) is not None:
            pronounce(self._store, own)
            verdict = pronounced(self._store)
        if verdict is None:
            return
        self._ending = True
        try:
            Ending(self._store, self.rank, self.size, stall, verdict).run()
        except RuntimeError:
            end_alone(self.rank, stall, verdict.lines)

    def stalled(self, stall: Stall, moment: Moment) -> StallVerdict | None:
        """What is to be said where no rank has made progress for so long; None where one has."""
        now = time.monotonic()
        idle = self._idle(now, moment)
        if idle < stall.seconds or any(now - heard.moved < stall.seconds for heard in self._heard.values()):
            return None
        if len(self._heard) < self.size - 1 and now - self._began < max(stall.seconds, UNSEEN_SECONDS):
            return None  # it still imports; its launcher sees when it ends
        lines, living = [_headline(idle, stall)], []
        for rank in range(self.size):
            heard = self._heard.get(rank)
            if rank == self.rank:
                living.append(rank)
                lines.append(f"  rank {rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}")
            elif heard is None:
                lines.append(f"  rank {rank} has never been seen")
            elif (silent := now - max(heard.at, self._awake)) >= stall.seconds / 2:
                lines.append(
                    f"  rank {rank} gives no sign of life for {silent:.0f} s; it was last seen at {heard.words().where}"
                )
            else:
                living.append(rank)
                words = heard.words()
                lines.append(f"  rank {rank} {_state(words.inside)} {now - heard.moved:.0f} s at {words.where}")
        return StallVerdict(self.rank, living, lines)

    # -- what is said

    def _look(self) -> None:
        next_at, waited, before = self.after, 0.0, time.monotonic()
        stopped = False
        while not stopped:
            # One more look after the end: a short run may be done before the wait that was told of is seen to be over.
            stopped = self._stop.wait(self._pace)
            now, moment = time.monotonic(), self._moment
            if now - before > 4 * self._pace:
                self._awake = now  # this process was stopped itself, and what it heard is old
            before = now
            idle = now - max(moment.since, self._awake)
            if idle < waited:
                _say(f"rank {self.rank}: the wait of {waited:.0f} s is over")
                next_at, waited = self.after, 0.0
            if not stopped and idle >= next_at and (missed := self.missed(moment)):
                _say(f"rank {self.rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}: {'; '.join(missed)}")
                next_at, waited = 2 * idle, idle
            elif waited:
                waited = idle
            if self._stall is not None and not stopped:
                self._end_without_store(self._stall, moment, self._idle(now, moment))

    def _end_without_store(self, stall: Stall, moment: Moment, idle: float) -> None:
        """The thread that asks the store would wait for it for ever. It has half the time again to end the run."""
        unanswered = time.monotonic() - max(self._answered, self._awake)
        if idle >= stall.seconds and unanswered >= 1.5 * stall.seconds and not self._ending:
            own = f"  rank {self.rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}"
            store = f"  the store where the ranks meet has not answered for {unanswered:.0f} s"
            end_alone(self.rank, stall, [_headline(idle, stall), own, store])

    def missed(self, moment: Moment) -> list[str]:
        """A sentence for each rank that is waited for; none where a rank before this one says it."""
        now = time.monotonic()
        unanswered = now - max(self._answered, self._awake)
        if unanswered > self.after:
            return [f"the store where the ranks meet has not answered for {unanswered:.0f} s"]
        found: dict[int, str] = {}
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            heard = self._heard.get(rank)
            if heard is None:
                found[rank] = f"rank {rank} has not come, and has never been seen: it may still be starting"
                continue
            passed, where = heard.words().passed, heard.words().where
            silent = now - max(heard.at, self._awake)
            if silent >= self.after / 2:
                found[rank] = f"rank {rank} gives no sign of life for {silent:.0f} s; it was last seen at {where}"
            elif passed < moment.passed:
                # Collectives of sharded models are not marked, so outside of ours this need not be a wait for it.
                found[rank] = f"rank {rank} {'has not come' if moment.inside else 'is behind'}; it is at {where}"
        reporter = min(rank for rank in range(self.size) if rank not in found)
        return list(found.values()) if reporter == self.rank else []


def _state(inside: bool) -> str:
    return "has waited" if inside else "has been"


def _headline(idle: float, stall: Stall) -> str:
    return f"the run has stalled: no progress for {idle:.0f} s (parallel.stall_seconds={stall.seconds:g})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_before_a_wait_is_told() -> float:
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise Refusal.at(VARIABLE, f"{given!r} is not a number of seconds", "set it to 60, or leave it out")
    return seconds


@contextmanager
def watching(rank: int, size: int, stall: Stall | None = None) -> Iterator[Watch]:
    """A watch that asks the store by a connection of its own: one that waits would hold up the others on it."""
    after = seconds_before_a_wait_is_told()
    with ExitStack() as stack:
        store = _store(size)
        if stall is not None:
            tell_address(store, rank, stack.enter_context(answering()))
        watch = Watch(store, rank, size, after, stall)
        stack.callback(watch.close)
        yield watch


def _store(size: int) -> dist.Store:
    return dist.HashStore() if size == 1 else connected_store("watch", STORE_TIMEOUT)
