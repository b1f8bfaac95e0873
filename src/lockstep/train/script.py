"""Where the steps of a run come from. Here: from the run itself, as it happens.

A replay (`parity/`) is the same loop with another script, which puts recorded parts in the place of new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.reward.scorer import Scorer
from lockstep.train.session import Session
from lockstep.train.take import Taken


class Script:
    keeps = True
    """Whether the run leaves checkpoints and a model behind, and validates."""

    def steps(self, first: int, total: int) -> Iterable[int]:
        """The steps to make, counted from 0."""
        return range(first, total)

    def restore(self, session: Session, step: int) -> None:
        """Before a step: put weights where they must be."""

    def after(self, session: Session, step: int) -> None:
        """When a step is done, logged and saved."""
        session.tape.leave(step + 1)

    def items(self, step: int, live: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Offline: the rows of an update."""
        return live()

    def taken(self, step: int, session: Session, scorer: Scorer, live: Callable[[], Taken]) -> Taken:
        """Online: the responses of a step."""
        taken = live()
        experience = taken.experience
        session.tape.rollouts(experience.rollouts, experience.scores_S, experience.baseline_S)
        return taken
