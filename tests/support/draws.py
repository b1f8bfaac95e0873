"""How many examples a property test draws: a few every day, many under `make test-slow`, which sets this variable."""

from __future__ import annotations

import os

DEEP = os.environ.get("LOCKSTEP_EXAMPLES") == "deep"


def draws(daily: int, deep: int) -> int:
    return deep if DEEP else daily
