"""What the makers of data share: rows of the RL schema, and rows as files that appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Problem, Refusal
from lockstep.run.files import replace_text, written_aside
from lockstep.types import Message, Row


def rl_row(data_source: str, prompt: list[Message], truth: object, **extra_info: Any) -> Row:
    """A row of mathematics in verl's schema."""
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": extra_info,
    }


def asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def answered(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def too_few(**rows: int) -> list[Problem]:
    """What is wrong with numbers of rows below 1, by their options."""
    return [
        Problem(name, f"{count} rows are not enough", "give at least 1") for name, count in rows.items() if count < 1
    ]


def write_files(folder: Path, files: Mapping[str, Sequence[Row]]) -> dict[str, int]:
    """Each of them as `name`.parquet; returns rows by file."""
    for name, rows in files.items():
        write_rows(folder / f"{name}.parquet", rows)
    return {f"{name}.parquet": len(rows) for name, rows in files.items()}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """As parquet or, by another ending of the name, as JSON lines."""
    if path.parent.exists() and not path.parent.is_dir():
        raise Refusal.at(path.parent, "is a file, not a folder", "give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    with written_aside(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), aside)
