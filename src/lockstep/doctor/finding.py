"""What a judgement says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.facts import Facts

Verdict = Literal["ok", "absent", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """Something wrong with `row`: why, and what to do."""

    row: str
    verdict: Literal["warning", "broken"]
    why: str
    remedy: str


# The facts and the chosen device, to what is wrong.
Judgement = Callable[[Facts, str], Iterator[Finding]]


def warning(row: str, why: str, remedy: str) -> Finding:
    return Finding(row, "warning", why, remedy)


def broken(row: str, why: str, remedy: str) -> Finding:
    return Finding(row, "broken", why, remedy)
