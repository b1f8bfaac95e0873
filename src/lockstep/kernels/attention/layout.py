"""The memory layout of the sequences of a micro-batch, computed once and used by the attention of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.kernels.attention.partial_attention import Sections, sections

# Minimum length of a sequence as a fraction of the longest in its bucket; it keeps padding and bucket count small.
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to `width`, that start at `start` in the regrouped buffer."""

    start: int
    count: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Sequences packed into one row, and the slot of each token when sequences are regrouped by length.

    `slots_of_tokens` maps a token of the packed row to its slot in the regrouped buffer, and `tokens_of_slots` is the
    inverse. Padding slots point at token 0, and their output is never read. Both maps are None if all sequences have
    the same length; regrouping is then a view. They are built on first use, because varlen kernels do not need them.

    A prefix that sequences share is stored once in the packed row: see `Sharing`.
    """

    kernel: str
    longest: int
    bounds: torch.Tensor
    ends: tuple[int, ...]
    """End of each sequence, as host integers, for kernels that need them; reading them from the device would sync."""
    packed_index_E: torch.Tensor | None = None
    """Packed index of each token of the expanded sequences, on the host; None without shared prefixes."""

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
        """Slot of each token of the expanded sequences; None without shared prefixes."""
        return self._regrouped.slots_E

    @cached_property
    def sharing(self) -> Sharing | None:
        if self.packed_index_E is None:
            return None
        packed_E, device = self.packed_index_E, self.bounds.device
        return Sharing(sent(packed_E, device), sent(_first_of(packed_E), device))

    @cached_property
    def cascade(self) -> Cascade | None:
        """The two parts of cascade attention; None without shared prefixes, or if a token is shared twice."""
        return (
            None
            if self.packed_index_E is None
            else _cascade(self.packed_index_E.numpy(), self.ends, self.bounds.device)
        )

    @cached_property
    def _regrouped(self) -> _Regrouped:
        starts = (0, *self.ends[:-1])
        lengths = [end - start for start, end in zip(starts, self.ends, strict=True)]
        if len(set(lengths)) == 1 and self.packed_index_E is None:
            return _Regrouped((Bucket(0, len(lengths), lengths[0]),), None, None, None)
        buckets, slots, tokens = _regroup(lengths, (0, *self.ends))
        device, slots_E = self.bounds.device, None
        if self.packed_index_E is not None:
            slots_E = sent(slots, device)
            slots, tokens = slots[_first_of(self.packed_index_E)], self.packed_index_E[tokens]
        return _Regrouped(buckets, sent(slots, device), sent(tokens, device), slots_E)


@dataclass(frozen=True)
class _Regrouped:
    buckets: tuple[Bucket, ...]
    slots_of_tokens: torch.Tensor | None
    tokens_of_slots: torch.Tensor | None
    slots_E: torch.Tensor | None


@dataclass(frozen=True)
class Sharing:
    """Index maps of a packed row with shared prefixes. E counts the tokens of the expanded sequences.

    Only attention needs the expanded sequences. Every other operator works per token and runs once per shared token.
    """

    packed_index_E: torch.Tensor
    """Packed index of each token of the expanded sequences."""
    first_T: torch.Tensor
    """The first expanded token that belongs to each packed index."""


@dataclass(frozen=True)
class Cascade:
    """Describes attention over a packed row with shared prefixes as two parts, without copying a prefix.

    `own`: each sequence attends causally to its unshared tokens (the first sequence also to the prefix).
    `shared`: the R tokens at `rows_R`, which follow another sequence's prefix, attend to the keys of that prefix. These
    keys are at `keys_S`, one prefix after another. No key occurs twice.
    """

    own: Sections
    shared: Sections
    rows_R: torch.Tensor
    keys_S: torch.Tensor


def _cascade(packed_index_E: np.ndarray, ends: Sequence[int], device: torch.device) -> Cascade | None:
    own: list[int] = []
    queries: list[int] = []
    shares: list[int] = []
    written = 0
    rows: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    last: tuple[int, int] | None = None
    for start, end in pairwise((0, *ends)):
        places = packed_index_E[start:end]
        # An index below the write position belongs to a shared prefix.
        share = int(np.searchsorted(places, written))
        length = end - start - share
        if share:
            # Neighbouring sequences with the same prefix form one sequence of queries.
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
    every = np.concatenate(keys) if keys else np.empty(0, dtype=packed_index_E.dtype)
    if not keys or len(np.unique(every)) < len(every):
        return None
    return Cascade(
        sections(own, own, True, device),
        sections(queries, shares, False, device),
        sent(torch.from_numpy(np.concatenate(rows)), device),
        sent(torch.from_numpy(every), device),
    )


def make_layout(
    lengths: Sequence[int], device: torch.device, kernel: str, packed_index_E: torch.Tensor | None = None
) -> Layout:
    """Creates the layout of sequences of `lengths` for the attention `kernel` (the `attention` of a device).

    `packed_index_E` has the packed index of each token of the expanded sequences, if prefixes are shared.
    """
    ends = list(accumulate(lengths))
    bounds = sent(torch.tensor([0, *ends], dtype=torch.int32), device)
    return Layout(kernel, max(lengths), bounds, tuple(ends), None if packed_index_E is None else packed_index_E.cpu())


def _first_of(packed_index_E: torch.Tensor) -> torch.Tensor:
    count = len(packed_index_E)
    return torch.full((int(packed_index_E.max()) + 1,), count).scatter_reduce_(
        0, packed_index_E, torch.arange(count), "amin"
    )


def padded_layout(rows: int, width: int, device: torch.device, kernel: str) -> Layout:
    """Creates the layout of a right-padded batch as a packed row of equal lengths. Causal attention of a token never
    sees the padding on its right."""
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
    # The buffer is zero-filled, because a replay compares the inputs of operators.
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
    """A span of a sequence, tokens `start` to `stop`, that one forward pass computes, with its cache slots."""

    first: int
    """Index of the chunk's first token in the packed row of the forward pass."""
    start: int
    stop: int
    slots: torch.Tensor
    """Slots of all the sequence's tokens up to `stop`."""


