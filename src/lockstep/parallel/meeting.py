"""The store where the ranks meet."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

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
