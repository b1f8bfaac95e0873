"""How a rollout worker pauses conversations: turns that are under way continue with newer weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.types import Request

# While trajectories wait for their environments, a pause is noticed after this many seconds.
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Pausing:
    """What the worker does when it pauses. The engine for the turns must pause by the same `wanted`."""

    wanted: Callable[[], bool]
    """Returns whether the turns shall pause."""
    between: Callable[[], Sequence[tuple[Request, bool]]]
    """Called when no turn is being generated: loads newer weights, and returns more requests. A request with True
    starts before those that wait."""
    version: Callable[[], int]
    """Returns the version of the weights."""
