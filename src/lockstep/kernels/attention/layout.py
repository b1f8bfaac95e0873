"""How the sequences of a micro-batch lie in memory, computed once and used by every layer's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.kernels.attention.parts import Sections, sections

# A bucket holds sequences down to this share of its longest one: padding stays small, buckets stay few.
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to `width` in the regrouped buffer from `start` on."""

    start: int
    count: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Sequences packed along one line, and where each token goes when they are regrouped by length.

    `slots_of_tokens` maps a token of the line to its slot in the regrouped buffer, `tokens_of_slots` the other way;
    padding slots point at token 0 and nobody reads what comes out of them. Both are None when the line is already
    a grid (all sequences of one length), so that regrouping is a view. They are made when somebody asks: kernels for
    whole lines do without.

    Where sequences share their beginning, it stands on the line once: see `Sharing`.
    """

    kernel: str
    longest: int
    bounds: torch.Tensor
    ends: tuple[int, ...]
    """Where each sequence ends, as host numbers: some kernels want them so, and nobody should ask the device."""
    line_E: torch.Tensor | None = None
    """On the host: where the tokens of the whole sequences stand on a line that shares beginnings."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._regrouped.buckets

    @property
    def slots_of_tokens(self) -> torch.Tensor | None:
        return self._regrouped.slots_of_tokens

    @property
    def tokens_of_slots(self) -> torch.Tensor | None:
        return self._regrouped.tokens_of_slots

    @property
    def slots_E(self) -> torch.Tensor | None:
        """The slot of each token of whole sequences that share beginnings; None where none do."""
        return self._regrouped.slots_E

    @cached_property
    def sharing(self) -> Sharing | None:
        if self.line_E is None:
            return None
        line, device = self.line_E, self.bounds.device
        return Sharing(sent(line, device), sent(_first_of(line), device))

    @cached_property
    def cascade(self) -> Cascade | None:
        """Attention on the line in two parts; None where nothing is shared, or where a token is shared twice over."""
        return None if self.line_E is None else _cascade(self.line_E.numpy(), self.ends, self.bounds.device)

    @cached_property
    def _regrouped(self) -> _Regrouped:
        starts = (0, *self.ends[:-1])
        lengths = [end - start for start, end in zip(starts, self.ends, strict=True)]
        if len(set(lengths)) == 1 and self.line_E is None:
            return _Regrouped((Bucket(0, len(lengths), lengths[0]),), None, None, None)
        buckets, slots, tokens = _regroup(lengths, (0, *self.ends))
        device, slots_E = self.bounds.device, None
        if self.line_E is not None:
            slots_E = sent(slots, device)
            slots, tokens = slots[_first_of(self.line_E)], self.line_E[tokens]
        return _Regrouped(buckets, sent(slots, device), sent(tokens, device), slots_E)


@dataclass(frozen=True)
class _Regrouped:
    buckets: tuple[Bucket, ...]
    slots_of_tokens: torch.Tensor | None
    tokens_of_slots: torch.Tensor | None
    slots_E: torch.Tensor | None


@dataclass(frozen=True)
class Sharing:
    """For a line whose sequences share beginnings. E counts the tokens of the whole sequences, one after another.

    Attention alone needs them whole; everything else in a layer looks at one token and runs once for a shared one.
    """

    line_E: torch.Tensor
    """The position on the line of each token of the whole sequences."""
    first_T: torch.Tensor
    """The first of the whole sequences' tokens that a position of the line stands for."""


@dataclass(frozen=True)
class Cascade:
    """A line whose sequences share beginnings, as two attentions without a copy of a sequence.

    `own`: each sequence causally on what stands on the line for itself alone (of the first one, the beginning too).
    `shared`: the R tokens that follow a beginning of another sequence, at `rows_R`, on that beginning, whose keys, one
    beginning after another, are at `keys_S`. No key is named twice.
    """

    own: Sections
    shared: Sections
    rows_R: torch.Tensor
    keys_S: torch.Tensor


def _cascade(line_E: np.ndarray, ends: Sequence[int], device: torch.device) -> Cascade | None:
    own: list[int] = []
    queries: list[int] = []
    shares: list[int] = []
    written = 0
    rows: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    last: tuple[int, int] | None = None
    for start, end in pairwise((0, *ends)):
        places = line_E[start:end]
        # What stands on the line already is behind what is written so far.
        share = int(np.searchsorted(places, written))
        length = end - start - share
        if share:
            # Neighbours that follow the same beginning are one sequence of queries.
            if last == (places[0], share):
                queries[-1] += length
            else:
                queries.append(length)
                shares.append(share)
                keys.append(places[:share])
            rows.append(places[share:])
            last = (int(places[0]), share)
        own.append(length)
        written += length
    every = np.concatenate(keys) if keys else np.empty(0, dtype=line_E.dtype)
    if not keys or len(np.unique(every)) < len(every):
        return None
    return Cascade(
        sections(own, own, True, device),
        sections(queries, shares, False, device),
        sent(torch.from_numpy(np.concatenate(rows)), device),
        sent(torch.from_numpy(every), device),
    )


