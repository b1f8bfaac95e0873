"""LLaMA-Factory's `trainer_log.jsonl`: a line each time that the trainer logs. The first update is step 1."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.parity.compare.logs.curves import Points, numbers, whole
from lockstep.parity.compare.logs.table import LogRow, damaged

STEP, TOTAL = "current_steps", "total_steps"
_NO_METRICS = frozenset({STEP, TOTAL, "percentage"})


def is_row(row: Mapping[str, Any]) -> bool:
    return STEP in row and TOTAL in row


def points(file: str, rows: Iterator[LogRow]) -> Points:
    found = Points()
    for line, row in rows:
        step = whole(row.get(STEP))
        if step is None:
            raise damaged(file, line, json.dumps(row), f"line with a whole number as {STEP}")
        found.add(step, numbers(row, _NO_METRICS))
        found.planned = whole(row.get(TOTAL)) or found.planned
    return found
