"""Connects the ranks to the rendezvous store, and logs long waits for other processes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

# A wait for another process is logged after TELL_SECONDS, and then every TELL_AGAIN_SECONDS.
TELL_SECONDS, TELL_AGAIN_SECONDS = 10.0, 60.0
# How often this process has opened a store for each purpose. These counts are the same on every rank.
_turns: Counter[str] = Counter()


def launcher_holds_store() -> bool:
    """Returns whether the launcher hosts the rendezvous store. A store that the launcher hosts exists before the ranks
    start and after they end."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connected_store(purpose: str, timeout: timedelta) -> dist.Store:
    """Opens a connection to the rendezvous store, with a key prefix that is not used yet. Without a new prefix, a
    restart or a second run in the same processes would read the keys of the previous run."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    turn = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_turns[purpose]}"
    _turns[purpose] += 1
    return dist.PrefixStore(f"lockstep/{purpose}/{turn}", store)


def say(text: str) -> None:
    """Prints to stderr, separate from the run's output."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def log_wait(what: str, after: float = TELL_SECONDS) -> Iterator[None]:
    """Logs a wait for `what` that takes longer than `after` seconds, and again every minute."""
    over = threading.Event()
    begun = time.monotonic()

    def log() -> None:
        pause = after
        while not over.wait(pause):
            say(f"waiting for {what} for {time.monotonic() - begun:.0f} s")
            pause = TELL_AGAIN_SECONDS

    threading.Thread(target=log, daemon=True, name="wait").start()
    try:
        yield
    finally:
        over.set()
