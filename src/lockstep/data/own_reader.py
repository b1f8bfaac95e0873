"""Rows by a function of the user's own: `reader(path)` yields a dict for each row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lockstep.data.rowset import FileInfo, Problems, RowSet, TextFile, disagreements, group_rows, merged
from lockstep.functions import own_function
from lockstep.types import Origin, Row

KEY = "data.reader"
REMEDY = "yield a dict of plain values (text, numbers, true and false, lists, dicts) for each row"


def read_own(path: str, function_path: str) -> RowSet:
    """All rows, before anything else is done with them; the content's checksum stands for that of a file."""
    reader = own_function(function_path, KEY, ("path",))
    found = reader(path)
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise reader.refuse(f"returned a {type(found).__name__} for {path}, not rows", REMEDY)
    problems = Problems(path)
    rows: list[Row] = []
    digest, size = hashlib.sha256(), 0
    # Whatever a generator raises on the way is told with file and line, as what a function raises is.
    for number, row in enumerate(replace(reader, function=list)(found)):
        if not isinstance(row, Mapping) or not row:
            what = "an empty row" if isinstance(row, Mapping) else f"a {type(row).__name__}"
            problems.add(f"{reader.where}: {Origin(path, number)}", f"is {what}", REMEDY)
            continue
        try:
            text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.add(f"{reader.where}: {Origin(path, number)}", f"cannot be kept: {error}", REMEDY)
            continue
        line = text.encode() + b"\n"
        digest.update(line)
        size += len(line)
        rows.append(json.loads(text))
    problems.refuse()
    if not rows:
        raise reader.refuse(f"yielded no rows for {path}", REMEDY)
    groups = group_rows(rows)
    for number, why in disagreements(groups, lambda number: f"row {number}"):
        problems.add(f"{reader.where}: {Origin(path, number)}", why, "every row needs the same columns and kinds")
    problems.refuse()
    return RowSet([TextFile(FileInfo(path, len(rows), size, digest.hexdigest()), merged(groups), rows, None)])
