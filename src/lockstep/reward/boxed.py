r"""The rule `math`: the last `\boxed{...}` of a text, compared as mathematics by the package math-verify.

Nothing here is limited in time: an answer can be built to keep the comparison busy for ever. The scorer therefore
compares in a process that it can kill (`math_judge.py`).
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from lockstep.data.truths import last_boxed
from lockstep.errors import Refusal

_NUMBER = re.compile(r"([-+]?)(?:(\d+|\d{1,3}(?:,\d{3})+)?(\.\d+)?|(\d+)/0*([1-9]\d*)|\\frac\{(\d+)\}\{0*([1-9]\d*)\})")
# A longer answer is compared by its letters alone when votes are counted.
_LONGEST_VOTE = 1000
# What math-verify raises when two things have no comparison (a matrix with an interval ...): they are not equal.
_NOT_COMPARABLE = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError, KeyError, IndexError)


def boxed_example(ground_truth: str) -> str:
    return ground_truth if last_boxed(ground_truth) else rf"\boxed{{{_bare(ground_truth)}}}"


def boxed_answer(text: str) -> str | None:
    """The boxed answer in one spelling: numbers as fractions, other terms as sympy orders them.

    Equal terms that need working out (`2x` and `x+x`) stay apart.
    """
    boxed = last_boxed(text)
    if boxed is None:
        return None
    if len(boxed) > _LONGEST_VOTE:
        return _plain(boxed)
    number = _as_number(boxed)
    if number is not None:
        return number
    try:
        parsed = _parse(boxed)
    except _NOT_COMPARABLE:
        parsed = []
    return re.sub(r"\s+", " ", str(parsed[0])) if parsed else _plain(boxed)


def math_score(text: str, ground_truth: str) -> float:
    r"""1.0 when the last `\boxed{...}` equals the ground truth as mathematics, else 0.0. Words are compared as words.

    The ground truth may stand in a box or in dollars, or bare.
    """
    from math_verify import verify

    truth = last_boxed(ground_truth) or _bare(ground_truth)
    if not truth:
        raise Refusal.at("ground_truth", "is empty", "mend the row")
    answer = last_boxed(text)
    if answer is None:
        return 0.0
    gold = _parse(truth)
    try:
        same = verify(gold, _parse(answer), timeout_seconds=None, raise_on_error=True)
    except _NOT_COMPARABLE:
        return 0.0
    return 1.0 if same else 0.0


def _parse(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # It warns that no time limit is set; the limit is the process's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    boxed = rf"\boxed{{{latex}}}"
    return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True)


def _bare(latex: str) -> str:
    return latex.strip().strip("$").strip()


def _plain(latex: str) -> str:
    """Without what only changes the looks."""
    looks = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!$ ]|\s+", "", latex)
    return _bare(re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", looks)).rstrip(".")


def _as_number(latex: str) -> str | None:
    """A whole number, a decimal or a fraction as a fraction in lowest terms; None for anything else."""
    match = _NUMBER.fullmatch(_plain(latex))
    if not match or not any(match.groups()[1:]):
        return None
    sign, whole, decimals, *ratio = match.groups()
    top, bottom = (ratio[0] or ratio[2], ratio[1] or ratio[3])
    size = Fraction(int(top), int(bottom)) if top else Fraction((whole or "0").replace(",", "") + (decimals or ""))
    return str(-size if sign == "-" else size)
