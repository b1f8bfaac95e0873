"""What a rank tells of where it is, and what counts as progress of a run that starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from hang import wait_until
from lockstep.parallel import stall as stacks
from lockstep.parallel.stall import Stall, publish_address
from lockstep.parallel.watchdog import Heartbeat, Watch

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks at processes in /proc")


def test_a_step_is_told_when_it_begins_and_named_after_its_end() -> None:
    """Steps may be far shorter than the pace of telling, which is 250 s here."""
    store = dist.HashStore()
    watch = Watch(store, rank=0, size=1, after=1000)

    def told() -> str:
        return Heartbeat(*json.loads(store.get("0"))).where

    try:
        wait_until(lambda: told() == "the start of the run")
        for step in ("step 1", "step 2"):
            with watch.stage(step):
                wait_until(lambda wanted=step: told() == wanted)
                with watch.stage("gen"):
                    assert watch._moment.where == f"{step}, gen"
            with watch.collective("a gathering"):
                assert watch._moment.where == f"a gathering, in the part after {step}"
    finally:
        watch.close()
    assert not any(thread.is_alive() for thread in watch._threads)


@contextmanager
def watching(size: int = 1, stall: Stall | None = None) -> Iterator[tuple[Watch, dist.Store]]:
    """A watch whose own threads find nothing to do: its pace is 250 s."""
    store = dist.HashStore()
    watch = Watch(store, rank=0, size=size, after=1000, stall=stall)
    try:
        yield watch, store
    finally:
        watch.close()


def tell(store: dist.Store, rank: int, beat: int, *, starting: bool) -> None:
    store.set(str(rank), json.dumps(Heartbeat(beat, 1, 0, "loading the model", inside=False, starting=starting)))


@contextmanager
def process(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as started:
        try:
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)  # with what it has started


SPIN, SLEEP = "while True: pass", "import time; time.sleep(1e6)"


def test_a_rank_that_was_never_seen_is_still_starting(tmp_path: Path) -> None:
    """It imports; its launcher notices when it ends. One that was seen and makes no progress has stalled."""
    at_once = Stall(1e-9, tmp_path)
    with watching(size=2) as (watch, store):
        assert watch.stalled(at_once, watch._moment) is None
        tell(store, 1, 0, starting=True)
        watch._listen()
        assert watch.stalled(at_once, watch._moment) is not None


@needs_proc
def test_a_rank_is_at_work_while_it_computes_at_its_start_and_not_after_it(tmp_path: Path) -> None:
    with watching(stall=Stall(1000, tmp_path)) as (watch, _):
        moment, later = watch._moment, time.monotonic() + 300  # as if it had been there for longer than its pace

        def counted() -> bool:
            sum(range(10**6))
            watch._look_at_start(later, moment)
            return watch._busy > 0

        wait_until(counted)
        watch.started()
        before = watch._busy
        for _ in range(3):
            counted()
        assert watch._busy == before


@needs_proc
def test_a_silent_rank_that_computes_while_it_starts_makes_progress() -> None:
    """As one that holds Python's lock. One that sleeps does not, and a rank that trains has to say so itself."""
    with process(SPIN) as busy, process(SLEEP) as idle, watching(size=4) as (watch, store):
        told = {1: (busy, True), 2: (idle, True), 3: (busy, False)}
        for rank, (number, starting) in told.items():
            publish_address(store, rank, stacks.Address(stacks._machine(), number, stacks._began(number), 0))
            tell(store, rank, 0, starting=starting)
        watch._listen()
        first = {rank: heard.moved for rank, heard in watch._heard.items()}

        def moved(rank: int) -> bool:
            watch._listen()
            return watch._heard[rank].moved > first[rank]

        wait_until(lambda: moved(1))
        assert watch._heard[3].moved == first[3]

        def quiet() -> bool:
            """Its own start is over."""
            before = watch._heard[2].moved
            time.sleep(0.2)
            watch._listen()
            return watch._heard[2].moved == before

        wait_until(quiet)


@needs_proc
def test_what_a_process_has_started_counts_as_its_work() -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    with process(program) as number:
        activity = stacks.Activity(number)
        for _ in range(3):  # longer than the two interpreters take to start
            wait_until(activity.advanced)
