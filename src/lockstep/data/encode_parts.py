"""Encodes the rows of a source in parts: in this process, in worker processes, or from the cache.

Each row is encoded independently, so parts can be made in any order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lockstep.data.array_store import Store, stored
from lockstep.data.encode.encoding import OverLimit
from lockstep.data.parallel import in_processes, processes_here
from lockstep.data.row_cache import PART_ROWS, RowCache
from lockstep.data.row_reader import RowCounts, RowReader
from lockstep.data.sources.rowset import RowSet
from lockstep.errors import Problem, Refusal

Span = tuple[int, int]
NAMED = 3
"""How many of the dropped rows are named."""


@runtime_checkable
class Tallied(Protocol):
    """A reader with counts that `found` reports."""

    tally: Counter[str]


@dataclass(frozen=True)
class RowPart:
    """Encoded rows, as bytes, or as objects if they cannot be stored as bytes."""

    data: Any = None
    """Bytes of a `Store`."""
    items: Sequence[Any] = ()
    about: dict[str, Any] = field(default_factory=dict)
    problems: Sequence[Problem] = ()
    elsewhere: bool = False
    """Another run has encoded them in the meantime."""


@dataclass(frozen=True)
class RowWork:
    """The rows of a source and their reader: the task of a worker process."""

    rows: RowSet
    reader: RowReader[Any]
    new_counts: Callable[[], RowCounts]
    cache: RowCache | None
    drop_bad: bool = False
    """Drop and count refused rows instead of stopping."""

    def __call__(self, span: Span) -> RowPart:
        """Encode the rows of a span. All problems of the span are collected."""
        if self.cache is not None and self.cache.get(span) is not None:
            return RowPart(elsewhere=True)
        counts, ends, problems = self.new_counts(), set[int](), list[Problem]()
        items: list[Any] = []
        numbers: list[int] = []
        split, special, tally = self.reader.split_rows, self.reader.special_rows, self._tally()
        unseparated = self.reader.unseparated_rows
        first_special = first_unseparated = -1
        refused: list[tuple[int, str]] = []
        for number in range(*span):
            before = self._tally() if self.drop_bad else None
            try:
                found = self.reader(self.rows[number], self.rows.origin(number))
                if first_special < 0 and self.reader.special_rows > special:
                    first_special = number
                if first_unseparated < 0 and self.reader.unseparated_rows > unseparated:
                    first_unseparated = number
                for kept in found:
                    if kept is None:
                        counts.dropped += 1
                        continue
                    counts.add(kept)
                    ends.update(kept.ends)
                    items.append(kept.item)
                    numbers.append(number)
            except Refusal as refusal:
                if before is None or not self._is_bad(number, refusal):
                    problems += refusal.problems
                    continue
                counts.dropped += 1
                refused.append((number, refusal.problems[0].why))
                self._restore(before)
        tally = self._tally() - tally
        about = {
            "counts": vars(counts),
            "split": self.reader.split_rows - split,
            "special": (self.reader.special_rows - special, first_special) if first_special >= 0 else None,
            "unseparated": (self.reader.unseparated_rows - unseparated, first_unseparated),
            "refused": (len(refused), refused[:NAMED]),
            "tally": tally,
            "ends": sorted(ends),
        }
        if problems:
            return RowPart(problems=problems)
        data = stored(items, numbers, about, self.rows.origin)
        return RowPart(data=data, items=() if data is not None else items, about=about)

    def _is_bad(self, number: int, refusal: Refusal) -> bool:
        """Whether the row itself is at fault: not a setting, and not the row's length."""
        return refusal.problems[0].where == str(self.rows.origin(number)) and not isinstance(refusal, OverLimit)

    def _restore(self, tally: Counter[str]) -> None:
        if isinstance(self.reader, Tallied):
            self.reader.tally = tally

    def _tally(self) -> Counter[str]:
        return Counter(self.reader.tally) if isinstance(self.reader, Tallied) else Counter()


def read_parts(work: RowWork, count: int, advance: Callable[[int], None]) -> list[RowPart]:
    """Encode the first `count` rows; parts are returned in row order."""
    spans = [(first, min(first + PART_ROWS, count)) for first in range(0, count, PART_ROWS)]
    parts: dict[Span, RowPart] = {}
    cache = work.cache
    for span in spans if cache is not None else ():
        _found(work, span, parts, advance)
    missing = _rank_offset_first([span for span in spans if span not in parts])
    for span, part in in_processes(work, missing, processes_here(len(missing))):
        if part.elsewhere and _found(work, span, parts, advance):
            continue
        made = work(span) if part.elsewhere else part  # deleted since
        if cache is not None and made.data is not None:
            made = RowPart(cache.put(span, made.data), made.items, made.about)
        parts[span] = made
        advance(span[1] - span[0])
    if missing and cache is not None:
        cache.prune()
    return [parts[span] for span in spans]


def _found(work: RowWork, span: Span, parts: dict[Span, RowPart], advance: Callable[[int], None]) -> bool:
    """Take a part from the cache, if it is there."""
    assert work.cache is not None
    data = work.cache.get(span)
    if data is None:
        return False
    parts[span] = RowPart(data, about=Store[Any](data, work.rows.origin).about)
    advance(span[1] - span[0])
    return True


def _rank_offset_first(spans: list[Span]) -> list[Span]:
    """Start each rank at another span. It finds the spans of the other ranks in the cache later."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    begin = rank * len(spans) // max(1, ranks)
    return spans[begin:] + spans[:begin]
