"""What rows and files must have in common: the columns, and for each column the kind of its values.

Kinds are JSON's (string, number, boolean, list, object), also for Arrow columns, so that a parquet file and a jsonl
file can be compared. Null agrees with every kind; integers and floats are one kind. Only the top level is compared:
what a column must hold inside is the business of whoever reads that column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from lockstep.types import Row

Shape = Mapping[str, str]

NULL = "null"
_KINDS = {
    type(None): NULL,
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
}


def kind_of(value: Any) -> str:
    """The kind of a value that came out of JSON or csv."""
    return _KINDS[type(value)]


def a(kind: str) -> str:
    """The kind with its article."""
    return kind if kind == NULL else f"an {kind}" if kind == "object" else f"a {kind}"


def kind_of_arrow(kind: pa.DataType) -> str:
    """The JSON kind that values of an Arrow type have as Python objects; the Arrow name where JSON has none."""
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
class Group:
    """Members (rows of a file, or files of a set) that have the same shape."""

    shape: Shape
    members: list[int] = field(default_factory=list)


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Rows by shape, in order of first appearance. There are few shapes, so this stays cheap for many rows."""
    groups: dict[tuple[Any, ...], Group] = {}
    for number, row in enumerate(rows):
        signature = (*row, *map(type, row.values()))
        group = groups.get(signature)
        if group is None:
            group = groups[signature] = Group({key: kind_of(value) for key, value in row.items()})
        group.members.append(number)
    return list(groups.values())


def merged(groups: Sequence[Group]) -> dict[str, str]:
    """The one shape of groups that agree: a column is null only where it is null in all of them."""
    shape: dict[str, str] = {}
    for group in groups:
        for column, kind in group.shape.items():
            if shape.get(column, NULL) == NULL:
                shape[column] = kind
    return shape


def disagreements(groups: Sequence[Group], name: Callable[[int], str]) -> list[tuple[int, str]]:
    """(member, what is wrong with it) for each member that differs from what most members have, in order.

    The majority is the norm, not the first member: one odd first row would otherwise accuse all the others.
    `name` says a member to the reader, because every complaint names one that has the norm.
    """
    norm = _usual_columns(groups)
    kinds = {column: _usual_kind(groups, column) for column in norm.shape}
    found = []
    for group in groups:
        complaints = [f"has the extra column {column!r}" for column in group.shape if column not in norm.shape]
        complaints += [
            f"lacks the column {column!r}, which {name(norm.members[0])} has"
            for column in norm.shape
            if column not in group.shape
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


def _usual_columns(groups: Sequence[Group]) -> Group:
    votes: Counter[frozenset[str]] = Counter()
    for group in groups:
        votes[frozenset(group.shape)] += len(group.members)
    winner = votes.most_common(1)[0][0]
    return next(group for group in groups if group.shape.keys() == winner)


def _usual_kind(groups: Sequence[Group], column: str) -> _Usual | None:
    votes: Counter[str] = Counter()
    for group in groups:
        kind = group.shape.get(column, NULL)
        if kind != NULL:
            votes[kind] += len(group.members)
    if not votes:
        return None
    winner = votes.most_common(1)[0][0]
    return _Usual(winner, next(group.members[0] for group in groups if group.shape.get(column) == winner))
