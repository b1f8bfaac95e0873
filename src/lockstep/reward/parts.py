"""`RewardPart`: the interface of the components whose weighted sum is the reward."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lockstep.types import Failure, Question

PartOutcome = dict[str, float] | Failure
"""The outcome of a reward component for one response: a failure, or a dict with the score under the component's name
and further numbers to log. An empty dict means that the component does not score the response (None in TRL)."""


class StepOutcome(dict[str, float]):
    """An outcome with step scores. `steps` contains (end position of the step in the text, score of the step)."""

    def __init__(self, parts: dict[str, float], steps: Sequence[tuple[int, float]]):
        super().__init__(parts)
        self.steps = tuple(steps)


class RewardPart(ABC):
    """One component of the reward."""

    name: str
    note: str = ""
    """A note about this reward component, printed in the dry run; empty if there is none."""
    fields: tuple[str, ...] = ()
    """The fields of a row that this component reads and in which it gets the trajectory: `extra_info` or `columns`."""
    progress: tuple[int, int] | None = None
    """The pair (number of finished steps, number of steps of the run), or None outside of a training run."""

    @abstractmethod
    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        """Submits a response and returns the future of its outcome at once. The future never raises."""

    def flush(self) -> None:  # noqa: B027 - most reward components do not collect batches
        """Scores all waiting responses."""

    def close(self) -> None:  # noqa: B027 - some reward components have no resources to free
        """Frees all resources; unscored responses become failures."""


def promised() -> Future[PartOutcome]:
    """Returns a future that cannot be cancelled."""
    future: Future[PartOutcome] = Future()
    future.set_running_or_notify_cancel()
    return future


def settled(outcome: PartOutcome) -> Future[PartOutcome]:
    """Returns a finished future with this outcome."""
    future: Future[PartOutcome] = Future()
    future.set_result(outcome)
    return future


class Countdown:
    """Done-callback for `count` futures: calls `then` when the last future is done, in the thread of that future."""

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
