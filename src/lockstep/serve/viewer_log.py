"""Files of run folders: regular files inside the viewed folder only, and lines of JSON lines files by byte offset.

A last line without its newline is still being written, and is ignored.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1 << 16
LONGEST_LINE = 1 << 25
"""Limit of a parsed line: 32 MiB. A longer line is reported, not shown."""
MOST_DAMAGED = 50

_STEP = re.compile(rb'\{"step": (-?\d{1,18})[,}]')


class Missing(Exception):
    """The requested data does not exist or may not be shown. The page shows the message."""


def inside(root: Path, path: Path) -> bool:
    """Whether the resolved `path` is in `root`, which is a resolved path."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a regular file inside `root`. Links that lead out of `root` are not followed."""
    if not inside(root, path):
        raise Missing(f"{path.name} is a link out of the viewed folder")
    try:
        # Opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Missing(f"{path.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Missing(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small(root: Path, path: Path, most: int) -> str:
    """The text of a file of at most `most` bytes."""
    with open_inside(root, path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Missing(f"{path.name} has over {most:,} bytes: too many to show")
    return content.decode("utf-8", errors="replace")


class LogLine(NamedTuple):
    """Offsets of a line and of the next one, and its bytes; None for a line over the limit."""

    start: int
    end: int
    content: bytes | None


def complete_end(file: BinaryIO) -> int:
    """The end of the last complete line."""
    return _after_newline_before(file, os.fstat(file.fileno()).st_size)


def line_at(file: BinaryIO, start: int) -> LogLine | None:
    """The line that begins at `start`; None if it is not complete."""
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
    return line_before(file, complete_end(file))


def line_before(file: BinaryIO, offset: int) -> LogLine | None:
    """The line that ends at `offset`; None at the beginning of the file."""
    return line_at(file, _after_newline_before(file, offset - 1)) if offset > 0 else None


def parsed(content: bytes | None) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one. NaN and infinities become strings."""
    if content is None:
        return None
    try:
        value = json.loads(content, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def step_of(content: bytes | None) -> int | None:
    """The step of a line. If it is the first key, the rest is not parsed."""
    if content is None:
        return None
    if found := _STEP.match(content):
        return int(found[1])
    step = (parsed(content) or {}).get("step")
    return step if isinstance(step, int) else None


def edge_steps(file: BinaryIO) -> tuple[int | None, int | None]:
    """The first and the last step of a file. A few damaged lines at its ends are skipped."""
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
    """Offset of the first line with this step or a later one, else the end. A binary search: steps only increase in the
    files of a run."""
    low, high = 0, complete_end(file)
    while low < high:
        start = max(low, _after_newline_before(file, (low + high) // 2))
        begin, line = start, line_at(file, start)
        while line is not None and line.end < high and step_of(line.content) is None:
            line = line_at(file, line.end)  # a damaged line has no step: use the next line
        if line is None:
            return begin
        found = step_of(line.content)
        if found is not None and found < step:
            low = line.end
        else:
            high = begin
    return low


def _after_newline_before(file: BinaryIO, offset: int) -> int:
    """Offset of the line that contains the byte at `offset`, or that begins there."""
    while offset > 0:
        start = max(0, offset - BLOCK)
        file.seek(start)
        found = file.read(offset - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        offset = start
    return 0
