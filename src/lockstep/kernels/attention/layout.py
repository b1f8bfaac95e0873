"""The memory layout of the sequences of a micro-batch, computed once and used by the attention of every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.kernels.attention.kv_cache import KVCache
from lockstep.kernels.attention.partial_attention import Sections, sections
from lockstep.vision.spans import ImageBlock

if TYPE_CHECKING:
    from typing_extensions import Self

# Minimum length of a sequence, as a fraction of the longest sequence in its bucket. This value keeps both padding and
# the number of buckets small.
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class Bucket:
    """A group of `count` sequences of similar length, padded to `width`. The group begins at slot `start` of the
    buffer."""

    start: int
    count: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Describes sequences packed into one row, and the slot of each token when sequences are regrouped by length.

    `slots_of_tokens` maps a token of the packed row to its slot in the regrouped buffer, and `tokens_of_slots` is the
    inverse. Padding slots point at token 0, and their output is never read. `slots_of_tokens` and `tokens_of_slots` are
    None if all sequences have the same length and share no prefix, because regrouping is then a view. The two maps are
    built on first use, because varlen kernels do not need them. A prefix that several sequences share is stored once in
    the packed row (see `Sharing`).
    """

    kernel: str
    longest: int
    bounds: torch.Tensor
    ends: tuple[int, ...]
    """End of each sequence in the packed row, as host integers. Reading the ends from device memory would wait for the
    device."""
    packed_index_E: torch.Tensor | None = None
    """For each token of the expanded sequences (each with its own copy of the prefix), its index in the packed row. A
    host tensor, or None if no prefix is shared."""
    blocks: tuple[ImageBlock, ...] = ()
    """The images whose tokens attend to each other in both directions."""
    in_chunks: bool = False
    """Whether the sequences of this layout are the chunks of the sequences of another layout."""
    _chunked: dict[int, Layout] = field(default_factory=dict, compare=False, repr=False)

    def chunked(self, chunk: int) -> Layout:
        """Returns the layout of chunked attention, in which every chunk of `chunk` tokens of a sequence is a sequence
        of its own."""
        if self.longest <= chunk:
            return self
        if chunk not in self._chunked:
            ends = [
                end for first, last in pairwise((0, *self.ends)) for end in (*range(first + chunk, last, chunk), last)
            ]
            bounds = sent(torch.tensor([0, *ends], dtype=torch.int32), self.bounds.device)
            self._chunked[chunk] = Layout(self.kernel, chunk, bounds, tuple(ends), self.packed_index_E, in_chunks=True)
        return self._chunked[chunk]

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
        """Slot of each token of the expanded sequences, or None if no prefix is shared."""
        return self._regrouped.slots_E

    @cached_property
    def sharing(self) -> Sharing | None:
        if self.packed_index_E is None:
            return None
        packed_E, device = self.packed_index_E, self.bounds.device
        return Sharing(sent(packed_E, device), sent(_first_of(packed_E), device))

    @cached_property
    def cascade(self) -> Cascade | None:
        """The two parts of cascade attention. None if no prefix is shared, or if a token belongs to two shared
        prefixes. None for chunked attention, because a prefix can span several chunks."""
        return (
            None
            if self.packed_index_E is None or self.in_chunks
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
    """Index maps of a packed row with shared prefixes. E is the number of tokens of the expanded sequences, in which
    every sequence has its own copy of the prefix.

    Only attention needs the expanded sequences. Every other operator works per token, so it computes a shared token
    once.
    """

    packed_index_E: torch.Tensor
    """Index in the packed row of each token of the expanded sequences."""
    first_T: torch.Tensor
    """For each token of the packed row, the index of its first copy in the expanded sequences."""


@dataclass(frozen=True)
class Cascade:
    """Describes attention over a packed row with shared prefixes as two parts, without copying a prefix.

    In the part `own`, each sequence attends causally to its unshared tokens. The unshared tokens of the first sequence
    include the prefix. In the part `shared`, the R tokens at `rows_R`, which follow a prefix stored in another
    sequence, attend to the keys of that prefix. The keys of all prefixes are at `keys_S`, one prefix after another. No
    key occurs twice.
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
        # A packed index below the number of tokens written so far belongs to a shared prefix.
        share = int(np.searchsorted(places, written))
        length = end - start - share
        if share:
            # The tokens of neighbouring sequences with the same prefix are joined to one sequence of queries.
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
    lengths: Sequence[int],
    device: torch.device,
    kernel: str,
    packed_index_E: torch.Tensor | None = None,
    blocks: tuple[ImageBlock, ...] = (),
) -> Layout:
    """Creates the layout of sequences with the given `lengths`. `kernel` is the attention kernel (`Device.attention`).

    If prefixes are shared, `packed_index_E` has the packed-row index of each token of the expanded sequences.
    """
    ends = list(accumulate(lengths))
    bounds = sent(torch.tensor([0, *ends], dtype=torch.int32), device)
    packed_index_E = None if packed_index_E is None else packed_index_E.cpu()
    return Layout(kernel, max(lengths), bounds, tuple(ends), packed_index_E, blocks)


def _first_of(packed_index_E: torch.Tensor) -> torch.Tensor:
    count = len(packed_index_E)
    return torch.full((int(packed_index_E.max()) + 1,), count).scatter_reduce_(
        0, packed_index_E, torch.arange(count), "amin"
    )


def padded_layout(
    rows: int, width: int, device: torch.device, kernel: str, blocks: tuple[ImageBlock, ...] = ()
) -> Layout:
    """Creates the layout of a right-padded batch as a packed row of sequences of equal length. With causal attention, a
    token never sees the padding on its right."""
    return make_layout([width] * rows, device, kernel, blocks=blocks)


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
    # The index maps are zero-filled, so that padding slots are deterministic: a replay compares the inputs of
    # operators.
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
    """The tokens `start` to `stop` of a sequence that one forward pass computes, with the KV cache slots of the
    sequence."""

    first: int
    """Index of the chunk's first token in the packed row of the forward pass."""
    start: int
    stop: int
    slots: torch.Tensor
    """KV cache slots of all tokens of the sequence up to `stop`."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of several sequences in one forward pass, in the order of the packed row. `kernel` is the attention
    kernel (`Device.attention`)."""

    kernel: str
    pieces: tuple[Chunk, ...]
    slots_S: torch.Tensor
    """The KV cache slots of all pieces, one piece after the other."""

    @classmethod
    def of(
        cls, spans: Sequence[tuple[int, int]], slots: Sequence[np.ndarray], kernel: str, device: torch.device
    ) -> Self:
        """Creates the chunks `spans` (start, stop) of sequences whose tokens up to `stop` are in the given `slots`."""
        slots_S = sent(torch.from_numpy(np.concatenate(slots)), device)
        firsts = accumulate((stop - start for start, stop in spans), initial=0)
        parts = slots_S.split([stop for _, stop in spans])
        pieces = (Chunk(first, *span, part) for first, span, part in zip(firsts, spans, parts, strict=False))
        return cls(kernel, tuple(pieces), slots_S)

    @cached_property
    def sections(self) -> Sections:
        """The queries and keys of all pieces. Queries and keys of a piece are aligned at their end."""
        queries = [piece.stop - piece.start for piece in self.pieces]
        return sections(queries, [piece.stop for piece in self.pieces], True, self.slots_S.device)


@dataclass(frozen=True)
class DecodePass:
    """A decode forward pass over one new token of each of B sequences. `lengths_B` are the sequence lengths, including
    the new token."""

    cache: KVCache
    kernel: str
    slots_T: torch.Tensor
    table_BM: torch.Tensor
    lengths_B: torch.Tensor
    states: Any = None
    """The states of recurrent layers (`DecodeStates`), or None if the model has no such layers."""
    turns: Counter[int] = field(default_factory=Counter)
    """Number of attention calls so far of each module that attends several times in a pass, by `id`."""
    _masks: dict[tuple[int | None, int | None], torch.Tensor] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)

    def lengths(self) -> list[int]:
        """Returns the sequence lengths as host integers. The first layer that needs the lengths copies them from the
        device."""
        if not self._lengths:
            self._lengths.extend(self.lengths_B.tolist())
        return self._lengths

    def mask(self, window: int | None, dtype: torch.dtype, chunk: int | None = None) -> torch.Tensor:
        """Returns the attention mask for the reference implementation. The first layer with this window and chunk
        builds the mask."""
        if (window, chunk) not in self._masks:
            width = self.table_BM.shape[1] * self.cache.block
            self._masks[window, chunk] = decode_mask(self.lengths_B, width, window, dtype, chunk)
        return self._masks[window, chunk]


def decode_mask(
    lengths_B: torch.Tensor, width: int, window: int | None, dtype: torch.dtype, chunk: int | None = None
) -> torch.Tensor:
    """Returns an additive mask (B, 1, 1, width): 0 for a sequence's last `window` tokens, or for the tokens of its last
    chunk, minus infinity elsewhere.

    The mask is a float tensor, because attention would convert a boolean mask in every layer.
    """
    positions = torch.arange(width, device=lengths_B.device)
    seen = positions[None, :] < lengths_B[:, None]
    if window:
        seen &= positions[None, :] >= lengths_B[:, None] - window
    if chunk:
        seen &= positions[None, :] >= (lengths_B[:, None] - 1) // chunk * chunk
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -float("inf"))
    return mask[:, None, None, :]
