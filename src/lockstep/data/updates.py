"""The rows of one optimizer step: all rows in order, and the micro-batches of this rank.

Shape letters: S is the number of sequences of all rows, in row order. K is the number of target tokens of all
sequences, in sequence order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from lockstep.data.array_store import Joined, Store
from lockstep.data.batching import micro_batch, packed_tokens, plan_micro_batches, shared_beginnings, target_starts
from lockstep.parallel.context_split import Division
from lockstep.parallel.world import World
from lockstep.types import Example, Item, MicroBatch

T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Update(Generic[T]):
    """The rows of an update (optimizer step). Every rank holds all rows, so counts are global. Only `batches` differs
    per rank."""

    items: Sequence[T]
    examples: Sequence[Example]
    batches: list[MicroBatch]
    local_only = False

    @property
    def targets(self) -> int:
        return len(self.sequence_K)

    @cached_property
    def lengths_S(self) -> torch.Tensor:
        """Number of target tokens of each sequence."""
        return torch.tensor([example.targets for example in self.examples])

    @cached_property
    def sequence_K(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.examples)), self.lengths_S)

    @cached_property
    def item_S(self) -> torch.Tensor:
        """Row index of each sequence."""
        counts = torch.tensor([len(item.examples) for item in self.items])
        return torch.repeat_interleave(torch.arange(len(self.items)), counts)

    def sequences_of(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sequence indices of a micro-batch. Also returns, for each target token, the position (0, 1, ...)
        of its sequence in the micro-batch."""
        return torch.unique_consecutive(self.sequence_K[batch.index_K], return_inverse=True)


def arrange(items: Sequence[T], world: World, *, tokens: int | None, rows: int | None, pad_id: int) -> Update[T]:
    """Packs or pads rows. The sequences of a row stay in one micro-batch. Packed sequences of a row store their common
    prefix once.

    `tokens` is the token budget of a micro-batch, summed over its context-parallel group. With context parallelism, no
    prefix is shared.
    """
    packed, context = tokens is not None, world.context
    sizes = [row_size(item, packed=packed, shared=context is None) for item in items]
    plan = plan_micro_batches(sizes, devices=world.dp_size, tokens=tokens, rows=rows)
    examples = [example for item in items for example in item.examples]
    firsts = [0, *accumulate(len(item.examples) for item in items)]
    starts = target_starts(examples)
    batches = []
    for members in plan[world.dp_rank]:
        numbers = [number for i in members for number in range(firsts[i], firsts[i + 1])]
        shares = [share for i in members for share in shared_beginnings(items[i].examples)]
        batch = micro_batch(
            [examples[number] for number in numbers],
            packed=packed,
            pad_id=pad_id,
            starts=[starts[number] for number in numbers],
            shares=shares if context is None else None,
        )
        batches.append(batch if context is None else replace(batch, context=Division(batch, context)))
    return Update(items, examples, batches)


def row_size(item: Item, *, packed: bool, shared: bool = True) -> int:
    """Returns the number of tokens of a row in a packed micro-batch. For a padded micro-batch, returns the length of
    the row's longest sequence.

    If `shared` is true, the common prefix of the row's sequences counts once.
    """
    if not packed:
        return max(len(example) for example in item.examples)
    return packed_tokens(item) if shared else sum(len(example) for example in item.examples)


def row_sizes(items: Sequence[Any], *, packed: bool, shared: bool = True) -> np.ndarray:
    """Returns the `row_size` of each item. The sizes of items in a `Store` are known without decoding the items."""
    if isinstance(items, Joined):
        sizes = [row_sizes(part, packed=packed, shared=shared) for part in items.parts]
        return np.concatenate([np.empty(0, dtype=np.int64), *sizes])
    if not isinstance(items, Store):
        return np.array([row_size(item, packed=packed, shared=shared) for item in items], dtype=np.int64)
    if packed and shared:
        return items.packed_tokens_I
    combined: np.ndarray = (np.add if packed else np.maximum).reduceat(items.lengths_E, items.firsts_I)
    return combined


def sequence_counts(items: Sequence[Any]) -> np.ndarray:
    """Returns the number of sequences of each item."""
    if isinstance(items, Joined):
        return np.concatenate([np.empty(0, dtype=np.int64), *map(sequence_counts, items.parts)])
    if isinstance(items, Store):
        return items.counts_I
    return np.array([len(item.examples) for item in items], dtype=np.int64)


def even_groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Splits items into groups of at most `size` items and nearly equal size."""
    count = max(1, -(-len(items) // size))
    bounds = [len(items) * number // count for number in range(count + 1)]
    return (items[first:last] for first, last in pairwise(bounds))
