"""Reads the rows of a source: a file, a folder, a pattern of files, or a hub data set.

All files are checked before the first row is used, and all problems are reported together. Without a check of all
files, a truncated last file could stop a run after hours.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from lockstep.data.sources.find_files import DataFile, FileCache, locate
from lockstep.data.sources.formats import parse, read_arrow, read_parquet
from lockstep.data.sources.rowset import (
    ArrowFile,
    FileInfo,
    LineOrigin,
    Problems,
    RowFile,
    RowSet,
    ShapeGroup,
    ShapeGroups,
    TextFile,
    disagreements,
    kind_of_arrow,
    merged,
    partly_there,
)
from lockstep.data.sources.user_reader import UserReader, read_user_rows
from lockstep.errors import Refusal, missing_extra
from lockstep.run.files import checksum

__all__ = ["FileInfo", "LineOrigin", "RowSet", "read_rows"]

TABLES = {"parquet": read_parquet, "arrow": read_arrow}
HUB = "hub:"
_FORM = "write hub:owner/name:config:split; the config may be left empty, as in hub:owner/name::train"


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_rows(
    path: str,
    *,
    base: Path | None = None,
    reader: UserReader | None = None,
    cache: Path | None = None,
    sample_by: str = "line",
) -> RowSet:
    """Returns the rows of `path`: a file, a folder, a glob pattern, or hub:owner/name[:config[:split]].

    Relative paths start at `base` (default: the working directory). Files are sorted by name. If `reader` is given,
    that user function reads `path` instead. `cache` is the folder of the file cache (`data/sources/find_files.py`).
    `sample_by` says which part of a .txt file is one row (a line, a paragraph or the full file).
    """
    if reader is not None:
        return read_user_rows(path, reader)
    if path.startswith(HUB):
        return read_hub(path)
    found = locate(path, base)
    files = with_text_unit(found.files, sample_by)
    problems = Problems(path)
    file_cache = None if cache is None else FileCache(cache)
    parts = [part for file in files if (part := _read_file(file, problems, file_cache)) is not None]
    _check_agreement(parts, problems)
    problems.refuse()
    return RowSet(parts, found.ignored)


def with_text_unit(files: Sequence[DataFile], sample_by: str) -> list[DataFile]:
    """Adds `data.sample_by` to the format of .txt files."""
    return [replace(file, format=f"txt.{sample_by}") if file.format == "txt" else file for file in files]


def _read_file(file: DataFile, problems: Problems, cache: FileCache | None) -> RowFile | None:
    """Reads the rows of a file. Adds at least one entry to `problems` and returns None if the file is invalid."""
    try:
        size, sha256, is_pointer = _examine(file.path)
        if is_pointer:
            problems.add(
                file.name,
                "is a git-LFS pointer, not the data",
                "run git lfs pull in the cloned repository",
                code="damaged-file",
            )
        elif size == 0:
            problems.add(file.name, "is empty", code="no-rows")
        else:
            form = file.format + (".gz" if file.name.lower().endswith(".gz") else "")
            cached = cache and cache.find(file.name, form, size, sha256, lambda: _open_cached(file, size, sha256))
            if cached:
                return cached
            read = _parsed(file, size, sha256, problems)
            if cache is not None and read is not None:
                cache.remember(form, read)
            return read
    except OSError as error:
        problems.add(file.name, f"cannot be read: {error.strerror or error}", code="unreadable")
    return None


def _parsed(file: DataFile, size: int, sha256: str, problems: Problems) -> RowFile | None:
    return (_read_arrow if file.format in TABLES else _read_text)(file, size, sha256, problems)


def _open_cached(file: DataFile, size: int, sha256: str) -> RowFile:
    """Parses a file whose metadata was cached. Raises an error if the file has changed since it was cached."""
    problems = Problems(file.name)
    now = _examine(file.path)[:2]
    if now != (size, sha256):
        problems.add(file.name, "was changed while it was read", "start again", code="changed-data")
    read = _parsed(file, size, sha256, problems)
    problems.refuse()
    assert read is not None
    return read


def _read_arrow(file: DataFile, size: int, sha256: str, problems: Problems) -> RowFile | None:
    before = problems.count
    batches = TABLES[file.format](file.name, file.path, problems)
    if problems.count > before:
        return None
    rows = sum(batch.num_rows for batch in batches)
    if not rows or not batches[0].schema.names:
        problems.add(file.name, "has no rows", code="no-rows")
        return None
    shape = {column.name: kind_of_arrow(column.type) for column in batches[0].schema}
    return ArrowFile(FileInfo(file.name, rows, size, sha256), shape, batches)


def _read_text(file: DataFile, size: int, sha256: str, problems: Problems) -> RowFile | None:
    before = problems.count
    data = _unpacked(file, problems)
    if data is None:
        return None
    parsed = parse(file.format, file.name, data, problems)
    if not parsed.rows:
        if problems.count == before:
            problems.add(file.name, "has no rows", code="no-rows")
        return None
    groups = (parsed.groups or ShapeGroups(parsed.rows)).all()
    info = FileInfo(file.name, len(parsed.rows), size, sha256)
    found = TextFile(info, merged(groups), parsed.rows, parsed.lines, partly_there(groups))

    def place(number: int) -> str:
        return str(found.origin(number)).removeprefix(f"{file.name} ")

    for number, why in disagreements(groups, place):
        remedy = "all rows need these columns, each with values of one kind; null is always allowed"
        problems.add(found.origin(number), why, remedy, code="mixed-rows")
    if problems.count == before and not groups[0].shape:
        problems.add(file.name, "has rows without any column", code="no-rows")
    return found if problems.count == before else None


def _check_agreement(parts: list[RowFile], problems: Problems) -> None:
    if len(parts) < 2:
        return
    groups = [ShapeGroup(part.shape, [number]) for number, part in enumerate(parts)]
    for number, why in disagreements(groups, lambda number: parts[number].info.name):
        remedy = "files of one source need the same columns; list different data as separate sources"
        problems.add(parts[number].info.name, why, remedy, code="mixed-rows")


def _examine(path: Path) -> tuple[int, str, bool]:
    """Returns (size in bytes, sha256, whether the file is a git-LFS pointer) of the file on disk."""
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    return path.stat().st_size, checksum(path), head == _LFS_POINTER


def _unpacked(file: DataFile, problems: Problems) -> bytes | None:
    data = file.path.read_bytes()
    if not file.name.lower().endswith(".gz"):
        return data
    try:
        return gzip.decompress(data)
    except EOFError:
        problems.add(
            file.name, "is truncated: the gzip stream ends early", "copy or download it again", code="damaged-file"
        )
    except (gzip.BadGzipFile, zlib.error) as error:
        problems.add(file.name, f"is not a valid gzip file: {error}", "copy or download it again", code="damaged-file")
    return None


@dataclass(frozen=True)
class HubName:
    """The parts of `hub:name[:config[:split]]`. A split may be a slice with colons: train[:100]."""

    name: str
    config: str | None
    split: str | None


def parse_hub_name(given: str) -> HubName:
    name, config, split = [*given.removeprefix(HUB).split(":", 2), "", ""][:3]
    if not name:
        raise Refusal.at(given, "names no data set", _FORM, code="invalid-name")
    return HubName(name, config or None, split or None)


def read_hub(given: str) -> RowSet:
    """Loads the rows of one split of a hub data set into Arrow memory."""
    wanted = parse_hub_name(given)
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "hub", given) from error
    unreached = None if Path(wanted.name).exists() else _refused_by_hub(wanted.name, given)
    try:
        with _from_its_cache(datasets, only=unreached is not None):
            loaded = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split)
    except Exception as error:  # the package raises network, hub and parser errors of many libraries
        if unreached is not None:
            raise unreached from error
        raise Refusal.at(given, f"cannot be loaded: {error}", _FORM, code="hub-failed") from error
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            # If the first split were used silently, a run could train on the test split.
            raise Refusal.at(given, f"has several splits: {', '.join(loaded)}", _FORM, code="several-candidates")
        loaded = next(iter(loaded.values()))
    table: pa.Table = loaded.with_format("arrow")[:]
    if not len(table):
        raise Refusal.at(given, "has no rows", code="no-rows")
    shape = {column.name: kind_of_arrow(column.type) for column in table.schema}
    batches = table.to_batches()
    return RowSet([ArrowFile(_info(given, batches), shape, batches)])


def _refused_by_hub(name: str, given: str) -> Refusal | None:
    """Checks within seconds whether the Hugging Face hub has the data set. The package datasets itself would retry for
    a minute. Returns the error, or None if the data set is accessible."""
    from lockstep.model.resolve import ask_hub

    remedy = (
        "copy the files of the data set to this machine and give their path, or start on a machine with network access"
    )
    try:
        status = ask_hub(name, given, "cannot be loaded", remedy, "datasets")
    except Refusal as refusal:
        return refusal
    if status in (401, 403, 404):
        why = f"the hub has no data set {name} that you may read ({status})"
        return Refusal.at(
            given, why, "check the name; for a private or gated data set, set HF_TOKEN", code="hub-access"
        )
    return None


@contextmanager
def _from_its_cache(datasets: Any, *, only: bool) -> Iterator[None]:
    """If `only` is true, the package datasets uses only its local cache, and no network, inside the `with` block."""
    from huggingface_hub import constants

    switches = [(datasets.config, "HF_HUB_OFFLINE"), (constants, "HF_HUB_OFFLINE")]
    before = [getattr(*switch) for switch in switches]
    try:
        for switch, was in zip(switches, before, strict=True):
            setattr(*switch, only or was)
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            setattr(*switch, was)


def _info(given: str, batches: list[pa.RecordBatch]) -> FileInfo:
    """Returns the identity of hub rows. The identity is a hash of the rows as JSON lines, so it does not depend on how
    the package datasets stores the rows."""
    digest, size, rows = hashlib.sha256(), 0, 0
    for batch in batches:
        for start in range(0, batch.num_rows, 1024):
            for row in batch.slice(start, 1024).to_pylist():
                line = json.dumps(row, sort_keys=True, default=_plain).encode() + b"\n"
                digest.update(line)
                size += len(line)
        rows += batch.num_rows
    return FileInfo(given, rows, size, digest.hexdigest())


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
