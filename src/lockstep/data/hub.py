"""Data sets of the Hugging Face hub, through the `datasets` package."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data.rowset import ArrowPart, FileInfo, RowSet
from lockstep.data.schema import kind_of_arrow
from lockstep.errors import Refusal, missing_extra

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = "hub:"
_FORM = "write hub:owner/name:config:split; the config may be left empty, as in hub:owner/name::train"


@dataclass(frozen=True)
class HubName:
    """`hub:name[:config[:split]]`, taken apart. A split may be a slice and hold colons itself: train[:100]."""

    name: str
    config: str | None
    split: str | None


def parse_hub_name(given: str) -> HubName:
    name, config, split = [*given.removeprefix(PREFIX).split(":", 2), "", ""][:3]
    if not name:
        raise Refusal.at(given, "names no data set", _FORM)
    return HubName(name, config or None, split or None)


def read_hub(given: str) -> RowSet:
    """The rows of one split of a hub data set, kept in Arrow."""
    wanted = parse_hub_name(given)
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "hub", given) from error
    try:
        loaded = datasets.load_dataset(wanted.name, wanted.config, split=wanted.split)
    except Exception as error:  # the package lets network, hub and parser errors of many libraries through
        raise Refusal.at(given, f"cannot be loaded: {error}", _FORM) from error
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            # Taking the first would train on whatever happens to stand there, perhaps the test rows.
            raise Refusal.at(given, f"has several splits: {', '.join(loaded)}", _FORM)
        loaded = next(iter(loaded.values()))
    table: pa.Table = loaded.with_format("arrow")[:]
    if not len(table):
        raise Refusal.at(given, "has no rows")
    shape = {column.name: kind_of_arrow(column.type) for column in table.schema}
    batches = table.to_batches()
    return RowSet([ArrowPart(_info(given, batches), shape, batches)])


def _info(given: str, batches: list[pa.RecordBatch]) -> FileInfo:
    """Hashes the rows as JSON lines: the same rows hash alike however the package cached or chunked them."""
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
