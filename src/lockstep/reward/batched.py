"""Rewards that a model on this device gives: responses wait until they can be run together, padded on the right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lockstep.kernels.rotary import own_positions, sequences
from lockstep.reward.parts import PartOutcome, RewardPart, promised, settled
from lockstep.types import Failure

# Tokens of one padded batch. Scores do not depend on it.
BATCH_TOKENS = 16384

T = TypeVar("T")
TokenRows = Sequence[Sequence[int]]


def in_batches(rows: TokenRows, run: Callable[[TokenRows], Sequence[T]]) -> list[T]:
    """What `run` gives for each row, in the order of the rows; rows of like length are run together."""
    found: dict[int, T] = {}
    for members in batches([len(row) for row in rows], BATCH_TOKENS):
        found.update(zip(members, run([rows[i] for i in members]), strict=True))
    return [found[i] for i in range(len(rows))]


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Rows by length, as many at once as fit when padded to the longest; a longer row goes alone."""
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if members and lengths[i] * (len(members) + 1) > tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


@contextmanager
def padded(model: Any, rows: TokenRows, padding: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """The rows as a model's inputs, for calls inside the block."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    with sequences(own_positions(model), [len(row) for row in rows], ids.shape, None, packed=False):
        yield {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class Waiting:
    """An encoded response, and where its steps end in the text."""

    ids: Sequence[int]
    ends: Sequence[int]
    future: Future[PartOutcome]


class BatchedPart(RewardPart):
    """Responses wait until `flush`, which scores them all in the caller's thread. `context`: the model's, in tokens."""

    def __init__(self, context: int | None):
        self._context = context
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []

    def outcomes(self, waiting: Sequence[Waiting]) -> Sequence[PartOutcome]:
        """What each of them earned."""
        raise NotImplementedError

    def wait(self, ids: Sequence[int], ends: Sequence[int] = ()) -> Future[PartOutcome]:
        if self._context is not None and len(ids) > self._context:
            return settled(Failure(self.name, f"{len(ids)} tokens are more than its context of {self._context}"))
        entry = Waiting(ids, ends, promised())
        with self._lock:
            self._waiting.append(entry)
        return entry.future

    def flush(self) -> None:
        waiting = self._taken()
        for entry, outcome in zip(waiting, self.outcomes(waiting), strict=True):
            entry.future.set_result(outcome)

    def close(self) -> None:
        for entry in self._taken():
            entry.future.set_result(Failure(self.name, "the run was ending before it was scored"))

    def _taken(self) -> list[Waiting]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting
