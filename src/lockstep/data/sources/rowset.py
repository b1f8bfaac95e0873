"""The rows of one data source with random access. Each row has columns and an origin (file and line or row number).

All rows of a source must have the same columns of `FORMAT_COLUMNS`, which determine the row format, with values of one
kind. Other columns, such as an id or a comment, may have values of several kinds. Other columns may also be missing in
some rows, which is reported. A kind is a JSON type (string, number, boolean, list, object), also for Arrow columns, so
that parquet and jsonl files can be compared. A null value is accepted in a column of any kind. Integers and floats are
the same kind. The kinds of nested values are not compared.
"""

from __future__ import annotations

import copy
import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Protocol, overload

import pyarrow as pa

from lockstep.errors import Problem, Refusal
from lockstep.types import Origin, Row

ColumnKinds = Mapping[str, str]

NULL = "null"
MIXED = "mixed"
# Columns that a row may lack. A missing column is treated as null. For example, not every chat has tools.
OPTIONAL = frozenset({"tools", "functions", "parallel_tool_calls", "system", "system_prompt", "input", "history"})
# Columns that determine the format of a row.
# fmt: off
FORMAT_COLUMNS = frozenset({
    "messages", "conversations", "conversation", "prompt", "question", "instruction", "query", "problem", "response",
    "completion", "answer", "output", "solution", "text", "content", "chosen", "rejected", "margin", "score_chosen",
    "score_rejected", "chosen_score", "rejected_score", "responses", "completions", "scores", "label", "labels",
    "kto_tag", "value", "values", "ground_truth", "data_source", "reward_model",
})
# fmt: on
SHOWN = 10
_ROWS_AT_ONCE = 1024
_KINDS = {
    type(None): NULL,
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}


