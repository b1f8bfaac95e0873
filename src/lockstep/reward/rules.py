"""Rules that check an answer: pure text in, a score out. Which rule checks a row is said by its `data_source`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from lockstep.errors import Refusal

# A number as people write it: sign, currency, thousands separators, decimals. A trailing point is punctuation.
_NUMBER = r"[-+]?\s?\$?\s?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?!\d))(?:\.\d+)?|[-+]?\$?\.\d+"
# After the mark comes one number and then, at most, words: an expression (3/4, 3 + 4 = 7) or a form such as 1e5 or
# 1,00,000 is no final number. Markdown stars around the number are let through.
_MARKED = re.compile(rf"(?<!#)####(?!#)\s*\**\s*({_NUMBER})(?![\d/^=]|[eE][-+]?\d|,\d|\s*[-+*/=]\s*[\d$])")
# In running text a minus right after a digit or a space between numbers is an operator, not a sign.
_ANY = re.compile(r"(?<![\d.,])(?:(?<!\d\s)(?<!\d\s\s)[-+]\s?)?\$?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?")


def extract_answer(text: str, *, strict: bool = True) -> str | None:
    """The final number as plain digits: what follows the last `####`, or (flexible) the last number of all.

    `#### $1,234.`, `#### 1234 apples` and `####1234` all give `1234`. None when there is no such number.
    """
    found = (_MARKED if strict else _ANY).findall(text)
    return re.sub(r"[\s$,]", "", found[-1]).removeprefix("+") if found else None


def gsm8k_score(solution: str, ground_truth: str, *, strict: bool = True) -> float:
    """1.0 when the final number equals the ground truth as a number ('18.0' is '18'), else 0.0.

    A ground truth that is no number is an error of the data, not a wrong answer.
    """
    truth = _value(re.sub(r"[\s$,]", "", ground_truth))
    if truth is None:
        raise Refusal.at("ground_truth", f"{ground_truth!r} is not a number", "mend the row")
    answer = extract_answer(solution, strict=strict)
    return 1.0 if answer is not None and _value(answer) == truth else 0.0


def _value(text: str) -> Decimal | None:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


RULES: dict[str, Callable[[str, str], float]] = {
    "arithmetic": gsm8k_score,
    "openai/gsm8k": gsm8k_score,
}


def rule_for(data_source: str) -> Callable[[str, str], float]:
    """The rule of a data source. A source without a rule is refused: it must not score 0."""
    if data_source in RULES:
        return RULES[data_source]
    near = difflib.get_close_matches(data_source, RULES, n=1)
    raise Refusal.at(
        f"data_source {data_source!r}",
        "has no rule",
        (f"did you mean {near[0]}? " if near else "") + f"rules exist for {', '.join(RULES)}",
    )
