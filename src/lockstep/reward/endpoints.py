"""The endpoints of the part `remote`, each behind a circuit breaker.

An endpoint that keeps failing is left out for a while, so that a dead one does not cost every batch its time limit.
The last one in use is left out only by a batch that has spent all its tries. After a pause one batch may try again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

# Failures in a row after which an endpoint is left out, and for how many seconds.
FAILURES = 3
LEFT_OUT = 30.0


@dataclass
class Endpoint:
    """One address and how it fared. `again_at`: when a batch that is left out may try it; None while it is in use."""

    address: str
    failures: int = 0
    why: str = ""
    again_at: float | None = None


class Endpoints:
    """Hands out endpoints in turn. Safe to use from several threads."""

    def __init__(self, addresses: list[str], *, left_out: float = LEFT_OUT):
        self._endpoints = [Endpoint(address) for address in addresses]
        self._left_out = left_out
        self._turn = 0
        self._lock = threading.Lock()

    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self._endpoints]

    def choose(self) -> Endpoint | None:
        """The next endpoint in use, or one whose pause is over; None where all are left out."""
        with self._lock:
            now = time.monotonic()
            order = self._endpoints[self._turn :] + self._endpoints[: self._turn]
            due = next((e for e in order if e.again_at is not None and e.again_at <= now), None)
            chosen = due or next((e for e in order if e.again_at is None), None)
            if chosen is None:
                return None
            if due is not None:
                # One batch tries it; the others wait for what comes of that.
                due.again_at = now + self._left_out
            self._turn = (self._endpoints.index(chosen) + 1) % len(self._endpoints)
            return chosen

    def answered(self, endpoint: Endpoint) -> None:
        with self._lock:
            endpoint.failures, endpoint.why, endpoint.again_at = 0, "", None

    def failed(self, endpoint: Endpoint, why: str, *, last_try: bool) -> None:
        """Count a failure. `last_try`: the batch has no further one."""
        with self._lock:
            endpoint.failures += 1
            endpoint.why = why
            others = any(e.again_at is None for e in self._endpoints if e is not endpoint)
            if endpoint.again_at is not None or (endpoint.failures >= FAILURES and (last_try or others)):
                endpoint.again_at = time.monotonic() + self._left_out

    def left(self) -> str:
        """How many are in use, in words."""
        with self._lock:
            used = sum(e.again_at is None for e in self._endpoints)
            return f"{used} of {len(self._endpoints)} endpoints left"

    def none_left(self) -> str:
        """Why there is no endpoint to try."""
        with self._lock:
            told = [f"{e.address} failed {e.failures} times in a row: {e.why}" for e in self._endpoints]
            return f"0 of {len(told)} endpoints left; " + "; ".join(told)