def make_layout(
    lengths: Sequence[int], device: torch.device, kernel: str, line_E: torch.Tensor | None = None
) -> Layout:
    """Lay sequences of `lengths` out for the attention named `kernel` (a device's `attention`).

    `line_E` says where the tokens of the whole sequences stand on a line that shares beginnings.
    """
    ends = list(accumulate(lengths))
    bounds = sent(torch.tensor([0, *ends], dtype=torch.int32), device)
    return Layout(kernel, max(lengths), bounds, tuple(ends), None if line_E is None else line_E.cpu())


def _first_of(line_E: torch.Tensor) -> torch.Tensor:
    count = len(line_E)
    return torch.full((int(line_E.max()) + 1,), count).scatter_reduce_(0, line_E, torch.arange(count), "amin")


def padded_layout(rows: int, width: int, device: torch.device, kernel: str) -> Layout:
    """Right-padded rows are a packed line of equal lengths: causal attention never looks right, at the padding."""
    return make_layout([width] * rows, device, kernel)


def _regroup(lengths: Sequence[int], ends: Sequence[int]) -> tuple[tuple[Bucket, ...], torch.Tensor, torch.Tensor]:
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for sequence in longest_first:
        if groups and lengths[sequence] >= BUCKET_SHARE * lengths[groups[-1][0]]:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    buckets = []
    start = 0
    for group in groups:
        buckets.append(Bucket(start, len(group), lengths[group[0]]))
        start += len(group) * lengths[group[0]]
    # Zeros, not whatever was there: a replay compares what operators are given.
    slots_of_tokens = torch.zeros(ends[-1], dtype=torch.long)
    tokens_of_slots = torch.zeros(start, dtype=torch.long)
    for bucket, group in zip(buckets, groups, strict=True):
        for index, sequence in enumerate(group):
            first_slot = bucket.start + index * bucket.width
            slots = torch.arange(first_slot, first_slot + lengths[sequence])
            tokens = torch.arange(ends[sequence], ends[sequence + 1])
            slots_of_tokens[tokens] = slots
            tokens_of_slots[slots] = tokens
    return tuple(buckets), slots_of_tokens, tokens_of_slots


@dataclass(frozen=True)
class Chunk:
    """A stretch of a sequence that is computed in one pass: tokens at `start` to `stop`, whose slots are known."""

    first: int
    """Place of its first token in the line of the pass."""
    start: int
    stop: int
    slots: torch.Tensor
    """Slots of all the sequence's tokens up to `stop`."""


@dataclass(frozen=True)
class DecodePass:
    """One new token of each of B sequences; `lengths_B` counts it."""

    cache: KVCache
    kernel: str
    slots_T: torch.Tensor
    table_BM: torch.Tensor
    lengths_B: torch.Tensor
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)

    def lengths(self) -> list[int]:
        """As host numbers, asked of the device by the first layer that wants them."""
        if not self._lengths:
            self._lengths.extend(self.lengths_B.tolist())
        return self._lengths

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The twin's mask, made by the first layer that looks through this window."""
        if window not in self._masks:
            width = self.table_BM.shape[1] * self.cache.block
            self._masks[window] = decode_mask(self.lengths_B, width, window, dtype)
        return self._masks[window]


class KVCache:
    """Keys and values of every layer by slot. `spare` is a block beyond those that sequences take."""

    def __init__(self, layers: int, blocks: int, block: int, heads: int, size: int, like: torch.Tensor):
        self.blocks, self.block, self.spare = blocks, block, blocks
        shape = (2, layers, (blocks + 1) * block, heads, size)
        # Zeros, not whatever was there: a masked slot is multiplied by 0, and 0 times infinity is not 0.
        self.slots = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots[0, index], self.slots[1, index]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer."""
        # Sent without waiting: the device may be a round behind.
        source, target = (sent(torch.tensor(side), self.slots.device) for side in zip(*pairs, strict=True))
        blocks = self.slots.unflatten(2, (self.blocks + 1, self.block))
        blocks[:, :, target] = blocks[:, :, source]


def decode_mask(lengths_B: torch.Tensor, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores (B, 1, 1, width): 0 for a sequence's last `window` tokens, minus infinity else.

    Numbers, not booleans, which attention would turn into numbers in every layer again.
    """
    positions = torch.arange(width, device=lengths_B.device)
    seen = positions[None, :] < lengths_B[:, None]
    if window:
        seen &= positions[None, :] >= lengths_B[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -float("inf"))
    return mask[:, None, None, :]
