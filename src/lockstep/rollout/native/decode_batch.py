"""The decoding batch as device tensors that keep their place between rounds; the host writes only what changed.

B sequences of a pass, R rows of a board, M blocks of a sequence's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.rollout.native.scheduler import SequenceState


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
    def of(cls, sequences: Sequence[SequenceState], width: int, device: torch.device) -> DecodeState:
        """The samples as they stand, each with a table of `width` blocks."""
        rows = [
            [sequence.tokens[-1], len(sequence.tokens) - 1, sequence.prompt, sequence.limit, *sequence.keys]
            for sequence in sequences
        ]
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence in sequences]
        numbers = _numbers(rows, device)
        return cls(
            tokens_B=numbers[:, 0].contiguous(),
            positions_B=numbers[:, 1].contiguous(),
            prompts_B=numbers[:, 2].contiguous(),
            limits_B=numbers[:, 3].contiguous(),
            keys_B2=numbers[:, 4:].to(torch.int32),
            table_BM=_numbers(tables, device),
            done_B=torch.zeros(len(sequences), dtype=torch.bool, device=device),
            logprobs_B=torch.zeros(len(sequences), device=device),
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
class Slot:
    row: int
    blocks: list[int]
    """The sample's own list: another one after it lost its place, whatever it holds."""
    written: int
    """How many of the blocks stand in the row's table."""


class DecodeBatch:
    """Who has which row. A sample keeps its row, and what a pass left there, while it runs and the row is in use."""

    def __init__(self, rows: int, width: int, spare: int, device: torch.device):
        self.rows, self.width, self.spare, self.device = rows, width, spare, device
        self.state = DecodeState.idle(rows, width, spare, device)
        self._slots: dict[SequenceState, Slot] = {}

    def idle(self, rows: int) -> DecodeState:
        return DecodeState.idle(rows, self.width, self.spare, self.device)

    def assign_slots(self, sequences: Sequence[SequenceState], within: int) -> list[int]:
        """The row of each sample, all among the first `within`; their state is on the device when this returns."""
        left = self._evict(sequences, within)
        grown = [(slot, sequence) for sequence, slot in self._slots.items() if len(sequence.blocks) > slot.written]
        self._extend_tables(grown)
        newcomers = [sequence for sequence in sequences if sequence not in self._slots]
        free = sorted(set(range(within)).difference(slot.row for slot in self._slots.values()))
        taken = free[: len(newcomers)]
        for row, sequence in zip(taken, newcomers, strict=True):
            self._slots[sequence] = Slot(row, sequence.blocks, len(sequence.blocks))
        if newcomers:
            self.state.put_(_numbers(taken, self.device), DecodeState.of(newcomers, self.width, self.device))
        empty = sorted(left.difference(taken))
        if empty:
            self.state.put_(_numbers(empty, self.device), self.idle(len(empty)))
        return [self._slots[sequence].row for sequence in sequences]

    def _evict(self, sequences: Iterable[SequenceState], within: int) -> set[int]:
        """Rows of those who are not here any more, or came back to other blocks, or sit too far behind."""
        here = set(sequences)
        leaving = [
            sequence
            for sequence, slot in self._slots.items()
            if sequence not in here or sequence.blocks is not slot.blocks or slot.row >= within
        ]
        return {self._slots.pop(sequence).row for sequence in leaving}

    def _extend_tables(self, grown: Sequence[tuple[Slot, SequenceState]]) -> None:
        places: list[int] = []
        blocks: list[int] = []
        for slot, sequence in grown:
            added = sequence.blocks[slot.written :]
            start = slot.row * self.width + slot.written
            places += range(start, start + len(added))
            blocks += added
            slot.written += len(added)
        if places:
            where, what = _numbers([places, blocks], self.device)
            self.state.table_BM.view(-1).index_copy_(0, where, what)


def _numbers(rows: list[list[int]] | list[int], device: torch.device) -> torch.Tensor:
    # numpy reads nested lists several times faster than torch, and this is done every round.
    return sent(torch.from_numpy(np.array(rows, dtype=np.int64)), device)
