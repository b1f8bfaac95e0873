"""Answers as people write them, and what no rule may score."""

from __future__ import annotations

import pytest

from lockstep.errors import Refusal
from lockstep.reward import rules
from lockstep.reward.rules import (
    RULES,
    exact_score,
    extract_answer,
    gsm8k_score,
    last_boxed,
    math_score,
    rule_for,
    unmatched_rules,
)
from refusals import refuses


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("#### 18.", "18"),
        ("####18", "18"),
        ("#### $1,234.50", "1234.50"),
        ("#### $1,234", "1234"),
        ("#### 1234 apples", "1234"),
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
    assert gsm8k_score("#### 18", "9 + 9 = 18\n#### 18") == 1.0
    assert gsm8k_score("#### 9", "9 + 9 = 18\n#### 18") == 0.0
    assert RULES["gsm8k"](RULES["gsm8k"].example("9 + 9 = 18\n#### 18"), "9 + 9 = 18\n#### 18") == 1.0
    assert gsm8k_score("#### 19", "18") == 0.0
    assert gsm8k_score("18", "18") == 0.0
    assert gsm8k_score("18", "18", strict=False) == 1.0


def test_a_ground_truth_that_is_no_number_is_an_error_not_a_zero() -> None:
    for truth in ("eighteen", "nan", "Infinity", ""):
        with pytest.raises(Refusal, match="is not a number"):
            gsm8k_score("#### 18", truth)


def test_a_source_without_a_rule_is_refused() -> None:
    with pytest.raises(Refusal, match=r"did you mean openai/gsm8k\?") as refused:
        rule_for("openai/gsm8")
    assert "data_source 'openai/gsm8'" in str(refused.value)
    assert "reward.rules: {openai/gsm8: RULE}" in str(refused.value)
    with pytest.raises(Refusal, match=r"did you mean mine/sums\?"):
        rule_for("mine/sum", {"mine/sums": "exact"})


def test_the_setting_stands_over_the_built_in_rules() -> None:
    assert rule_for("arithmetic").name == "gsm8k"
    assert rule_for("arithmetic")("#### 18.", "18") == 1.0
    assert rule_for("arithmetic", {"arithmetic": "exact"}).name == "exact"
    assert rule_for("mine", {"mine": "gsm8k_flexible"})("it is 18", "18") == 1.0


def test_an_entry_that_is_nearly_a_data_source_is_refused() -> None:
    """Its rows would be judged by the built-in rule, without a word."""
    (problem,) = unmatched_rules({"openai/gsm8": "math"}, ["openai/gsm8k"])
    assert problem.where == "reward.rules.openai/gsm8"
    assert problem.remedy == "did you mean openai/gsm8k? Else remove it"
    assert not unmatched_rules({"openai/gsm8k": "math", "openai/gsm8": "math"}, ["openai/gsm8k"])
    assert not unmatched_rules({"lighteval/MATH": "math"}, ["openai/gsm8k"])  # of another dataset
    assert not unmatched_rules({"lighteval/MATH-Hard": "math", "aime24": "math"}, ["lighteval/MATH", "aime25"])


def test_an_unknown_rule_is_refused_with_the_nearest() -> None:
    with refuses("reward.rules.mine", "unknown-name", "'gsm8'", remedy="did you mean gsm8k?"):
        rule_for("mine", {"mine": "gsm8"})


def test_math_without_its_package_is_refused_naming_the_extra(monkeypatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match=r"math-verify.*(?s:.*)install .*\[math\]"):
        rule_for("mine", {"mine": "math"})