@dataclass(frozen=True)
class DecodePass:
    """A forward pass over one new token of each of B sequences; `lengths_B` includes that token."""

    cache: KVCache
    kernel: str
    slots_T: torch.Tensor
    table_BM: torch.Tensor
    lengths_B: torch.Tensor
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)

    def lengths(self) -> list[int]:
        """The lengths as host integers; the first layer that needs them copies them from the device."""
        if not self._lengths:
            self._lengths.extend(self.lengths_B.tolist())
        return self._lengths

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Returns the mask for the reference implementation; the first layer with this window builds it."""
        if window not in self._masks:
            width = self.table_BM.shape[1] * self.cache.block
            self._masks[window] = decode_mask(self.lengths_B, width, window, dtype)
        return self._masks[window]


class KVCache:
    """Keys and values of every layer, indexed by slot. `spare` is a block that no sequence uses."""

    def __init__(self, layers: int, blocks: int, block: int, heads: int, size: int, like: torch.Tensor):
        self.blocks, self.block, self.spare = blocks, block, blocks
        shape = (2, layers, (blocks + 1) * block, heads, size)
        # The cache is zero-filled, because a masked slot is multiplied by 0, and 0 * inf would be NaN.
        self.slots = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots[0, index], self.slots[1, index]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, given as (from, to) pairs, in every layer."""
        # The indices are copied without a sync, because the device may be one round behind.
        source, target = (sent(torch.tensor(side), self.slots.device) for side in zip(*pairs, strict=True))
        blocks = self.slots.unflatten(2, (self.blocks + 1, self.block))
        blocks[:, :, target] = blocks[:, :, source]


def decode_mask(lengths_B: torch.Tensor, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns an additive mask (B, 1, 1, width): 0 for a sequence's last `window` tokens, minus infinity elsewhere.

    It is a float mask, because attention would convert a boolean mask in every layer.
    """
    positions = torch.arange(width, device=lengths_B.device)
    seen = positions[None, :] < lengths_B[:, None]
    if window:
        seen &= positions[None, :] >= lengths_B[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -float("inf"))
    return mask[:, None, None, :]