class Problems:
    """Stores the first problems of a file and counts the others, because a broken file can have a million bad lines."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.first: list[Problem] = []
        self.count = 0

    def add(self, where: object, why: str, remedy: str = "", *, code: str) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(Problem(str(where), why, remedy, code=code))

    def extend(self, other: Problems) -> None:
        """Appends the problems of a later part of the file."""
        self.first += other.first[: SHOWN - len(self.first)]
        self.count += other.count

    def refuse(self) -> None:
        """Raises a `Refusal` if there are problems."""
        if not self.count:
            return
        more = self.count - len(self.first)
        raise Refusal(
            self.first
            + ([Problem(self.subject, f"has {more} more problems like these", code="more-problems")] if more else [])
        )


@dataclass(frozen=True)
class LineOrigin(Origin):
    """The origin of a row in a text file. `row` is the number of the row's first line, counted from 1.

    In messages, "row N" counts from 0 as in code (parquet, json, hub). "line N" counts from 1 as in editors (jsonl,
    csv).
    """

    def __str__(self) -> str:
        return f"{self.file} line {self.row}"


@dataclass(frozen=True)
class FileInfo:
    """The identity of a data file, which a resumed run compares with the identity in its checkpoint."""

    name: str
    rows: int
    bytes: int
    sha256: str


class RowFile(Protocol):
    """The rows of one file. Each access returns a new object, so callers cannot change shared data."""

    @property
    def info(self) -> FileInfo: ...
    @property
    def shape(self) -> ColumnKinds: ...
    @property
    def partly(self) -> Mapping[str, int]:
        """Maps each column that only some rows have to the number of rows with that column."""
        ...

    def row(self, number: int) -> Row: ...
    @property
    def lines(self) -> Sequence[int] | None:
        """Line number of each row, or None if a row is not a line of the file."""
        ...

    def origin(self, number: int) -> Origin: ...
    def __iter__(self) -> Iterator[Row]: ...


class JsonRows(Sequence[Row]):
    """Rows of a valid JSON lines file, kept as bytes and parsed on access."""

    def __init__(self, data: bytes, starts: Sequence[int], ends: Sequence[int]) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row: Row = json.loads(self._data[self._starts[index] : self._ends[index]].strip())
        return row


@dataclass(frozen=True)
class TextFile:
    """Parsed rows of a text file. `lines` holds the line number of each row, or is None if a row is not a line of the
    file."""

    info: FileInfo
    shape: ColumnKinds
    rows: Sequence[Row]
    lines: Sequence[int] | None
    partly: Mapping[str, int] = field(default_factory=dict)

    def row(self, number: int) -> Row:
        return next(self._fresh([self.rows[number]]))

    def origin(self, number: int) -> Origin:
        return origin_at(self.info.name, self.lines, number)

    def __iter__(self) -> Iterator[Row]:
        return self._fresh(self.rows)

    def _fresh(self, rows: Iterable[Row]) -> Iterator[Row]:
        return iter(rows) if isinstance(self.rows, JsonRows) else map(copy.deepcopy, rows)


def origin_at(name: str, lines: Sequence[int] | None, number: int) -> Origin:
    return Origin(name, number) if lines is None else LineOrigin(name, lines[number])


class ArrowFile:
    """Rows in Arrow memory. A row is converted to a Python object on access.

    Columns are decoded once, when the file is opened. With shuffling, decoding a row group per access would take longer
    than the training step. Decoding everything at the start also finds damaged pages before training.
    """

    def __init__(self, info: FileInfo, shape: ColumnKinds, batches: Sequence[pa.RecordBatch]) -> None:
        self.info = info
        self.shape = shape
        self.lines = None
        self.partly: Mapping[str, int] = {}
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
    """All rows of one source, in file order. `ignored` lists the files that were not read."""

    def __init__(self, parts: Sequence[RowFile], ignored: Sequence[str] = ()) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(part.info.rows for part in self._parts))
        self.files: tuple[FileInfo, ...] = tuple(part.info for part in self._parts)
        self.ignored: tuple[str, ...] = tuple(ignored)
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(name for part in self._parts for name in part.shape))
        self.partly: Counter[str] = Counter()
        for name in set(self.columns) - OPTIONAL:
            counts = [part.partly.get(name, part.info.rows) for part in self._parts if name in part.shape]
            if sum(counts) < self._ends[-1]:
                self.partly[name] = sum(counts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, number = self._find(index)
        return part.row(number)

    def __iter__(self) -> Iterator[Row]:
        """Yields all rows in order. Iteration is several times faster than access by index."""
        for part in self._parts:
            yield from part

    def origin(self, index: int) -> Origin:
        part, number = self._find(index)
        return part.origin(number)

    def origins(self) -> Callable[[int], Origin]:
        """Returns a function like `origin` that does not keep the rows in memory."""
        parts, ends = [(part.info.name, part.lines) for part in self._parts], self._ends

        def origin(index: int) -> Origin:
            which = bisect_right(ends, index)
            return origin_at(*parts[which], index - (ends[which - 1] if which else 0))

        return origin

    def described(self) -> dict[str, object]:
        """Returns the identity of the rows. A resumed run compares the content hash, not the file names."""
        return {"fingerprint": self.fingerprint, "files": [asdict(file) for file in self.files]}

    @property
    def fingerprint(self) -> str:
        """Hash of the file contents in order. The hash does not depend on the file names."""
        return hashlib.sha256("\n".join(file.sha256 for file in self.files).encode()).hexdigest()

    def _find(self, index: int) -> tuple[RowFile, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        which = bisect_right(self._ends, index)
        part = self._parts[which]
        return part, index - self._ends[which] + part.info.rows


def kind_of(value: Any) -> str:
    """Returns the kind (JSON type) of a value from a JSON or csv file."""
    return _KINDS[type(value)]


def a(kind: str) -> str:
    """Returns the kind with its indefinite article, for messages."""
    return kind if kind == NULL else f"an {kind}" if kind == "object" else f"a {kind}"


def kind_of_arrow(kind: pa.DataType) -> str:
    """Returns the JSON kind of an Arrow type, or its Arrow name if JSON has none."""
    types = pa.types
    if types.is_dictionary(kind):
        return kind_of_arrow(kind.value_type)
    if types.is_null(kind):
        return NULL
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    if types.is_struct(kind):
        return "object"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    return str(kind)


@dataclass
class ShapeGroup:
    """Members (rows of a file, or files of a set) with the same shape, which means the same columns with the same
    kinds."""

    shape: ColumnKinds
    members: list[int] = field(default_factory=list)


class ShapeGroups:
    """Rows grouped by shape (columns and kinds), in order of first appearance. A file has few different shapes."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._groups: dict[tuple[Any, ...], ShapeGroup] = {}
        self._rows = 0
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        signature = (*row, *map(type, row.values()))
        group = self._groups.get(signature)
        if group is None:
            group = self._groups[signature] = ShapeGroup({key: kind_of(value) for key, value in row.items()})
        group.members.append(self._rows)
        self._rows += 1

    def extend(self, other: ShapeGroups) -> None:
        """Appends the rows of a later part of the file."""
        for signature, group in other._groups.items():
            mine = self._groups.setdefault(signature, ShapeGroup(group.shape))
            mine.members += [self._rows + number for number in group.members]
        self._rows += other._rows

    def all(self) -> list[ShapeGroup]:
        return list(self._groups.values())


