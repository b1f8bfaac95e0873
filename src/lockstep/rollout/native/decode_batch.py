"""The decoding batch as device tensors that keep their place between rounds; the host writes only what changed.

B sequences of a pass, R rows of a board, M blocks of a sequence's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.rollout.native.scheduler import Sample


@dataclass
class DecodeState:
    """A decoding batch in device tensors: a pass reads and writes them, and the host need not look in between."""

    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    """Place of the token that is fed, in its sequence."""
    prompts_B: torch.Tensor
    limits_B: torch.Tensor
    keys_B2: torch.Tensor
    table_BM: torch.Tensor
    done_B: torch.Tensor
    logprobs_B: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], width: int, device: torch.device) -> DecodeState:
        """The samples as they stand, each with a table of `width` blocks."""
        rows = [
            [sample.tokens[-1], len(sample.tokens) - 1, sample.prompt, sample.limit, *sample.keys] for sample in samples
        ]
        tables = [sample.blocks + [0] * (width - len(sample.blocks)) for sample in samples]
        numbers = _numbers(rows, device)
        return cls(
            tokens_B=numbers[:, 0].contiguous(),
            positions_B=numbers[:, 1].contiguous(),
            prompts_B=numbers[:, 2].contiguous(),
            limits_B=numbers[:, 3].contiguous(),
            keys_B2=numbers[:, 4:].to(torch.int32),
            table_BM=_numbers(tables, device),
            done_B=torch.zeros(len(samples), dtype=torch.bool, device=device),
            logprobs_B=torch.zeros(len(samples), device=device),
        )

    @classmethod
    def idle(cls, rows: int, width: int, block: int, device: torch.device) -> DecodeState:
        """Rows of nobody: they are done before they begin, and write to a block of nobody."""
        zeros = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(
            tokens_B=zeros.clone(),
            positions_B=zeros.clone(),
            prompts_B=zeros.clone(),
            limits_B=zeros.clone(),
            keys_B2=torch.zeros(rows, 2, dtype=torch.int32, device=device),
            table_BM=torch.full((rows, width), block, dtype=torch.long, device=device),
            done_B=torch.ones(rows, dtype=torch.bool, device=device),
            logprobs_B=torch.zeros(rows, device=device),
        )

    def first(self, rows: int) -> DecodeState:
        """The first rows, on the same memory."""
        return DecodeState(**{name: tensor[:rows] for name, tensor in vars(self).items()})

    def clone(self) -> DecodeState:
        return DecodeState(**{name: tensor.clone() for name, tensor in vars(self).items()})

    def copy_(self, other: DecodeState) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def put_(self, rows_K: torch.Tensor, other: DecodeState) -> None:
        """Replace some rows by those of another state."""
        for name, tensor in vars(self).items():
            tensor.index_copy_(0, rows_K, getattr(other, name))


@dataclass
class Seat:
    row: int
    blocks: list[int]
    """The sample's own list: another one after it lost its place, whatever it holds."""
    written: int
    """How many of the blocks stand in the row's table."""


class DecodeBoard:
    """Who has which row. A sample keeps its row, and what a pass left there, while it runs and the row is in use."""

    def __init__(self, rows: int, width: int, spare: int, device: torch.device):
        self.rows, self.width, self.spare, self.device = rows, width, spare, device
        self.state = DecodeState.idle(rows, width, spare, device)
        self._seats: dict[Sample, Seat] = {}

    def idle(self, rows: int) -> DecodeState:
        return DecodeState.idle(rows, self.width, self.spare, self.device)

    def seat(self, samples: Sequence[Sample], within: int) -> list[int]:
        """The row of each sample, all among the first `within`; their state is on the device when this returns."""
        left = self._leave(samples, within)
        grown = [(seat, sample) for sample, seat in self._seats.items() if len(sample.blocks) > seat.written]
        self._extend_tables(grown)
        newcomers = [sample for sample in samples if sample not in self._seats]
        free = sorted(set(range(within)).difference(seat.row for seat in self._seats.values()))
        taken = free[: len(newcomers)]
        for row, sample in zip(taken, newcomers, strict=True):
            self._seats[sample] = Seat(row, sample.blocks, len(sample.blocks))
        if newcomers:
            self.state.put_(_numbers(taken, self.device), DecodeState.of(newcomers, self.width, self.device))
        empty = sorted(left.difference(taken))
        if empty:
            self.state.put_(_numbers(empty, self.device), self.idle(len(empty)))
        return [self._seats[sample].row for sample in samples]

    def _leave(self, samples: Iterable[Sample], within: int) -> set[int]:
        """Rows of those who are not here any more, or came back to other blocks, or sit too far behind."""
        here = set(samples)
        leaving = [
            sample
            for sample, seat in self._seats.items()
            if sample not in here or sample.blocks is not seat.blocks or seat.row >= within
        ]
        return {self._seats.pop(sample).row for sample in leaving}

    def _extend_tables(self, grown: Sequence[tuple[Seat, Sample]]) -> None:
        places: list[int] = []
        blocks: list[int] = []
        for seat, sample in grown:
            added = sample.blocks[seat.written :]
            start = seat.row * self.width + seat.written
            places += range(start, start + len(added))
            blocks += added
            seat.written += len(added)
        if places:
            where, what = _numbers([places, blocks], self.device)
            self.state.table_BM.view(-1).index_copy_(0, where, what)


def _numbers(rows: list[list[int]] | list[int], device: torch.device) -> torch.Tensor:
    # numpy reads nested lists several times faster than torch, and this is done every round.
    return sent(torch.from_numpy(np.array(rows, dtype=np.int64)), device)
