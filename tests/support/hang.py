"""How many seconds what hangs is given. Only that: a busy machine of half the speed must never get there."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 1800


def wait_until(moment: Callable[[], bool]) -> None:
    """Look until it has come."""
    given_up = time.monotonic() + HANG
    while not moment():
        if time.monotonic() > given_up:
            raise TimeoutError(f"it has not come in {HANG} s")
        time.sleep(0.05)
