"""Messages between the run and its rollout worker: first `Opening`, then weights and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.recipe import Recipe
from lockstep.rollout.worker.worker_weights import Place
from lockstep.types import Completion, Request, Sampling


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of the weight group: store port, backend and time limit."""

    port: int
    collective: str
    seconds: float


@dataclass(frozen=True)
class Opening:
    """The first message. `end_tokens` as in `Generator`; `device` is the worker's device index; both processes use the
    same number of `threads`, so that sums have the same order."""

    recipe: Recipe
    end_tokens: Sequence[int]
    weights: Sequence[Place] | Meeting
    """The weight transport: locations in shared memory, or the rendezvous of a group."""
    device: int
    threads: int


@dataclass(frozen=True)
class Ask:
    """Requests by number. Those with `first` are processed before the others."""

    requests: dict[int, Request]
    sampling: Sampling
    first: bool = False


@dataclass(frozen=True)
class HandOver:
    """Weights of `version` are in the shared memory or follow through the group. The requests of `ask` use these
    weights or later ones."""

    version: int
    ask: Ask | None


@dataclass(frozen=True)
class Probed:
    """The worker's log-probs of the weight check for `version`."""

    version: int
    logprobs: list[float]


@dataclass(frozen=True)
class Answered:
    """A finished response to request `number`."""

    number: int
    completion: Completion


@dataclass(frozen=True)
class Idle:
    """All requests are finished."""


@dataclass(frozen=True)
class Working:
    """A heartbeat while no response is finished."""


@dataclass(frozen=True)
class Failed:
    """The reason why the worker ends."""

    why: str
    remedy: str = field(default="")
    code: str = "worker-lost"
    refused: bool = True
    """True: the settings are invalid. False: an internal error that may not occur again."""
