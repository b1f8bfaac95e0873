"""How long the rest will take, judged by the latest steps."""

from __future__ import annotations

import time
from collections import deque


class Pace:
    """Told each time more is done, says how many seconds are left."""

    def __init__(self, total: int | None, done: int = 0):
        self.total, self.done = total, done
        self.began = time.monotonic()
        self._ticks: deque[tuple[float, int]] = deque([(self.began, done)], maxlen=50)

    def reach(self, done: int) -> None:
        # The first step warms everything up and would spoil the guess: forget it as soon as there is something better.
        if len(self._ticks) == 2 and self._ticks[0][0] == self.began:
            self._ticks.popleft()
        now = time.monotonic()
        # Ticks that follow quickly become one, so that the guess always looks back over half a minute or 50 steps.
        if len(self._ticks) > 1 and now - self._ticks[-2][0] < 0.5:
            self._ticks.pop()
        self._ticks.append((now, done))
        self.done = done

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Seconds to go, counting down between steps; None while nothing is known."""
        (first_time, first), (last_time, last) = self._ticks[0], self._ticks[-1]
        if self.total is None or last == first:
            return None
        guess = (last_time - first_time) / (last - first) * (self.total - last)
        return max(guess - (time.monotonic() - last_time), 0.0)
