"""A row's own columns as JSON and back, with what parquet can hold and JSON has no word for."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

# By the word that stands for it: the type, to text, and back. A datetime is also a date, so it comes first.
_KINDS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time, time.isoformat, time.fromisoformat),
    "$microseconds": (
        timedelta,
        lambda value: str(value // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
    "$decimal": (Decimal, str, Decimal),
    "$bytes": (bytes, bytes.hex, bytes.fromhex),
}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_worded)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_typed)


def _worded(value: Any) -> dict[str, str]:
    for word, (kind, to_text, _) in _KINDS.items():
        if isinstance(value, kind):
            return {word: to_text(value)}
    raise TypeError(f"a row cannot hold a {type(value).__name__}")


def _typed(found: dict[str, Any]) -> Any:
    [word, *more] = found or [""]
    return found if more or word not in _KINDS else _KINDS[word][2](found[word])
