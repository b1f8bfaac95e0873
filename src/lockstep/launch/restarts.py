"""Restarts the ranks of a run after a failure (`parallel.max_restarts`); the ranks resume from the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from signal import SIGHUP, SIGINT, SIGTERM

from lockstep.errors import STALLED

# Environment variable with the PID of the launcher of a rank.
LAUNCHER = "LOCKSTEP_LAUNCHER"
# Exit status of a configuration error. There is no restart after a configuration error, because it would fail with the
# same error.
_REFUSED = 2
# Exit statuses of a run that a signal (SIGHUP, SIGINT or SIGTERM) asked to end.
_ASKED = {128 + number for number in (SIGHUP, SIGINT, SIGTERM)}


def status_of(code: int) -> int:
    """Converts the return code of a process to a shell's exit status. A process that signal N killed gets 128 + N."""
    return code if code >= 0 else 128 - code


def worst(statuses: Iterable[int]) -> int:
    """Returns the exit status of a run from the statuses of its ranks. The status of a stall has priority, then that of
    a kill, then that of an error, because a stalled, killed or failed rank makes the other ranks fail too."""
    order = [0, *sorted(_ASKED), _REFUSED]

    def weight(status: int) -> tuple[int, int]:
        if status in order:
            return order.index(status), 0
        return len(order) + (2 if status == STALLED else 1 if status > 128 else 0), status

    return max(statuses, key=weight)


def with_restarts(start: Callable[[int], int], restarts: int) -> int:
    """Calls `start` with the attempt number (0 first) until an attempt needs no restart. Returns the exit status of the
    last attempt."""
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
