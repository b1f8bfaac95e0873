"""The parts that a reward is made of share one face."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lockstep.types import Failure, Question

PartOutcome = dict[str, float] | Failure
"""What a part gave for one response: its score under its own name, with further numbers to log; or no score."""


class StepOutcome(dict[str, float]):
    """An outcome whose score was earned step by step: (end of the step in the text, its share)."""

    def __init__(self, parts: dict[str, float], steps: Sequence[tuple[int, float]]):
        super().__init__(parts)
        self.steps = tuple(steps)


class RewardPart(ABC):
    """One of the rewards that are added up."""

    name: str
    note: str = ""
    """What the user should know of how it runs."""

    @abstractmethod
    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        """Returns at once. The future never raises."""

    def flush(self) -> None:  # noqa: B027 - most parts make nothing wait
        """Send or score everything that waits for company."""

    def close(self) -> None:  # noqa: B027 - some parts hold nothing
        """Give back what the part holds; what was not scored becomes a failure."""


def promised() -> Future[PartOutcome]:
    """A future that cannot be cancelled: whoever made the promise keeps it."""
    future: Future[PartOutcome] = Future()
    future.set_running_or_notify_cancel()
    return future


def settled(outcome: PartOutcome) -> Future[PartOutcome]:
    """A future that is over already."""
    future: Future[PartOutcome] = Future()
    future.set_result(outcome)
    return future


class Countdown:
    """Calls `then` in the thread that finishes last."""

    def __init__(self, count: int, then: Callable[[], None]):
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self, _: Future[PartOutcome]) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()
