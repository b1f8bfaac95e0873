"""Reads data files row by row, for data sets that do not fit into memory (`data.streaming`).

A shard is one data file. Rows have the same values and origins as in `data/sources/read.py`, but a damaged or invalid
row is found only when it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.sources.find_files import DataFile, locate
from lockstep.data.sources.formats import (
    check_values,
    csv_header,
    csv_records,
    is_complete,
    json_line,
    repeats,
    text_pieces,
)
from lockstep.data.sources.read import HUB, with_text_unit
from lockstep.data.sources.rowset import LineOrigin, Problems
from lockstep.errors import Refusal
from lockstep.types import Origin, Row

OriginRow = tuple[Origin, Row]

_BATCH_ROWS = 256
# The identity of a shard covers its size, its start and its end. Hashing all bytes of a huge data set takes hours.
_HASHED_BYTES = 1 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class Shard:
    """A data file whose rows are read one after the other."""

    file: DataFile

    @property
    def name(self) -> str:
        return self.file.name

    def rows(self, first: int = 0) -> Iterator[OriginRow]:
        """Yields the rows with their origins, from row number `first` on. Rows before `first` are skipped."""
        if self.file.format == "parquet":
            return self._parquet(first)
        if self.file.format == "arrow":
            return islice(self._arrow(), first, None)
        return islice(self._text(), first, None)

    @property
    def is_plain_text(self) -> bool:
        """Whether the file is a .txt file, whose rows have only the column `text`."""
        return self.file.format.startswith("txt")

    def described(self) -> dict[str, object]:
        """Returns the identity of the file: its size, and a hash of its size, start and end."""
        size = self.file.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.file.path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(_HASHED_BYTES, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
        return {"name": self.name, "rows": None, "bytes": size, "sha256": digest.hexdigest()}

    def check(self, problems: Problems) -> None:
        """Finds problems that do not need all rows of the file."""
        with self.file.path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
        if head == _LFS_POINTER:
            remedy = "run git lfs pull in the cloned repository"
            problems.add(self.name, "is a git-LFS pointer, not the data", remedy, code="damaged-file")
        elif not head:
            problems.add(self.name, "is empty", code="no-rows")
        elif self.file.format == "parquet":
            if is_complete(self.name, self.file.path, problems):
                with pq.ParquetFile(self.file.path) as table:
                    repeats(self.name, table.schema_arrow.names, problems)
        elif self.file.format == "json":
            remedy = "write one object per line to a .jsonl file, or set data.streaming=false"
            problems.add(self.name, "a .json file can only be read as a whole", remedy, code="unsupported-format")

    def _parquet(self, first: int) -> Iterator[OriginRow]:
        with _damage_reported(self.name), pq.ParquetFile(self.file.path) as table:
            groups, start = list(range(table.num_row_groups)), 0
            while groups and start + table.metadata.row_group(groups[0]).num_rows <= first:
                start += table.metadata.row_group(groups.pop(0)).num_rows
            batches = table.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False) if groups else ()
            yield from self._from_batches(batches, start, first)

    def _arrow(self) -> Iterator[OriginRow]:
        with _damage_reported(self.name), pa.memory_map(str(self.file.path)) as source:
            try:
                table = pa.ipc.open_file(source)
                batches: Iterator[Any] = map(table.get_batch, range(table.num_record_batches))
            except pa.ArrowInvalid:  # an Arrow stream, as the package datasets writes it
                source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            yield from self._from_batches(batches, 0, 0)

    def _from_batches(self, batches: Any, start: int, first: int) -> Iterator[OriginRow]:
        for batch in batches:
            skipped = min(max(0, first - start), batch.num_rows)
            problems = Problems(self.name)
            check_values(self.name, [batch], problems, start)
            problems.refuse()
            for begin in range(skipped, batch.num_rows, _BATCH_ROWS):
                for number, row in enumerate(batch.slice(begin, _BATCH_ROWS).to_pylist(), start=start + begin):
                    yield Origin(self.name, number), row
            start += batch.num_rows

    def _text(self) -> Iterator[OriginRow]:
        with _damage_reported(self.name), self._opened() as stream:
            if self.file.format == "jsonl":
                yield from self._json_lines(stream)
                return
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="" if self._delimiter else "\n")
            if self._delimiter:
                yield from self._csv(text)
            elif self.file.format == "txt.document":
                content = text.read()
                if content.strip():
                    yield Origin(self.name, 0), {"text": content}
            else:
                for line, piece in text_pieces(text, self.file.format.removeprefix("txt.")):
                    yield LineOrigin(self.name, line), {"text": piece}

    @property
    def _delimiter(self) -> str:
        return _DELIMITERS.get(self.file.format, "")

    def _opened(self) -> BinaryIO:
        if self.name.lower().endswith(".gz"):
            return gzip.open(self.file.path, "rb")  # type: ignore[return-value]
        return self.file.path.open("rb")

    def _json_lines(self, stream: BinaryIO) -> Iterator[OriginRow]:
        for line, raw in enumerate(stream, start=1):
            row = json_line(self.name, line, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw)
            if row is not None:
                yield LineOrigin(self.name, line), row

    def _csv(self, text: io.TextIOWrapper) -> Iterator[OriginRow]:
        problems = Problems(self.name)
        records = csv_records(self.name, text, problems, self._delimiter)
        header = csv_header(self.name, next(records, None), problems, self._delimiter)
        problems.refuse()
        for line, fields in records:
            if header is None or len(fields) != len(header):
                why = f"has {len(fields)} fields, but the header has {len(header or ())}"
                raise Refusal.at(LineOrigin(self.name, line), why, code="invalid-csv")
            yield LineOrigin(self.name, line), dict(zip(header, fields, strict=True))
        problems.refuse()


@contextmanager
def _damage_reported(name: str) -> Iterator[None]:
    """Turns errors of the file system and of the decoders into refusals."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Refusal.at(name, f"is not UTF-8: {error}", "save the file as UTF-8", code="not-utf8") from error
    except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException) as error:
        raise Refusal.at(
            name, f"is truncated or damaged: {error}", "copy or download it again", code="damaged-file"
        ) from error
    except OSError as error:
        raise Refusal.at(name, f"cannot be read: {error.strerror or error}", code="unreadable") from error


def open_shards(path: str, sample_by: str) -> tuple[list[Shard], Sequence[str]]:
    """Returns the data files of a path, sorted by name, and the files that are not read. Reads no rows."""
    if path.startswith(HUB):
        remedy = "download the files of the data set and give their path, or set data.streaming=false"
        raise Refusal.at(path, "a data set of the hub cannot be streamed", remedy, code="unsupported-combination")
    found = locate(path, None)
    shards = [Shard(file) for file in with_text_unit(found.files, sample_by)]
    problems = Problems(path)
    for shard in shards:
        with _damage_reported(shard.name):
            shard.check(problems)
    problems.refuse()
    return shards, found.ignored
