"""Lines of a JSON-lines file by their byte offsets: the last one, the first of a step, one after another. A line that
is being written, without its newline yet, is not there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1 << 16
LONGEST_LINE = 1 << 25
"""Bytes of a line that are parsed: 32 MB. A longer one is told of, not shown."""
MOST_DAMAGED = 50

_STEP = re.compile(rb'\{"step": (-?\d{1,18})[,}]')


class LogLine(NamedTuple):
    """Where a line begins, where the next one does, and its bytes; None where they are too many."""

    start: int
    end: int
    content: bytes | None


def whole_end(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    return _after_newline_before(file, os.fstat(file.fileno()).st_size)


def line_at(file: BinaryIO, start: int) -> LogLine | None:
    """The line that begins at `start`; None where no whole one does."""
    file.seek(start)
    content = file.readline(LONGEST_LINE)
    if content.endswith(b"\n"):
        return LogLine(start, start + len(content), content)
    end = start + len(content)
    if len(content) < LONGEST_LINE:
        return None
    while block := file.read(BLOCK):
        if (found := block.find(b"\n")) >= 0:
            return LogLine(start, end + found + 1, None)
        end += len(block)
    return None


def lines_from(file: BinaryIO, start: int) -> Iterator[LogLine]:
    while (line := line_at(file, start)) is not None:
        yield line
        start = line.end


def last_line(file: BinaryIO) -> LogLine | None:
    return line_before(file, whole_end(file))


def line_before(file: BinaryIO, offset: int) -> LogLine | None:
    """The line that ends where another begins; None before the first."""
    return line_at(file, _after_newline_before(file, offset - 1)) if offset > 0 else None


def parsed(content: bytes | None) -> dict[str, Any] | None:
    """The object of a line; None for what is none. Numbers that JSON does not know are their names."""
    if content is None:
        return None
    try:
        value = json.loads(content, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def step_of(content: bytes | None) -> int | None:
    """The step of a line, without parsing what follows it where it comes first."""
    if content is None:
        return None
    if found := _STEP.match(content):
        return int(found[1])
    step = (parsed(content) or {}).get("step")
    return step if isinstance(step, int) else None


def edge_steps(file: BinaryIO) -> tuple[int | None, int | None]:
    """The first and the last step of a file; damaged lines at its ends are passed over, some of them."""
    first = (step_of(line.content) for line in islice(lines_from(file, 0), MOST_DAMAGED))
    return next((step for step in first if step is not None), None), _last_step(file)


def _last_step(file: BinaryIO) -> int | None:
    line = last_line(file)
    for _ in range(MOST_DAMAGED):
        if line is None or (step := step_of(line.content)) is not None:
            return None if line is None else step
        line = line_before(file, line.start)
    return None


def first_of_step(file: BinaryIO, step: int) -> int:
    """Where the first line begins whose step is `step` or later; the end where there is none. A search by halves: steps
    only go up in the files of a run."""
    low, high = 0, whole_end(file)
    while low < high:
        start = max(low, _after_newline_before(file, (low + high) // 2))
        begin, line = start, line_at(file, start)
        while line is not None and line.end < high and step_of(line.content) is None:
            line = line_at(file, line.end)  # a damaged line has no step: the next one answers for it
        if line is None:
            return begin
        told = step_of(line.content)
        if told is not None and told < step:
            low = line.end
        else:
            high = begin
    return low


def _after_newline_before(file: BinaryIO, offset: int) -> int:
    """Where the line begins that the byte at `offset` belongs to, or that begins there."""
    while offset > 0:
        start = max(0, offset - BLOCK)
        file.seek(start)
        found = file.read(offset - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        offset = start
    return 0
