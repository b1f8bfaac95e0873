"""Rows from files: parquet, jsonl, json, csv, a folder or pattern of them, or a data set of the hub.

Everything is looked at before the first row is handed out, and all that is wrong is refused at once: a run must not
die at hour nine of a truncated last file.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from lockstep.data.hub import PREFIX, read_hub
from lockstep.data.locate import DataFile, locate
from lockstep.data.own_reader import read_own
from lockstep.data.parquet import read_parquet
from lockstep.data.problems import Problems
from lockstep.data.rowset import ArrowPart, FileInfo, LineOrigin, Part, RowSet, TextPart
from lockstep.data.schema import Group, disagreements, group_rows, kind_of_arrow, merged
from lockstep.data.text import Parsed, parse
from lockstep.types import Origin

__all__ = ["FileInfo", "LineOrigin", "RowSet", "read_rows"]

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_rows(path: str, *, base: Path | None = None, reader: str | None = None) -> RowSet:
    """The rows behind `path`: a file, a folder, a glob pattern, or hub:owner/name[:config[:split]].

    A relative path is looked up under `base` (the working folder if not given). Files are taken in order of name.
    `reader` is the place of a function of the user's own, which reads whatever `path` means to it.
    """
    if reader is not None:
        return read_own(path, reader)
    if path.startswith(PREFIX):
        return read_hub(path)
    found = locate(path, base)
    problems = Problems(path)
    parts = [part for file in found.files if (part := _read_file(file, problems)) is not None]
    _check_agreement(parts, problems)
    problems.refuse()
    return RowSet(parts, found.ignored)


def _read_file(file: DataFile, problems: Problems) -> Part | None:
    """The file's rows, or None with at least one problem added."""
    try:
        size, sha256, is_pointer = _examine(file.path)
        if is_pointer:
            problems.add(file.name, "is a git-LFS pointer, not the data", "run git lfs pull where it was cloned")
        elif size == 0:
            problems.add(file.name, "is empty")
        elif file.format == "parquet":
            return _read_arrow(file, size, sha256, problems)
        else:
            return _read_text(file, size, sha256, problems)
    except OSError as error:
        problems.add(file.name, f"cannot be read: {error.strerror or error}")
    return None


def _read_arrow(file: DataFile, size: int, sha256: str, problems: Problems) -> Part | None:
    before = problems.count
    batches = read_parquet(file.name, file.path, problems)
    if problems.count > before:
        return None
    rows = sum(batch.num_rows for batch in batches)
    if not rows or not batches[0].schema.names:
        problems.add(file.name, "has no rows")
        return None
    shape = {column.name: kind_of_arrow(column.type) for column in batches[0].schema}
    return ArrowPart(FileInfo(file.name, rows, size, sha256), shape, batches)


def _read_text(file: DataFile, size: int, sha256: str, problems: Problems) -> Part | None:
    before = problems.count
    data = _unpacked(file, problems)
    if data is None:
        return None
    parsed = parse(file.format, file.name, data, problems)
    if not parsed.rows:
        if problems.count == before:
            problems.add(file.name, "has no rows")
        return None
    groups = group_rows(parsed.rows)
    for number, why in disagreements(groups, lambda number: _say(parsed, number)):
        where = _origin(file.name, parsed, number)
        problems.add(where, why, "every row needs the same columns and kinds; null is allowed anywhere")
    if problems.count == before and not groups[0].shape:
        problems.add(file.name, "has rows without any column")
    if problems.count > before:
        return None
    return TextPart(FileInfo(file.name, len(parsed.rows), size, sha256), merged(groups), parsed.rows, parsed.lines)


def _origin(name: str, parsed: Parsed, number: int) -> Origin:
    return Origin(name, number) if parsed.lines is None else LineOrigin(name, parsed.lines[number])


def _say(parsed: Parsed, number: int) -> str:
    return f"row {number}" if parsed.lines is None else f"line {parsed.lines[number]}"


def _check_agreement(parts: list[Part], problems: Problems) -> None:
    if len(parts) < 2:
        return
    groups = [Group(part.shape, [number]) for number, part in enumerate(parts)]
    for number, why in disagreements(groups, lambda number: parts[number].info.name):
        remedy = "files read together need the same columns; give different data as sources of its own"
        problems.add(parts[number].info.name, why, remedy)


def _examine(path: Path) -> tuple[int, str, bool]:
    """(bytes, sha256, whether it is a git-LFS pointer) of the file as it lies on disk."""
    digest, size, head = hashlib.sha256(), 0, b""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            head = head or block[: len(_LFS_POINTER)]
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest(), head == _LFS_POINTER


def _unpacked(file: DataFile, problems: Problems) -> bytes | None:
    data = file.path.read_bytes()
    if not file.name.lower().endswith(".gz"):
        return data
    try:
        return gzip.decompress(data)
    except EOFError:
        problems.add(file.name, "is truncated: the gzip stream ends early", "copy or download it again")
    except (gzip.BadGzipFile, zlib.error) as error:
        problems.add(file.name, f"is not a whole gzip file: {error}", "copy or download it again")
    return None
