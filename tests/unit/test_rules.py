"""Answers as people write them, and what no rule may score."""

from __future__ import annotations

import pytest

from lockstep.errors import Refusal
from lockstep.reward.rules import extract_answer, gsm8k_score, rule_for


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("#### 18.", "18"),
        ("####18", "18"),
        ("#### $1,234.50", "1234.50"),
        ("#### $ 7 dollars", "7"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### 12 apples and 3 pears", "12"),
        ("#### 1\nno, wait\n#### 2", "2"),
        ("#### .5", ".5"),
        ("#### **18**", "18"),
        ("#### 18\n", "18"),
        ("#### 1,234,567", "1234567"),
        ("#### 3/4", None),
        ("#### 3 + 4 = 7", None),
        ("#### 10-15", None),
        ("#### 1e5", None),
        ("#### 1,00,000", None),
        ("##### 5", None),
        ("the answer is 18", None),
        ("#### none", None),
        ("", None),
    ],
)
def test_strict(text, answer) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 and 4 give 7.", "7"),
        ("it costs $1,000", "1000"),
        ("nothing", None),
        ("#### 5", "5"),
        ("20 - 2", "2"),
        ("10-15", "15"),
        ("it is -4", "-4"),
    ],
)
def test_flexible_takes_the_last_number(text, answer) -> None:
    assert extract_answer(text, strict=False) == answer


def test_scores() -> None:
    assert gsm8k_score("#### 18.0", "18") == 1.0
    assert gsm8k_score("#### 1,001", "1001") == 1.0
    assert gsm8k_score("#### 1,001", "1,001") == 1.0
    assert gsm8k_score("#### 19", "18") == 0.0
    assert gsm8k_score("18", "18") == 0.0
    assert gsm8k_score("18", "18", strict=False) == 1.0


def test_a_ground_truth_that_is_no_number_is_an_error_not_a_zero() -> None:
    for truth in ("eighteen", "nan", "Infinity", ""):
        with pytest.raises(Refusal, match="is not a number"):
            gsm8k_score("#### 18", truth)


def test_a_source_without_a_rule_is_refused() -> None:
    with pytest.raises(Refusal, match=r"did you mean openai/gsm8k\?"):
        rule_for("openai/gsm8")
