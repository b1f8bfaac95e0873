"""Tables with a step column: csv, JSON lines, a JSON list, and the history of a wandb run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import Points, numbers, whole
from lockstep.parity.compare.logs.text import number

# The first of these that a row has is its step. `_step` is wandb's count of calls, so it is taken last.
STEP_COLUMNS = (
    "training/global_step",
    "train/global_step",
    "eval/global_step",
    "global_step",
    "step",
    "Step",
)
COUNT = "_step"
# Which process wrote the row.
RANK_COLUMNS = ("rank", "global_rank", "local_rank", "process_index", "process", "worker", "node", "host", "device")
_NO_METRICS = frozenset({*STEP_COLUMNS, *RANK_COLUMNS, COUNT, "_runtime", "_timestamp", "_wandb"})
_SIDE_COLUMNS = ("__MIN", "__MAX")

LogRow = tuple[int, dict[str, Any]]
"""The line that it stands in, for messages, and its values."""


def has_step(names: Collection[str]) -> bool:
    return any(name in names for name in (*STEP_COLUMNS, COUNT))


def json_lines(file: str, text: str) -> Iterator[LogRow]:
    """The objects of a file of JSON lines. A last line that is cut short is left out; any other damage is refused."""
    lines = text.split("\n")
    for number_, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield number_, row
        elif number_ < len(lines):
            raise damaged(file, number_, line, "JSON object")


def csv_rows(file: str, text: str) -> Iterator[LogRow]:
    """The rows of a csv file by their header. A last line without its line break is half written, and left out."""
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]), delimiter=delimiter(text))
    try:
        header = _plain_names(next(reader, []))
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise damaged(file, reader.line_num, ",".join(cells), f"row of {len(header)} columns")
            row = {name: value for name, cell in zip(header, cells, strict=True) if (value := number(cell)) is not None}
            yield reader.line_num, row
    except csv.Error as error:
        raise Refusal.at(f"{file} line {reader.line_num}", f"not a line of csv: {error}", "remove it") from None


def delimiter(text: str) -> str:
    header = text.partition("\n")[0]
    return "\t" if "\t" in header and "," not in header else ","


def points(file: str, rows: Iterator[LogRow]) -> Points:
    """The metrics of the rows. Where wandb's count of calls is all that there is, its first call becomes step 1."""
    rows_, found = list(rows), Points()
    counted = not any(name in row for _, row in rows_ for name in STEP_COLUMNS)
    columns = (COUNT,) if counted else STEP_COLUMNS
    first = 1 if counted and _counts_from_zero([row for _, row in rows_]) else 0
    for line, row in rows_:
        written = next((row[name] for name in columns if row.get(name) is not None), None)
        if written is None:
            continue
        step = whole(written)
        if step is None:
            raise Refusal.at(
                f"{file} line {line}", f"its step is {written!r}", "a step is a whole number; remove the row"
            )
        found.add(step + first, numbers(row, _NO_METRICS), _source(row))
    return found


def _source(row: Mapping[str, Any]) -> str:
    """Which rank wrote the row, where it says so."""
    parts = [
        f"{name} {row[name]:g}" if isinstance(row[name], float) else f"{name} {row[name]}"
        for name in RANK_COLUMNS
        if row.get(name) is not None
    ]
    return ", ".join(parts)


def verl_points(file: str, rows: Iterator[LogRow]) -> Points:
    """The points of `{"step": 7, "data": {...}}` lines."""
    found = Points()
    for line, row in rows:
        step, data = whole(row.get("step")), row.get("data")
        if step is None or not isinstance(data, dict):
            raise damaged(file, line, json.dumps(row), "line with a step and data")
        found.add(step, numbers(data))
    return found


def _counts_from_zero(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether step 0 is an update: it logged at least half of what the next step did. A validation does not."""
    counted = list(islice((row for row in rows if COUNT in row), 2))
    if not counted or whole(counted[0][COUNT]) != 0:
        return False
    names = [set(numbers(row, _NO_METRICS)) for row in counted]
    return len(names) == 1 or 2 * len(names[0] & names[1]) >= len(names[1])


def _plain_names(header: list[str]) -> list[str]:
    """A chart exported from wandb calls its columns `run - metric`, with the range of each beside it."""
    header = [name.strip() for name in header]
    runs = {name.partition(" - ")[0] for name in header if " - " in name}
    if len(runs) != 1:
        return header
    prefix = f"{runs.pop()} - "
    return [name if name.endswith(_SIDE_COLUMNS) else name.removeprefix(prefix) for name in header]


def damaged(file: str, line: int, text: str, wanted: str) -> Refusal:
    return Refusal.at(f"{file} line {line}", f"not a {wanted}: {text[:60]!r}", "restore the file, or remove the line")
