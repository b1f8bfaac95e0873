"""The csv that tensorboard's page exports: `Wall time,Step,Value`, a file for one curve, which it does not name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import Points, whole
from lockstep.parity.compare.logs.names import known_name
from lockstep.parity.compare.logs.table import csv_rows, damaged

VALUE = "Value"
HEADER = ["Wall time", "Step", VALUE]
_TAG = re.compile(r"-tag-(.+?)(?: ?\(\d+\))?$")


def is_header(names: Sequence[str]) -> bool:
    return list(names) == HEADER


def points(file: str, text: str) -> Points:
    found = Points()
    for line, row in csv_rows(file, text):
        step = whole(row.get("Step"))
        if step is None or VALUE not in row:
            raise damaged(file, line, ",".join(map(str, row.values())), "row of a time, a step and a value")
        found.add(step, {VALUE: row[VALUE]})
    return found


def named(path: Path, names: Mapping[str, str]) -> dict[str, str]:
    """`names` with what the value is: as they say, else as the file is called, else it is asked for."""
    if VALUE in names:
        return dict(names)
    tag = _TAG.search(path.stem)
    ours = known_name(tag.group(1) if tag else path.stem) or (tag.group(1) if tag else None)
    if ours is None:
        raise Refusal.at(
            path,
            f"a csv export of tensorboard, which does not say what its {VALUE} is",
            "say it with --value NAME (train/loss, say), or call the file as tensorboard does: run-X-tag-NAME.csv",
        )
    return {**names, VALUE: ours}
