"""The order in which rows of several data sources are visited, as a pure function of (seed, epoch).

The random numbers come from splitmix64 (Steele, Lea and Flood, 2014), used as a hash. Number i of a random stream is
`mix64(key + (i + 1) * GOLDEN)`. A permutation is the argsort of the numbers of a stream. All arithmetic is integer
arithmetic modulo 2^64, so the order is the same on every platform and library version, and a resumed run needs no
generator state. GOLDEN is odd and mix64 is one-to-one, so the numbers of a stream are distinct and the sort has no
ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import overload

import numpy as np
import numpy.typing as npt

from lockstep.errors import Problem, Refusal, refuse_all

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROWS, _SOURCE, _INTERLEAVE = 1, 2, 3  # purpose of a random stream; it is part of the key, so streams are independent


class RowOrder(Sequence[tuple[int, int]]):
    """The order of rows as (source, row) index pairs, stored as two arrays to save memory."""

    def __init__(self, sources: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        self._sources = sources
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> RowOrder: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | RowOrder:
        if isinstance(index, slice):
            return RowOrder(self._sources[index], self._rows[index])
        return int(self._sources[index]), int(self._rows[index])


class Mixture:
    """Mixes data sources with `sizes` rows by `weights`, which need not sum to 1. Without weights, concatenates the
    sources.

    An epoch has as many rows as all sources together. Without weights, an epoch visits every row once. With weights,
    each source gets a number of rows in proportion to its weight, rounded by the largest remainder method. A weighted
    source continues across epochs through successive permutations of its rows, so no row repeats before all rows of its
    source were visited.

    Without `shuffle`, the rows of a source keep their order. Unweighted sources follow one another, and weighted
    sources are evenly interleaved.
    """

    def __init__(self, sizes: list[int], weights: list[float] | None, seed: int, shuffle: bool) -> None:
        _check(sizes, weights)
        self.sizes = list(sizes)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_length: int = sum(sizes)
        self.counts: list[int] | None = None if weights is None else _shares(self.epoch_length, weights)

    def order(self, epoch: int) -> RowOrder:
        """Returns the (source, row) pairs of epoch number `epoch`, counted from 0."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        if self.counts is None:
            return self._joined(epoch)
        return self._weighted(epoch, self.counts)

    def _joined(self, epoch: int) -> RowOrder:
        sources = np.repeat(np.arange(len(self.sizes)), self.sizes)
        rows = np.concatenate([np.arange(size) for size in self.sizes])
        if not self.shuffle:
            return RowOrder(sources, rows)
        visit = permutation(self.epoch_length, self.seed, _ROWS, epoch)
        return RowOrder(sources[visit], rows[visit])

    def _weighted(self, epoch: int, counts: list[int]) -> RowOrder:
        sources = np.repeat(np.arange(len(counts)), counts)
        if self.shuffle:
            sources = sources[permutation(self.epoch_length, self.seed, _INTERLEAVE, epoch)]
        else:
            # Row k of the n rows of a source gets the position (k + 1/2) / n in the epoch. The stable sort puts the
            # source with the lower number first on a tie.
            positions = np.concatenate([(2 * np.arange(count) + 1) / (2 * count) for count in counts])
            sources = sources[np.argsort(positions, kind="stable")]
        rows = np.empty(self.epoch_length, dtype=np.int64)
        for source, count in enumerate(counts):
            rows[sources == source] = self._walk(source, epoch * count, count)
        return RowOrder(sources, rows)

    def _walk(self, source: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Returns `count` rows of a source, starting at position `start` in the endless sequence of its
        permutations."""
        size = self.sizes[source]
        first, last = start // size, (start + count - 1) // size
        passes = [
            permutation(size, self.seed, _SOURCE, source, number) if self.shuffle else np.arange(size)
            for number in range(first, last + 1)
        ]
        begin = start - first * size
        return np.concatenate(passes)[begin : begin + count]


def permutation(length: int, *key: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of range(length) that depends only on `key`."""
    return np.argsort(_numbers(length, _fold(key)), kind="stable")


def _mix64(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _fold(numbers: Sequence[int]) -> int:
    """Hashes several integers to one 64-bit key. The order of the integers matters."""
    key = 0
    for number in numbers:
        key = _mix64(((key + _GOLDEN) ^ number) & _MASK)
    return key


def _numbers(length: int, key: int) -> npt.NDArray[np.uint64]:
    """Returns the first `length` numbers of splitmix64 seeded with `key`. The uint64 overflow is intended."""
    value = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _shares(total: int, weights: list[float]) -> list[int]:
    """Divides `total` in proportion to `weights` by the largest remainder method. Uses exact fractions, so that float
    rounding has no effect."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda source: (counts[source] - quotas[source], source))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    problems = [
        Problem(
            f"mixing weight of source {source}",
            f"the weight {weights[source]} of {sum(weights)} gives the source no row in an epoch of {total} rows",
            f"raise the weight to {float((sum(exact) - exact[source]) / (total - 1)):.4g} or more, or drop the source",
            code="too-few-rows",
        )
        for source, count in enumerate(counts)
        if count == 0
    ]
    refuse_all(problems)
    return counts


def _check(sizes: list[int], weights: list[float] | None) -> None:
    if not sizes:
        raise Refusal.at("sources", "there is none", code="no-rows")
    problems = [
        Problem(f"source {source}", "has no rows", code="no-rows") for source, size in enumerate(sizes) if size < 1
    ]
    if weights is not None and len(weights) != len(sizes):
        problems.append(
            Problem(
                "mixing weights", f"{len(weights)} for {len(sizes)} sources", "give each source one", code="wrong-count"
            )
        )
    for source, weight in enumerate(weights or []):
        if not (weight > 0 and math.isfinite(weight)):
            problems.append(
                Problem(f"mixing weight of source {source}", f"{weight} is not a positive number", code="out-of-range")
            )
    refuse_all(problems)
