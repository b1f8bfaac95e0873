"""Rows of one source, readable in any order, each able to say where it came from."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import pyarrow as pa

from lockstep.data.schema import Shape
from lockstep.types import Origin, Row

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class LineOrigin(Origin):
    """A row that a text editor can show: `row` is the line it starts on, counted from 1.

    The one convention: "row N" counts from 0 as code does (parquet, json, hub), "line N" counts from 1 as editors do
    (jsonl, csv).
    """

    def __str__(self) -> str:
        return f"{self.file} line {self.row}"


@dataclass(frozen=True)
class FileInfo:
    """What a resume needs to tell whether a file is still the one that was trained on."""

    name: str
    rows: int
    bytes: int
    sha256: str


class Part(Protocol):
    """The rows of one file. A row is handed out fresh each time, so that no caller can change another's data."""

    @property
    def info(self) -> FileInfo: ...
    @property
    def shape(self) -> Shape: ...
    def row(self, number: int) -> Row: ...
    def origin(self, number: int) -> Origin: ...
    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class TextPart:
    """Rows of a text file, parsed. `lines` holds each row's line, or nothing where rows are not lines."""

    info: FileInfo
    shape: Shape
    rows: Sequence[Row]
    lines: Sequence[int] | None

    def row(self, number: int) -> Row:
        return copy.deepcopy(self.rows[number])

    def origin(self, number: int) -> Origin:
        if self.lines is None:
            return Origin(self.info.name, number)
        return LineOrigin(self.info.name, self.lines[number])

    def __iter__(self) -> Iterator[Row]:
        return map(copy.deepcopy, self.rows)


class ArrowPart:
    """Rows that stay in Arrow memory; only those asked for become Python objects.

    The columns are decoded once, when the file is opened: a shuffled epoch jumps between row groups, and decoding a
    group anew for each jump would cost more than the training step. It also finds damaged pages before training.
    """

    def __init__(self, info: FileInfo, shape: Shape, batches: Sequence[pa.RecordBatch]) -> None:
        self.info = info
        self.shape = shape
        self._batches = list(batches)
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def row(self, number: int) -> Row:
        index = bisect_right(self._ends, number)
        batch = self._batches[index]
        start = self._ends[index] - batch.num_rows
        row: Row = batch.slice(number - start, 1).to_pylist()[0]
        return row

    def origin(self, number: int) -> Origin:
        return Origin(self.info.name, number)

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


class RowSet:
    """All rows of one source, files in order. `ignored` names what stood beside the data and was not read."""

    def __init__(self, parts: Sequence[Part], ignored: Sequence[str] = ()) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(part.info.rows for part in self._parts))
        self.files: tuple[FileInfo, ...] = tuple(part.info for part in self._parts)
        self.ignored: tuple[str, ...] = tuple(ignored)
        self.columns: tuple[str, ...] = tuple(self._parts[0].shape)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, number = self._find(index)
        return part.row(number)

    def __iter__(self) -> Iterator[Row]:
        """In order, and several times faster than asking row by row."""
        for part in self._parts:
            yield from part

    def origin(self, index: int) -> Origin:
        part, number = self._find(index)
        return part.origin(number)

    @property
    def fingerprint(self) -> str:
        """One hash over the contents in order. Names are left out: a moved file is the same data."""
        return hashlib.sha256("\n".join(file.sha256 for file in self.files).encode()).hexdigest()

    def _find(self, index: int) -> tuple[Part, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        which = bisect_right(self._ends, index)
        part = self._parts[which]
        return part, index - self._ends[which] + part.info.rows
