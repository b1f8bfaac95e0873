"""verl's reward rules. The expected scores are those of verl 0.4.1, 0.9.0 and 0.9.1; `make test-migration` compares
thousands of texts with verl itself (tests/migration/test_verl_rewards.py)."""

from __future__ import annotations

import json

import pytest

from lockstep.compat.key_table import load_tables
from lockstep.reward.rules import gsm8k_score, rule_for, rule_name, rule_named
from refusals import refuses

LONG = "so " * 100


@pytest.mark.parametrize(("rule", "text", "truth", "score"), [
    ("gsm8k@0.9", "#### 18", "18", 1.0),
    ("gsm8k@0.9", "#### 1,234", "1234", 1.0),
    ("gsm8k@0.9", "####18", "18", 0.0),
    ("gsm8k@0.9", "#### $18", "18", 0.0),
    ("gsm8k@0.9", "#### 18.", "18", 0.0),
    ("gsm8k@0.9", "#### 18.00", "18", 0.0),
    ("gsm8k@0.4", f"#### 18 {LONG}", "18", 1.0),
    ("gsm8k@0.5", f"#### 18 {LONG}", "18", 0.0),
    ("gsm8k_flexible@0.9", "it is 18 .", "18", 1.0),
    ("gsm8k_flexible@0.9", "1,234", "1234", 0.0),
    ("math@0.9", r"\boxed{50\%}", "50", 1.0),
    ("math@0.9", r"\boxed{3.0}", "3", 0.0),
    ("math@0.9", r"\boxed{x=\tfrac12}", "0.5", 1.0),
    ("math@0.9", r"\boxed{3/4}", r"\frac{3}{4}", 1.0),
    ("math@0.9", r"$\boxed 5$ is", "5", 1.0),
    ("math@0.9", r"\boxed{\sqrt3\text{ cm}}", r"\sqrt{3}", 1.0),
    ("math@0.9", r"\boxed{\frac", r"\frac", 0.0),
    ("math@0.9", r"\fbox{5}", "5", 0.0),
    ("math_dapo@0.9", "Answer: $34$ dollars", "34", 1.0),
    ("math_dapo@0.9", "Answer: 35", "34", -1.0),
    ("math_dapo@0.4", r"\boxed{34}", "34", -1.0),
    ("math_dapo@0.9.0", r"\boxed{34}", "34", -1.0),
    ("math_dapo@0.9.1", r"\boxed{34}", "34", 1.0),
    ("math_dapo@0.9", rf"\boxed{{34}} {LONG}", "34", -1.0),
    ("search_r1@0.9", "<answer>The Paris.</answer>", json.dumps({"target": ["paris"]}), 1.0),
    ("search_r1@0.9", "<answer>Paris</answer>" * 11, json.dumps({"target": "paris"}), 0.25),
    ("search_r1@0.9", "Paris", json.dumps({"target": ["paris"]}), 0.0),
])  # fmt: skip
def test_the_scores_are_verls(rule: str, text: str, truth: str, score: float) -> None:
    assert rule_named(f"verl/{rule}", "reward.rules.x")(text, truth) == score


def test_lockstep_s_own_rule_stays_the_default() -> None:
    assert rule_for("openai/gsm8k").name == "gsm8k"
    assert gsm8k_score("####18", "18") == 1.0


@pytest.mark.parametrize(("name", "remedy"), [
    ("verl/gsm8@0.9", "verl/gsm8k@0.9"),
    ("verl/gsm8k", "verl/gsm8k@0.9"),
    ("verl/gsm8k@1.2", "0.3 to 0.9"),
])  # fmt: skip
def test_an_unknown_rule_of_verl_is_refused(name: str, remedy: str) -> None:
    with refuses("reward.rules.mine", "unknown-name", name, remedy=remedy):
        rule_for("mine", {"mine": name})


def test_an_entry_with_a_star_is_for_every_source_with_this_start() -> None:
    rules = {"aime*": "exact", "aime24*": "math", "aime24_x": "gsm8k"}
    found = [rule_name(source, rules) for source in ("aime25", "aime24_y", "aime24_x", "math")]
    assert found == ["exact", "math", "gsm8k", None]


def test_every_rule_of_the_migration_table_exists_and_accepts_its_own_example() -> None:
    for version, rules in load_tables("verl")["reward_rules"].items():
        for source, name in rules.items():
            rule = rule_for(source, rules)
            assert (rule.name, name.endswith(f"@{version}")) == (name, True)
            truth = json.dumps({"target": ["42"]}) if "search" in name else "42"
            assert (rule.truth_problem(truth), rule(rule.example(truth) or "", truth)) == (None, 1.0)


def test_a_ground_truth_of_search_needs_a_target() -> None:
    problem = rule_named("verl/search_r1@0.9", "reward.rules.x").truth_problem
    assert (problem('{"target": ["a"]}'), problem('{"target": "a"}')) == (None, None)
    assert all(problem(truth) is not None for truth in ("a", "[1]", '{"target": []}', '{"target": [1]}', "{}"))
