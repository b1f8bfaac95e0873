"""Files of a tape are written beside the next step: turning its numbers into files would take a part of a short one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """One piece of work at a time, in the order it came. What goes wrong is raised where the run next waits for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lockstep-tape")
        self._last: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """After the piece before this one is done, so that no more than one is held in memory."""
        self.wait()
        self._last = self._thread.submit(write)

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
