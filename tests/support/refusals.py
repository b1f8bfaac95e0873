"""Assertions about refusals: place, code, values and remedy of a problem, and not its wording."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lockstep.errors import Problem, Refusal

_PRINTED = re.compile(r"(?P<where>.+?) \[(?P<code>[a-z0-9-]+)\] (?P<why>.*?)(?: -> (?P<remedy>.*))?")


@contextmanager
def refuses(
    where: str = "", code: str = "", *values: object, remedy: str = ""
) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """The body raises a `Refusal` with a problem of this code; see `has_problem` for the other arguments."""
    with pytest.raises(Refusal) as caught:
        yield caught
    assert has_problem(caught.value, where, code, *values, remedy=remedy), caught.value


def has_problem(
    refusal: Refusal | Sequence[Problem], where: str = "", code: str = "", *values: object, remedy: str = ""
) -> bool:
    """Whether a problem has this text in its place, this code, all values in its reason and this text in its remedy."""
    return any(
        where in problem.where
        and code in ("", problem.code)
        and all(str(value) in problem.why for value in values)
        and remedy in problem.remedy
        for problem in (refusal.problems if isinstance(refusal, Refusal) else refusal)
    )


def printed_problems(text: str) -> list[Problem]:
    """The problems that a command printed. Their lines are joined again."""
    found = [_PRINTED.fullmatch(" ".join(block.split())) for block in text.split("\n\n")]
    return [Problem(one["where"], one["why"], one["remedy"] or "", code=one["code"]) for one in found if one]
