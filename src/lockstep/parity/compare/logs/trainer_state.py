"""`trainer_state.json` of transformers' Trainer and of TRL: the list `log_history`. Its first update is step 1."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import Points, numbers, whole

FILE = "trainer_state.json"
HISTORY = "log_history"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


def points(file: str, state: dict[str, Any]) -> Points:
    found = Points()
    history = state[HISTORY]
    for index, row in enumerate(history if isinstance(history, list) else []):
        step = whole(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            raise Refusal.at(f"{file}, {HISTORY}[{index}]", "has no step", "restore the file")
        found.add(step, numbers(row, frozenset({"step"})))
    found.planned = whole(state.get("max_steps"))
    return found


def cut_short(file: str, error: ValueError) -> Points:
    """Refuse a state that is no whole JSON, by the position where it breaks off."""
    where = f" line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    raise Refusal.at(f"{file}{where}", "a trainer's state that is cut short or damaged", "restore the file")


def newest(files: Sequence[Path]) -> Path | None:
    """Of the states of one run: the one beside the checkpoints, else the last checkpoint's, which holds the others."""
    if not files or any(file.name != FILE for file in files):
        return None
    numbered = {file: _CHECKPOINT.search(file.parent.name) for file in files}
    above = [file for file, match in numbered.items() if match is None]
    if len(above) == 1 and all(file.parent.parent == above[0].parent for file in files if file != above[0]):
        return above[0]
    if above or len({file.parent.parent for file in files}) != 1:
        return None
    return max(files, key=lambda file: int(match.group(1)) if (match := numbered[file]) else 0)
