"""`parallel.max_restarts`: restarts the ranks of a run after a failure; they resume from the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from signal import SIGHUP, SIGINT, SIGTERM

from lockstep.errors import STALLED

# Environment variable of a rank: the PID of its launcher.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# Configuration errors: a restart would fail again.
_REFUSED = 2
# A requested end.
_ASKED = {128 + number for number in (SIGHUP, SIGINT, SIGTERM)}


def status_of(code: int) -> int:
    """A shell's exit status: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


def worst(statuses: Iterable[int]) -> int:
    """The exit status of a run: a stall, a kill and an error take precedence over consequential failures."""
    order = [0, *sorted(_ASKED), _REFUSED]

    def weight(status: int) -> tuple[int, int]:
        if status in order:
            return order.index(status), 0
        return len(order) + (2 if status == STALLED else 1 if status > 128 else 0), status

    return max(statuses, key=weight)


def with_restarts(start: Callable[[int], int], restarts: int) -> int:
    """Calls `start` with the attempt number, from 0; returns the exit status of the last attempt."""
    for turn in count():
        status = start(turn)
        if status in {0, _REFUSED, *_ASKED} or turn >= restarts:
            return status
        print(
            f"the ranks ended with status {status}; restart {turn + 1} of {restarts}, from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
    raise AssertionError("unreachable")
