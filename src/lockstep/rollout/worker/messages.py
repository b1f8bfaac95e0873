"""What the run and its rollout worker say to each other, in this order: `Opening`, then weights and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.recipe import Recipe
from lockstep.rollout.worker.worker_weights import Place
from lockstep.types import Completion, Request, Sampling


@dataclass(frozen=True)
class Meeting:
    """The port of the store, the collective by name, and the seconds that one side waits for the other."""

    port: int
    collective: str
    seconds: float


@dataclass(frozen=True)
class Opening:
    """`end_tokens` as in `Generator`; `device` is the number of the worker's; `threads` so that both processes add up
    in the same order."""

    recipe: Recipe
    end_tokens: Sequence[int]
    weights: Sequence[Place] | Meeting
    """How they come: where they lie in the memory that was handed over, or where the group meets that sends them."""
    device: int
    threads: int


@dataclass(frozen=True)
class Ask:
    """Requests by their number. Those that the run waits for come `first`, the others in the order they were asked."""

    requests: dict[int, Request]
    sampling: Sampling
    first: bool = False


@dataclass(frozen=True)
class HandOver:
    """The weights of `version` are in the memory, or come now through the group. The requests of `ask` are not begun
    with any before."""

    version: int
    ask: Ask | None


@dataclass(frozen=True)
class Probed:
    """The worker's log-probs of the probe, with the weights that it took for those of `version`."""

    version: int
    logprobs: list[float]


@dataclass(frozen=True)
class Answered:
    """A finished response to request `number`."""

    number: int
    completion: Completion


@dataclass(frozen=True)
class Idle:
    """Everything that was asked is answered."""


@dataclass(frozen=True)
class Working:
    """A word now and then while no response is finished."""


@dataclass(frozen=True)
class Failed:
    """Why the worker ends."""

    why: str
    remedy: str = field(default="")
    refused: bool = True
    """What it was given cannot be worked with; False where something of its own went wrong, which may not again."""
