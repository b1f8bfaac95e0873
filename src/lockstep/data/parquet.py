"""Parquet files as Arrow batches, read whole and checked whole."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.problems import Problems
from lockstep.types import Origin

_MAGIC = b"PAR1"
_BATCH_ROWS = 8192  # small enough that no batch of long answers passes Arrow's 2 GiB limit for a string column


def read_parquet(name: str, path: Path, problems: Problems) -> list[pa.RecordBatch]:
    """The file's batches, or nothing if there is a problem."""
    if not _is_whole(name, path, problems):
        return []
    try:
        # ParquetFile, not read_table: that would add columns for parents called "key=value".
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            twice = sorted({column for column in names if names.count(column) > 1})
            if twice:
                problems.add(name, f"has the column {', '.join(map(repr, twice))} twice")
                return []
            batches = [batch for batch in file.iter_batches(_BATCH_ROWS) if batch.num_rows]
    except (pa.ArrowException, OSError) as error:
        problems.add(name, f"damaged parquet: {error}", "copy or download it again")
        return []
    _check_values(name, batches, problems)
    return batches


def _is_whole(name: str, path: Path, problems: Problems) -> bool:
    """Parquet begins and ends with the same four bytes; a copy that was cut off has only the first."""
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(-min(len(_MAGIC), path.stat().st_size), 2)
        tail = file.read()
    if head != _MAGIC:
        problems.add(name, "is not a parquet file: it does not begin with PAR1")
    elif tail != _MAGIC or path.stat().st_size < 3 * len(_MAGIC):
        problems.add(name, "is truncated: the footer of the parquet file is missing", "copy or download it again")
    else:
        return True
    return False


def _check_values(name: str, batches: list[pa.RecordBatch], problems: Problems) -> None:
    """Arrow does not look at string bytes when it reads, so text that is not UTF-8 would fail mid-training."""
    start = 0
    for batch in batches:
        if _fault(batch):
            for number in range(batch.num_rows):
                fault = _fault(batch.slice(number, 1))
                if fault:
                    problems.add(Origin(name, start + number), f"invalid value: {fault}")
        start += batch.num_rows


def _fault(batch: pa.RecordBatch) -> str:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error)
    return ""
