"""Files of a tape are written beside the next step: turning its numbers into files would take a part of a short one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

# Seconds that a thread may keep Python to itself while a tape is written: with Python's own five milliseconds, a step
# that mostly hands work to its device waits as long for every turn.
TURN = 2e-4


class Writer:
    """One piece of work at a time, in the order it came. What goes wrong is raised where the run next waits for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lockstep-tape")
        self._last: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """After the piece before this one is done, so that no more than one is held in memory."""
        self.wait()
        self._last = self._thread.submit(_in_small_turns, write)

    def wait(self) -> None:
        """Until everything is on disk."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _in_small_turns(write: Callable[[], None]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURN))
    try:
        write()
    finally:
        sys.setswitchinterval(before)
