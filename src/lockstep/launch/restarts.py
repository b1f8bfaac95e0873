"""`parallel.max_restarts`: the ranks of a run started again after a failure; they go on from the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from signal import SIGHUP, SIGINT, SIGTERM

from lockstep.errors import STALLED

# Input that would be refused again.
_REFUSED = 2
# Somebody asked for the end.
_ASKED = {128 + number for number in (SIGHUP, SIGINT, SIGTERM)}


def status_of(code: int) -> int:
    """As a shell tells it: a signal as 128 and its number."""
    return code if code >= 0 else 128 - code


def worst(statuses: Iterable[int]) -> int:
    """What a run ends with whose ranks end with these: a stall, a kill and an error tell more than what follows."""
    order = [0, *sorted(_ASKED), _REFUSED]

    def weight(status: int) -> tuple[int, int]:
        if status in order:
            return order.index(status), 0
        return len(order) + (2 if status == STALLED else 1 if status > 128 else 0), status

    return max(statuses, key=weight)


def with_restarts(start: Callable[[int], int], restarts: int) -> int:
    """The exit status of the last turn; `start` is told which turn it is, from 0."""
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
