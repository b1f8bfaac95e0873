"""ms-swift's `logging.jsonl`: a line each time that the trainer logs, then one with the whole history again.

Its step is `"global_step/max_steps": "10/93"`, with Megatron underneath `"iteration": "10/93"`. The first update is 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points, numbers
from lockstep.parity.compare.logs.table import LogRow, damaged
from lockstep.parity.compare.logs.text import number
from lockstep.parity.compare.logs.trainer_state import HISTORY

STEPS = ("global_step/max_steps", "iteration")
_STEP = re.compile(r"(\d{1,18})/(\d{1,18})")


def is_row(row: Mapping[str, Any]) -> bool:
    return any(isinstance(row.get(name), str) and "/" in row[name] for name in STEPS)


def points(file: str, rows: Iterator[LogRow]) -> Points:
    """Every line but those that repeat the history. Numbers may be written as texts."""
    found = Points()
    for line, row in rows:
        if HISTORY in row:
            continue
        written = next((row[name] for name in STEPS if name in row), None)
        step = _STEP.fullmatch(written) if isinstance(written, str) else None
        if step is None or int(step.group(1)) > LARGEST_STEP:
            raise damaged(file, line, json.dumps(row), f"line with a step like 10/93 as {STEPS[0]}")
        plain = {name: _plain(value) for name, value in row.items() if name not in STEPS}
        found.add(int(step.group(1)), numbers(plain))
        found.planned = int(step.group(2))
    return found


def _plain(value: Any) -> Any:
    return parsed if isinstance(value, str) and (parsed := number(value)) is not None else value
