"""A limit of time for a function of the user's that runs inside the run itself, next to the weights.

A timer's signal ends what is in Python, also where it sleeps or waits. What does not come back from the inside of a
library cannot be ended from within its own process, so a second clock then ends the whole run, with what it stood at.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# After the limit: for a function to be ended by the signal, before the run is.
GRACE_SECONDS = 30.0
# A function that catches all there is may be ended by the next signal.
AGAIN_SECONDS = 5.0
# Of the run, where it had to be ended with the function.
ENDED = 2


class TimeUp(BaseException):
    """The limit is over. No `except Exception` of the user's keeps it."""


@contextmanager
def time_limit(seconds: float, message: str) -> Iterator[None]:
    """Raises `TimeUp` in the block after so many seconds. `message` is what the run ends with where that cannot be."""
    last = threading.Timer(seconds + GRACE_SECONDS, _end_run, (message,))
    last.daemon = True
    last.start()
    try:
        # Signals are the main thread's; any other has the second clock alone.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _raise)
        earlier = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
            # Somebody else's clock around this one starts anew.
            signal.setitimer(signal.ITIMER_REAL, *earlier)
    finally:
        last.cancel()


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeUp


def _end_run(message: str) -> None:
    """Whatever else the process does: the message, where every thread stands, and the end."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(ENDED)
