"""What the process of a user's function may answer, and how it is written: a line of JSON with the number of the call.

The function is not trusted with more than its score, so nothing that it sends is ever unpickled; what is no answer in
this form is garbage.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from lockstep.functions import LONGEST_WHY

# Of one line. A score with thousands of further numbers fits.
LONGEST_LINE = 2**20
# The answer to loading the function; calls count from 1.
LOADING = 0


@dataclass(frozen=True)
class Loaded:
    """The function is there and can be called."""


@dataclass(frozen=True)
class Unusable:
    """The function cannot be called at all."""

    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Given:
    """What a call gave: its score, and the further numbers of a dict by name."""

    score: float
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """A call that gave no score. `spent`: the process cannot be used any more. `log`: where its last lines are kept."""

    why: str
    spent: bool = False
    log: str | None = None


Reply = Loaded | Unusable | Given | Raised


def line_of(call: int, reply: Reply) -> bytes:
    """What `read_line` reads."""
    fields: dict[str, Any] = {"call": call, "kind": type(reply).__name__, **vars(reply)}
    line = json.dumps(fields, allow_nan=False).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        return line_of(call, Raised("returned more numbers than can be logged"))
    return line


def read_line(line: bytes) -> tuple[int, Reply]:
    """The number of the call and the answer to it; ValueError for what is no such line."""
    try:
        fields = json.loads(line)
        call, kind = fields.pop("call"), fields.pop("kind")
        reply = _read(kind, fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no answer: {line[:80]!r}") from error
    if type(call) is not int or reply is None:
        raise ValueError(f"no answer: {line[:80]!r}")
    return call, reply


def _read(kind: str, fields: dict[str, Any]) -> Reply | None:
    """The reply, or None where a field is not what it should be."""
    reply: Reply
    if kind == "Given":
        reply = Given(fields["score"], fields["more"])
        numbers = [reply.score, *reply.more.values()]
        good = all(isinstance(entry, int | float) and number(entry) is not None for entry in numbers)
    elif kind == "Raised":
        reply = Raised(fields["why"][: 2 * LONGEST_WHY], fields["spent"])
        good = isinstance(reply.why, str) and isinstance(reply.spent, bool)
    elif kind == "Unusable":
        reply = Unusable(fields["why"], fields["remedy"])
        good = isinstance(reply.why, str) and isinstance(reply.remedy, str)
    else:
        reply, good = Loaded(), kind == "Loaded"
    return reply if good else None


def number(value: Any) -> float | None:
    """As a plain float; None for what is no finite number. Text is no number."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        plain = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return plain if math.isfinite(plain) else None
