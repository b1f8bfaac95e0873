"""The rows of a source in parts that follow each other: each encoded by itself, here or in another process, or found.

What becomes of a row depends on that row alone, so parts can be made in any order; put together they are what one
reader gives that reads row after row.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.data.cache import RowCache
from lockstep.data.parallel import in_processes, processes_here
from lockstep.data.rowset import RowSet
from lockstep.data.stored import Store, stored
from lockstep.errors import Problem, Refusal

if TYPE_CHECKING:
    from lockstep.data.dataset import RowCounts, RowReader

# Rows of a part: about a second's work.
PART_ROWS = 1024
Span = tuple[int, int]


def tally_of(reader: RowReader[Any]) -> dict[str, Any]:
    """What a reader has counted so far, to be told in `found`: those of its attributes that are whole numbers or
    Counters."""
    return {name: copy(value) for name, value in vars(reader).items() if type(value) in (int, Counter)}


def set_tally(reader: RowReader[Any], before: Mapping[str, Any], parts: Sequence[RowPart]) -> None:
    """Let a reader have counted, besides what it had `before`, what was counted of all parts, wherever that was."""
    for name in {name for part in parts for name in part.about["tally"]}:
        found = [part.about["tally"][name] for part in parts if name in part.about["tally"]]
        counters = isinstance(found[0], dict)
        total = before.get(name, Counter() if counters else 0)
        for one in found:
            total = total + (Counter(one) if counters else one)
        setattr(reader, name, total)


@dataclass(frozen=True)
class RowPart:
    """Some rows, encoded: as bytes, or as objects where bytes would not do."""

    data: Any = None
    """Bytes of a `Store`."""
    items: Sequence[Any] = ()
    about: dict[str, Any] = field(default_factory=dict)
    problems: Sequence[Problem] = ()
    elsewhere: bool = False
    """Another run has encoded them meanwhile."""


@dataclass(frozen=True)
class RowWork:
    """Rows and their reader."""

    rows: RowSet
    reader: RowReader[Any]
    new_counts: Callable[[], RowCounts]
    cache: RowCache | None

    def __call__(self, span: Span) -> RowPart:
        """The part that the rows of the span make, with all that is wrong with them."""
        if self.cache is not None and self.cache.get(span) is not None:
            return RowPart(elsewhere=True)
        counts, ends, problems = self.new_counts(), set[int](), list[Problem]()
        items: list[Any] = []
        numbers: list[int] = []
        split, before = self.reader.split_rows, tally_of(self.reader)
        for number in range(*span):
            try:
                for kept in self.reader(self.rows[number], self.rows.origin(number)):
                    if kept is None:
                        counts.dropped += 1
                        continue
                    counts.add(kept)
                    ends.update(kept.ends)
                    items.append(kept.item)
                    numbers.append(number)
            except Refusal as refusal:
                problems += refusal.problems
        after = tally_of(self.reader)
        tally = {name: now - before.get(name, type(now)()) for name, now in after.items() if now != before.get(name)}
        about = {"counts": vars(counts), "split": self.reader.split_rows - split, "tally": tally, "ends": sorted(ends)}
        if problems:
            return RowPart(problems=problems)
        data = stored(items, numbers, about, self.rows.origin)
        return RowPart(data=data, items=() if data is not None else items, about=about)


def worth_keeping(rows: int) -> bool:
    """Fewer are encoded as fast as they are found."""
    return rows >= PART_ROWS


def read_parts(work: RowWork, count: int, advance: Callable[[int], None]) -> list[RowPart]:
    """The first `count` rows, in order."""
    spans = [(first, min(first + PART_ROWS, count)) for first in range(0, count, PART_ROWS)]
    parts: dict[Span, RowPart] = {}
    cache = work.cache
    for span in spans if cache is not None else ():
        _found(work, span, parts, advance)
    missing = _own_first([span for span in spans if span not in parts])
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
    """Take a part from the cache, where it is there."""
    assert work.cache is not None
    data = work.cache.get(span)
    if data is None:
        return False
    parts[span] = RowPart(data, about=Store[Any](data, work.rows.origin).about)
    advance(span[1] - span[0])
    return True


def _own_first(spans: list[Span]) -> list[Span]:
    """Each rank begins elsewhere, and finds what the others have done when it comes there."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    begin = rank * len(spans) // max(1, ranks)
    return spans[begin:] + spans[:begin]
