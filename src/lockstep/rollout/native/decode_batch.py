"""The batch of decoding sequences in persistent device tensors, in which the host writes only the changes.

Suffixes of tensor names: B is the number of sequences in a forward pass, M the number of blocks in a block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.kernels.mixer_states import SPARE
from lockstep.rollout.native.cached_spans import SequenceState
from lockstep.vision.positions import position_offset


@dataclass
class DecodeState:
    """The state of a decode batch in device tensors. Forward passes update these tensors without the host."""

    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    """Position of the input token in its sequence."""
    prompts_B: torch.Tensor
    limits_B: torch.Tensor
    keys_B2: torch.Tensor
    table_BM: torch.Tensor
    done_B: torch.Tensor
    logprobs_B: torch.Tensor
    slots_B: torch.Tensor
    """Slot with the states of recurrent layers, or 0."""
    offsets_B: torch.Tensor
    """Position minus index of the generated tokens, which is not 0 after images."""

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], width: int, device: torch.device) -> DecodeState:
        """Creates the state of the sequences, with block tables of `width` blocks."""
        rows = [
            [
                sequence.tokens[-1],
                len(sequence.tokens) - 1,
                sequence.prompt,
                sequence.limit,
                *sequence.keys,
                sequence.slot,
                position_offset(sequence.images),
            ]
            for sequence in sequences
        ]
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence in sequences]
        numbers = _numbers(rows, device)
        return cls(
            tokens_B=numbers[:, 0].contiguous(),
            positions_B=numbers[:, 1].contiguous(),
            prompts_B=numbers[:, 2].contiguous(),
            limits_B=numbers[:, 3].contiguous(),
            keys_B2=numbers[:, 4:6].to(torch.int32),
            table_BM=_numbers(tables, device),
            done_B=torch.zeros(len(sequences), dtype=torch.bool, device=device),
            logprobs_B=torch.zeros(len(sequences), device=device),
            slots_B=numbers[:, 6].contiguous(),
            offsets_B=numbers[:, 7].contiguous(),
        )

    @classmethod
    def idle(cls, rows: int, width: int, block: int, device: torch.device) -> DecodeState:
        """Creates the state of idle rows: rows that are marked as done and write to the spare block of the KV cache."""
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
            slots_B=torch.full_like(zeros, SPARE),
            offsets_B=zeros.clone(),
        )

    def idle_done_(self, block: int) -> None:
        """Makes idle rows of the rows that are done. Further passes of the round then change nothing that the next turn
        of a session reads."""
        self.table_BM.masked_fill_(self.done_B[:, None], block)
        self.slots_B.masked_fill_(self.done_B, SPARE)
        for numbers in (self.positions_B, self.prompts_B, self.offsets_B):
            numbers.masked_fill_(self.done_B, 0)

    def first(self, rows: int) -> DecodeState:
        """Returns a view of the first `rows` rows."""
        return DecodeState(**{name: tensor[:rows] for name, tensor in vars(self).items()})

    def clone(self) -> DecodeState:
        return DecodeState(**{name: tensor.clone() for name, tensor in vars(self).items()})

    def copy_(self, other: DecodeState) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def put_(self, rows_K: torch.Tensor, other: DecodeState) -> None:
        """Copies the rows of `other` to the rows of this state with the indices `rows_K`."""
        for name, tensor in vars(self).items():
            tensor.index_copy_(0, rows_K, getattr(other, name))


@dataclass
class Slot:
    """The batch row that a sequence occupies."""

    row: int
    blocks: list[int]
    """The block list of the sequence; after a preemption the sequence has a new list object."""
    written: int
    """Number of blocks already written to the row's block table on the device."""


class DecodeBatch:
    """Assigns sequences to batch rows. A running sequence keeps its row and its device state if possible."""

    def __init__(self, rows: int, width: int, spare: int, device: torch.device):
        self.rows, self.width, self.spare, self.device = rows, width, spare, device
        self.state = DecodeState.idle(rows, width, spare, device)
        self._slots: dict[SequenceState, Slot] = {}

    def idle(self, rows: int) -> DecodeState:
        return DecodeState.idle(rows, self.width, self.spare, self.device)

    def assign_slots(self, sequences: Sequence[SequenceState], within: int) -> list[int]:
        """Assigns a row below `within` to each sequence and writes new state to the device; returns the rows."""
        freed = self._evict(sequences, within)
        grown = [(slot, sequence) for sequence, slot in self._slots.items() if len(sequence.blocks) > slot.written]
        self._extend_tables(grown)
        added = [sequence for sequence in sequences if sequence not in self._slots]
        free = sorted(set(range(within)).difference(slot.row for slot in self._slots.values()))
        rows = free[: len(added)]
        for row, sequence in zip(rows, added, strict=True):
            self._slots[sequence] = Slot(row, sequence.blocks, len(sequence.blocks))
        if added:
            self.state.put_(_numbers(rows, self.device), DecodeState.of(added, self.width, self.device))
        empty = sorted(freed.difference(rows))
        if empty:
            self.state.put_(_numbers(empty, self.device), self.idle(len(empty)))
        return [self._slots[sequence].row for sequence in sequences]

    def _evict(self, sequences: Iterable[SequenceState], within: int) -> set[int]:
        """Frees and returns the rows of sequences that have left the batch, have a new block list, or have a row index
        of at least `within`."""
        current = set(sequences)
        evicted = [
            sequence
            for sequence, slot in self._slots.items()
            if sequence not in current or sequence.blocks is not slot.blocks or slot.row >= within
        ]
        return {self._slots.pop(sequence).row for sequence in evicted}

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
            indices, values = _numbers([places, blocks], self.device)
            self.state.table_BM.view(-1).index_copy_(0, indices, values)


def _numbers(rows: list[list[int]] | list[int], device: torch.device) -> torch.Tensor:
    # numpy reads nested lists several times faster than torch.
    return sent(torch.from_numpy(np.array(rows, dtype=np.int64)), device)
