"""The watchdog: logs which rank the others wait for, and ends a stalled run.

Without the watchdog, a collective operation waits silently until its timeout, and nobody sees whether a rank is stopped
or slow. The training thread only records its position (stage or collective operation) in memory. A background thread
writes a heartbeat with the rank's position to the rendezvous store when a step begins, and at regular intervals. The
heartbeat interval is at most a quarter of the time after which a wait is logged. Only a rank whose position has not
changed for a heartbeat interval reads the heartbeats of other ranks. So collective operations have no extra cost.

If no rank has made progress for `parallel.stall_seconds`, all ranks end together (see `stall.py`). Before its first
step a run imports modules, reads rows, loads models and starts engines, without reporting progress. So for a rank that
has not started its first step, computing or reading from disk counts as progress. A rank that has not sent a heartbeat
is treated like one that has not started its first step.
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
    dump_on_signal,
    end_alone,
    publish_address,
    read_verdict,
    write_verdict,
)

VARIABLE = "LOCKSTEP_MISSED_AFTER"
SECONDS = 60.0
# Timeout of requests to the rendezvous store that it can answer immediately.
STORE_TIMEOUT = timedelta(minutes=5)
# Minimum interval between heartbeats. If a rank changes its position more often than this, some positions are not sent.
_TELL_PAUSE = 0.02
# A rank has at least this time to send its first heartbeat, even if `parallel.stall_seconds` is shorter.
UNSEEN_SECONDS = 600.0
# A rank that stays at one position for this time before its first step has stalled, even if it is busy.
LONGEST_START_SECONDS = 1800.0


class Moment(NamedTuple):
    """The position of a rank. `passed` counts the stages and collective operations entered and left, and `where` names
    the last one. `inside` says whether the rank is inside a collective operation of `World`. `since` is the time of the
    last progress, and `done` counts progress reports within the position."""

    passed: int
    where: str
    inside: bool
    since: float
    done: int = 0


@dataclass
class HeardRank:
    """The last heartbeat of another rank, and when this rank first saw it. Clocks of different hosts are not
    compared."""

    raw: str
    at: float
    progress: list[int]
    moved: float

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(*json.loads(self.raw))


class Heartbeat(NamedTuple):
    """The heartbeat that a rank writes to the store. `beat` increases with each heartbeat."""

    beat: int
    passed: int
    done: int
    where: str
    inside: bool
    starting: bool = False


class Watch:
    """The watchdog of one rank. If the rank waits longer than `after` seconds, the wait is logged."""

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
        # Only the heartbeat thread writes the following attributes; only the training thread writes `_moment`.
        self._busy_at, self._busy = time.monotonic(), 0
        self._activities: dict[int, Activity | None] = {}
        self._heard: dict[int, HeardRank] = {}
        self._answered = time.monotonic()
        self._stop, self._news = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._send_heartbeats, self._log_waits)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Marks a collective operation in a `with` block. Every rank must enter the same operations in the same
        order."""
        self._move(f"{name}, in {self._stages[-1]}", inside=True)
        try:
            yield
        finally:
            self._move(self._stages[-1])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Marks a named stage of this rank, such as a training step, in a `with` block."""
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
                self._stages[0] = f"the part after {name}"
            self._move(self._stages[-1])

    def progress(self, next_part: str | None = None) -> None:
        """Reports progress within a long stage. `next_part` is added to the name of the position. If `next_part` is
        None, the position keeps its name; if it is empty, the position gets the name of the stage."""
        where = f"{self._stages[-1]}, {next_part}" if next_part else self._stages[-1]
        if next_part is None:
            where = self._moment.where
        self._moment = self._moment._replace(where=where, since=time.monotonic(), done=self._moment.done + 1)

    def started(self) -> None:
        """Must be called when the first step begins. After this call the watchdog no longer counts CPU use as
        progress."""
        self._starting = False

    def _move(self, where: str, inside: bool = False) -> None:
        self._moment = Moment(self._moment.passed + 1, where, inside, time.monotonic())

    def close(self) -> None:
        self._stop.set()
        self._news.set()
        for thread in self._threads:
            thread.join(timeout=5)

    # -- heartbeats

    def _send_heartbeats(self) -> None:
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
                heartbeat = Heartbeat(beat, moment.passed, done, moment.where, moment.inside, self._starting)
                self._store.set(str(self.rank), json.dumps(heartbeat))
                if slept or now - moment.since >= self._pace:
                    self._listen()
                    if self._stall is not None:
                        self._end_if_stalled(self._stall, moment)
                self._answered = time.monotonic()
            except RuntimeError:
                return  # the store is unreachable; `_log_waits` reports this if a rank still waits
            if self._stop.wait(min(_TELL_PAUSE, self._pace)):
                return
            self._news.wait(self._pace - min(_TELL_PAUSE, self._pace))

    def _look_at_start(self, now: float, moment: Moment) -> None:
        """Before the first step, treats it as progress of this rank if the rank computes or reads from disk."""
        if not self._starting or self._activity is None or now - moment.since < self._pace:
            return
        if self._activity.advanced() and now - moment.since < LONGEST_START_SECONDS:
            self._busy_at, self._busy = now, self._busy + 1

    def _idle(self, now: float, moment: Moment) -> float:
        return now - max(moment.since, self._awake, self._busy_at)

    def _listen(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Only existing keys are read, because `get` of a missing key would block.
        present = others if self._store.check([str(r) for r in others]) else [r for r in others if self._has(r)]
        for rank, value in zip(present, self._store.multi_get([str(r) for r in present]), strict=True):
            raw, now, last = value.decode(), time.monotonic(), self._heard.get(rank)
            heartbeat = Heartbeat(*json.loads(raw))
            progress = [heartbeat.passed, heartbeat.done]
            if last is None or last.raw != raw:
                moved = last.moved if last is not None and last.progress == progress else now
                self._heard[rank] = HeardRank(raw, now, progress, moved)
            elif heartbeat.starting and now - last.at < LONGEST_START_SECONDS and self._is_busy(rank):
                last.moved = now

    def _is_busy(self, rank: int) -> bool:
        """Returns whether a rank on this host that sends no heartbeats is busy. A rank that loads a library may hold
        the GIL, and then it sends no heartbeats."""
        if rank not in self._activities:
            address = address_of(self._store, rank)
            self._activities[rank] = None if address is None else activity_of(address)
        activity = self._activities[rank]
        return activity is not None and activity.advanced()

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([str(rank)]))

    # -- stalls

    def _end_if_stalled(self, stall: Stall, moment: Moment) -> None:
        verdict = read_verdict(self._store)
        if verdict is None and (verdict_here := self.stalled(stall, moment)) is not None:
            write_verdict(self._store, verdict_here)
            verdict = read_verdict(self._store)
        if verdict is None:
            return
        self._ending = True
        try:
            Ending(self._store, self.rank, self.size, stall, verdict).run()
        except RuntimeError:
            end_alone(self.rank, stall, verdict.lines)

    def stalled(self, stall: Stall, moment: Moment) -> StallVerdict | None:
        """Returns a verdict if no rank has made progress for `stall.seconds`, else None."""
        now = time.monotonic()
        idle = self._idle(now, moment)
        if idle < stall.seconds or any(now - heard.moved < stall.seconds for heard in self._heard.values()):
            return None
        if len(self._heard) < self.size - 1 and now - self._began < max(stall.seconds, UNSEEN_SECONDS):
            return None  # a rank without a heartbeat may still import modules; its launcher notices if it ends
        lines, living = [_headline(idle, stall)], []
        for rank in range(self.size):
            heard = self._heard.get(rank)
            if rank == self.rank:
                living.append(rank)
                lines.append(f"  rank {rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}")
            elif heard is None:
                lines.append(f"  rank {rank} has sent no heartbeat")
            elif (silent := now - max(heard.at, self._awake)) >= stall.seconds / 2:
                where = heard.heartbeat().where
                lines.append(f"  rank {rank} has sent no heartbeat for {silent:.0f} s; it was last seen at {where}")
            else:
                living.append(rank)
                heartbeat = heard.heartbeat()
                lines.append(f"  rank {rank} {_state(heartbeat.inside)} {now - heard.moved:.0f} s at {heartbeat.where}")
        return StallVerdict(self.rank, living, lines)

    # -- log lines

    def _log_waits(self) -> None:
        next_at, waited, before = self.after, 0.0, time.monotonic()
        stopped = False
        while not stopped:
            # Checks once more after the run has stopped, because a short run may stop before the end of a logged wait
            # is noticed.
            stopped = self._stop.wait(self._pace)
            now, moment = time.monotonic(), self._moment
            if now - before > 4 * self._pace:
                self._awake = now  # this process was suspended, so the heartbeats it has read are old
            before = now
            idle = now - max(moment.since, self._awake)
            if idle < waited:
                _say(f"rank {self.rank}: collective completed after {waited:.0f} s")
                next_at, waited = self.after, 0.0
            if not stopped and idle >= next_at and (missed := self.missed(moment)):
                _say(f"rank {self.rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}: {'; '.join(missed)}")
                next_at, waited = 2 * idle, idle
            elif waited:
                waited = idle
            if self._stall is not None and not stopped:
                self._end_without_store(self._stall, moment, self._idle(now, moment))

    def _end_without_store(self, stall: Stall, moment: Moment, idle: float) -> None:
        """Ends this rank if the rendezvous store does not respond for 1.5 times `parallel.stall_seconds`. Normally the
        heartbeat thread ends a stalled run earlier, but without the store that thread would wait forever."""
        unanswered = time.monotonic() - max(self._answered, self._awake)
        if idle >= stall.seconds and unanswered >= 1.5 * stall.seconds and not self._ending:
            position = f"  rank {self.rank} {_state(moment.inside)} {idle:.0f} s at {moment.where}"
            store = f"  the rendezvous store has not responded for {unanswered:.0f} s"
            end_alone(self.rank, stall, [_headline(idle, stall), position, store])

    def missed(self, moment: Moment) -> list[str]:
        """Returns one message for each rank that this rank waits for. Returns an empty list if another waiting rank
        with a lower number reports the missing ranks."""
        now = time.monotonic()
        unanswered = now - max(self._answered, self._awake)
        if unanswered > self.after:
            return [f"the rendezvous store has not responded for {unanswered:.0f} s"]
        missing: dict[int, str] = {}
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            heard = self._heard.get(rank)
            if heard is None:
                missing[rank] = f"rank {rank} has not arrived and has sent no heartbeat: it may still be starting"
                continue
            passed, where = heard.heartbeat().passed, heard.heartbeat().where
            silent = now - max(heard.at, self._awake)
            if silent >= self.after / 2:
                missing[rank] = f"rank {rank} has sent no heartbeat for {silent:.0f} s; it was last seen at {where}"
            elif passed < moment.passed:
                # The collective operations of FSDP are not tracked. So outside of `World`'s operations it is not
                # certain that this rank waits.
                missing[rank] = f"rank {rank} {'has not arrived' if moment.inside else 'is behind'}; it is at {where}"
        reporter = min(rank for rank in range(self.size) if rank not in missing)
        return list(missing.values()) if reporter == self.rank else []


def _state(inside: bool) -> str:
    return "has waited" if inside else "has been"


def _headline(idle: float, stall: Stall) -> str:
    return f"the run has stalled: no progress for {idle:.0f} s (parallel.stall_seconds={stall.seconds:g})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wait_log_seconds() -> float:
    value = os.environ.get(VARIABLE, "")
    try:
        seconds = float(value) if value else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise Refusal.at(
            VARIABLE, f"{value!r} is not a number of seconds", "set it to 60, or unset it", code="not-a-number"
        )
    return seconds


@contextmanager
def watching(rank: int, size: int, stall: Stall | None = None) -> Iterator[Watch]:
    """Runs a watchdog inside the `with` block. The watchdog has its own connection to the store, because a blocking
    request blocks all others on the same connection."""
    after = wait_log_seconds()
    with ExitStack() as stack:
        store = _store(size)
        if stall is not None:
            publish_address(store, rank, stack.enter_context(dump_on_signal()))
        watch = Watch(store, rank, size, after, stall)
        stack.callback(watch.close)
        yield watch


def _store(size: int) -> dist.Store:
    return dist.HashStore() if size == 1 else connected_store("watch", STORE_TIMEOUT)