@pytest.mark.parametrize(
    ("name", "texts", "answer"),
    [
        ("gsm8k", ["#### 18", "#### 18.", "#### 18.0", "#### 018", "#### +18", "#### $18.00"], "18"),
        ("gsm8k", ["#### .5", "#### 0.50", "#### 0.5"], "0.5"),
        ("gsm8k", ["#### -0", "#### 0", "#### 0.0"], "0"),
        ("gsm8k", ["#### -3", "#### -$3.0"], "-3"),
        ("gsm8k", ["#### 100", "#### 100.0"], "100"),
        ("gsm8k", ["18", "#### x", ""], None),
        ("gsm8k", ["#### 12345678901234567890123456789012345678901"], "12345678901234567890123456789012345678901"),
        ("gsm8k_flexible", ["so 18", "18.0 it is", "#### 18"], "18"),
        ("exact", ["yes", " yes\n"], "yes"),
        ("exact", ["", " "], None),
        ("math", ["", "18", r"\boxed{}"], None),
        ("math", [r"\boxed{18}", r"\boxed{18.0}", r"\boxed{ 18. }", r"\boxed{36/2}", r"\boxed{\$18}"], "18"),
        ("math", [r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac{2}{4}}", r"\boxed{0.5}", r"\boxed{.50}"], "1/2"),
        ("math", [r"\boxed{-1,234}", r"\boxed{-1234}"], "-1234"),
    ],
)
def test_equal_answers_are_equal_strings(name, texts, answer) -> None:
    assert [RULES[name].answer(text) for text in texts] == [answer] * len(texts)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_flexible", "exact"])
@pytest.mark.parametrize("truth", ["18", "-3", "1,234", "0.5"])
def test_examples_are_right(name, truth) -> None:
    rule = RULES[name]
    assert rule(rule.example(truth), truth) == 1.0
    assert rule("", truth) == 0.0


def test_exact() -> None:
    assert exact_score(" Paris\n", "Paris") == 1.0
    assert exact_score("paris", "Paris") == 0.0
    assert exact_score("Paris.", "Paris") == 0.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b{c}d}e} f}", "a{b{c}d}e"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} no, \boxed{2", "1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {x}", "x"),
        (r"\fbox{1} \fboxed{2}", "2"),
        (r"} \boxed{3}", "3"),
        (r"\boxed{ \boxed{4}", "4"),
        (r"\boxed{}", None),
        ("18", None),
        (r"\boxed 18", None),
        ("", None),
    ],
)
def test_the_last_box(text, inside) -> None:
    assert last_boxed(text) == inside


def test_a_long_text_of_open_boxes_is_read_quickly() -> None:
    assert last_boxed(r"\boxed{" * 100_000 + "1}") == "1"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\dfrac12}", "0.5", 1.0),
        (r"\boxed{1/2}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{1/2}", r"\boxed{0.5}", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{x + x}", "2x", 1.0),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{\left(1, 2\right)}", "(1,2)", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{\begin{pmatrix}1&2\end{pmatrix}}", "5", 0.0),
        (r"\boxed{2}", r"\frac{1}{2}", 0.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        (r"\boxed{x+2}", "x+1", 0.0),
        (r"\boxed{}{", "5", 0.0),
        (r"\boxed{\frac{1}{0}}", "5", 0.0),
        ("5", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math(text, truth, score) -> None:
    pytest.importorskip("math_verify")
    assert math_score(text, truth) == score


def test_math_votes_by_the_term_and_its_examples_are_right() -> None:
    pytest.importorskip("math_verify")
    rule = RULES["math"]
    assert rule.answer(r"\boxed{x+1}") == rule.answer(r"\boxed{1 + x}") != rule.answer(r"\boxed{x+2}")
    for truth in (r"\frac{3}{4}", r"\boxed{7}", "$x^2$", "(1,2)"):
        assert rule(rule.example(truth), truth) == 1.0
        assert rule("", truth) == 0.0


def test_math_refuses_an_empty_truth() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(Refusal, match="is empty"):
        math_score(r"\boxed{1}", " ")


@pytest.mark.parametrize(
    ("name", "truth", "problem"),
    [
        ("gsm8k", "eighteen", "'eighteen' is not a number"),
        ("gsm8k", "$1,234", None),
        ("exact", " ", "is empty"),
        ("exact", "x", None),
        ("math", "", "is empty"),
    ],
)
def test_truths_that_no_answer_can_match_are_told(name, truth, problem) -> None:
    assert RULES[name].truth_problem(truth) == problem


def test_a_missing_package_stops_only_what_needs_it(tmp_path, monkeypatch) -> None:
    """Rows of MATH are known to need math-verify; a run whose own function judges them does not."""
    import torch

    from lockstep.recipe.keys_reward import Reward
    from lockstep.reward.scorer import Scorer

    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    (tmp_path / "f.py").write_text("def f(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    function = f"{tmp_path / 'f.py'}:f"
    for weights in ({}, {"rule": 0.0, "function": 1.0}):
        reward = Reward(function=function, weights=weights, workers=1)
        with Scorer.open(reward, ["lighteval/MATH"], torch.device("cpu")) as scorer:
            assert scorer.rule_of("lighteval/MATH") is None
    with pytest.raises(Refusal, match="math-verify"):
        Scorer.open(Reward(), ["lighteval/MATH"], torch.device("cpu"))


@pytest.mark.slow
def test_built_in_rules_that_may_never_end_are_not_checked_at_once() -> None:
    import torch

    from lockstep.reward.row_rewards import RuleJudge, judged_by

    with judged_by({}, ["openai/gsm8k"], torch.device("cpu")) as judge:
        assert isinstance(judge, RuleJudge)
    with judged_by({}, ["openai/gsm8k", "HuggingFaceH4/MATH-500"], torch.device("cpu")) as judge:
        assert not isinstance(judge, RuleJudge)
