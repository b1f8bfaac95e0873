"""Rows to parquet, aside and renamed: a reader never meets half a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.run.files import written_aside


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    if path.parent.exists() and not path.parent.is_dir():
        raise Refusal.at(str(path.parent), "is a file, not a folder", "give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), aside)