def merged(groups: Sequence[ShapeGroup]) -> dict[str, str]:
    """Returns the combined shape of all groups. The kind of a column is null only if it is null in all groups."""
    shape: dict[str, str] = {}
    for group in groups:
        for column, kind in group.shape.items():
            before = shape.get(column, NULL)
            shape[column] = kind if before in (NULL, kind) else before if kind == NULL else MIXED
    return shape


def partly_there(groups: Sequence[ShapeGroup]) -> dict[str, int]:
    """Returns the columns that only some members have, each with the number of members that have it. Columns of
    `OPTIONAL` are excluded."""
    total = sum(len(group.members) for group in groups)
    having: Counter[str] = Counter()
    for group in groups:
        having.update(dict.fromkeys(group.shape.keys() - OPTIONAL, len(group.members)))
    return {column: count for column, count in having.items() if count < total}


def disagreements(groups: Sequence[ShapeGroup], name: Callable[[int], str]) -> list[tuple[int, str]]:
    """Returns (member, problem) for each member that differs from the majority in `FORMAT_COLUMNS`, in order.

    Members are compared with the majority, because the first member may be the one that differs. `name` returns the
    name of a member for messages.
    """
    norm = _usual_columns(groups)
    required = FORMAT_COLUMNS - OPTIONAL
    present = {column for group in groups for column in group.shape}
    kinds = {column: _usual_kind(groups, column) for column in sorted(present & (FORMAT_COLUMNS | OPTIONAL))}
    found = []
    for group in groups:
        complaints = [
            f"has the extra column {column!r}" for column in group.shape if column in required - norm.shape.keys()
        ]
        complaints += [
            f"lacks the column {column!r}, which {name(norm.members[0])} has"
            for column in norm.shape
            if column in required - group.shape.keys()
        ]
        for column, usual in kinds.items():
            kind = group.shape.get(column, NULL)
            if usual is not None and kind not in (NULL, usual.kind):
                complaints.append(f"column {column!r} is {a(kind)} here and {a(usual.kind)} in {name(usual.member)}")
        if complaints:
            found += [(member, "; ".join(complaints)) for member in group.members]
    return sorted(found)


@dataclass(frozen=True)
class _Usual:
    kind: str
    member: int


def _usual_columns(groups: Sequence[ShapeGroup]) -> ShapeGroup:
    votes: Counter[frozenset[str]] = Counter()
    for group in groups:
        votes[frozenset(group.shape) - OPTIONAL] += len(group.members)
    winner = votes.most_common(1)[0][0]
    return next(group for group in groups if group.shape.keys() - OPTIONAL == winner)


def _usual_kind(groups: Sequence[ShapeGroup], column: str) -> _Usual | None:
    votes: Counter[str] = Counter()
    for group in groups:
        kind = group.shape.get(column, NULL)
        if kind != NULL:
            votes[kind] += len(group.members)
    if not votes:
        return None
    winner = votes.most_common(1)[0][0]
    return _Usual(winner, next(group.members[0] for group in groups if group.shape.get(column) == winner))
