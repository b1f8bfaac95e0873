"""Where processes meet: the store of the ranks, and word of a long wait for others."""

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

# A wait for another process is told after so long, and then again at this pace.
TELL_SECONDS, TELL_AGAIN_SECONDS = 10.0, 60.0
# How often each purpose has had a store in this process; every rank counts alike.
_turns: Counter[str] = Counter()


def launcher_holds_store() -> bool:
    """Whether the launcher holds it, so that it is there before the ranks are, and after them, with all they said."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connected_store(purpose: str, timeout: timedelta) -> dist.Store:
    """A connection of its own to it, under names that are new: a restart, and a second run in the same processes, would
    find what the one before has said, and wait at its addresses."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    turn = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_turns[purpose]}"
    _turns[purpose] += 1
    return dist.PrefixStore(f"lockstep/{purpose}/{turn}", store)


def say(text: str) -> None:
    """To whoever watches the run, beside its own output."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def told_wait(what: str, after: float = TELL_SECONDS) -> Iterator[None]:
    """Inside, something else is waited for: told where it takes long, and again every minute."""
    over = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        pause = after
        while not over.wait(pause):
            say(f"waiting for {what} for {time.monotonic() - begun:.0f} s")
            pause = TELL_AGAIN_SECONDS

    threading.Thread(target=tell, daemon=True, name="wait").start()
    try:
        yield
    finally:
        over.set()
