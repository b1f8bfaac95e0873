"""verl's reward rules. The expected scores are verl's own: those of tests/data/migration/verl_rewards.json were written
by verl's functions (tests/migration/verl_reward_texts.py); `make test-migration` compares thousands of texts."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.compat.conversion_output import recipe_yaml, report
from lockstep.compat.key_table import Conversion
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.compat.verl.verl_rewards import reward_rules
from lockstep.recipe.keys_reward import Reward
from lockstep.reward import scorer as scorer_module
from lockstep.reward import verl_prime, verl_versions
from lockstep.reward.function import FunctionPart
from lockstep.reward.rules import gsm8k_score, rule_for, rule_name, rule_named
from lockstep.reward.scorer import Scorer
from lockstep.reward.verl_code import as_program, same_output, same_result
from lockstep.reward.verl_fusion import fusion_code
from lockstep.types import Failure, Origin, Question
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
    ("gsm8k@0.4.0", "#### 18 or #### 19", "18", 1.0),
    ("gsm8k@0.4.1", "#### 18 or #### 19", "18", 0.0),
    ("search_r1_subem@0.9", "<answer>in Paris</answer>", json.dumps({"target": ["paris"]}), 1.0),
    ("prime_math@0.9", "so the answer is 0.5", "50", 1.0),
    ("prime_math@0.9", r"\boxed{x+x}", "2x", 1.0),
    ("prime_math@0.9", r"\boxed{2\pi}", "6.2832", 1.0),
    ("prime_math@0.9", r"\boxed{2 billion}", "2*10^9", 1.0),
    ("prime_math@0.9", r"\boxed{3 liters}", "3", 1.0),
    ("prime_math@0.9", r"\boxed{Interval.Ropen(0, 1)}", "[0, 1)", 1.0),
    ("prime_math@0.9", r"\boxed{Interval.Ropen(0, 1)}", "[0, 1]", 0.0),
    ("geo3k@0.9", r"\boxed{2}", "2", 0.9),
    ("geo3k@0.9", r"<think>x</think> \boxed{2}", "3", 0.1),
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


@cache
def stored() -> list[list[Any]]:
    file = Path(__file__).parents[1] / "data" / "migration" / "verl_rewards.json"
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted({row[0].partition("@")[0] for row in stored()}))
def test_the_scores_are_those_that_verl_has_written(name: str) -> None:
    rows = [row for row in stored() if row[0].startswith(f"{name}@")]
    assert len(rows) >= 40
    for rule, text, truth, score in rows:
        assert rule_named(f"verl/{rule}", "reward.rules.x")(text, truth) == score, (rule, text, truth)


@pytest.mark.parametrize("version", ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "0.9.1"])
def test_every_rule_of_a_version_exists_and_accepts_its_own_example(version: str) -> None:
    rules = reward_rules(version)
    for source, name in rules.items():
        rule = rule_for(source, rules)
        assert (rule.name, name.endswith(f"@{version}")) == (name, True)
        if "code" not in name:
            truth = json.dumps({"target": ["42"]}) if "search" in name else "42"
            assert (rule.truth_problem(truth), rule(rule.example(truth) or "", truth)) == (None, 1.0)


def test_the_versions_differ_in_their_data_sources() -> None:
    rules = {version: reward_rules(version) for version in ("0.3", "0.4", "0.5", "0.6")}
    assert ["math_dapo" in rules[version] for version in rules] == [False, True, True, True]
    assert ["HuggingFaceH4/MATH-500" in rules[version] for version in rules] == [False, False, True, True]
    assert ["math" in rules[version] for version in rules] == [False, False, False, True]
    with refuses("data_source 'searchR1_x'", "no-rule"):
        rule_for("searchR1_x", rules["0.6"])


def test_a_rule_that_a_version_does_not_have_is_refused() -> None:
    with refuses("reward.rules.mine", "unknown-name", remedy="0.4"):
        rule_for("mine", {"mine": "verl/math_dapo@0.3"})


def test_a_missing_package_stops_only_the_data_sources_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_versions, "find_spec", lambda name: None)
    rules = reward_rules("0.9")
    assert rule_for("openai/gsm8k", rules).name == "verl/gsm8k@0.9"
    with refuses("package pylatexenc", "missing-package", remedy="[math]"):
        rule_for("numina_cn_k12", rules)


@pytest.mark.parametrize("text", ["__import__('os').system('true')*\\pi", "open('x')+\\pi", "().__class__*\\pi"])
def test_code_in_a_response_is_not_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("os.system", ran.append)
    monkeypatch.setattr("builtins.open", lambda *given, **_: ran.append(given))
    # sympy's parser evaluates its text.
    monkeypatch.setattr("sympy.parsing.sympy_parser.parse_expr", lambda text, **_: ran.append(text))
    for version in ("0.3", "0.9"):
        score = rule_named(f"verl/prime_math@{version}", "x")
        assert (
            score(f"\\boxed{{{text}}}", "3") == score(f"Matrix([{text}])", "\\begin{pmatrix} 1 \\end{pmatrix}") == 0.0
        )
    assert ran == []


def test_arithmetic_is_evaluated_as_in_python() -> None:
    for text in ("2*3.14", "-(1+2)/4", "(1, [2, {3}])", "1 < 2 < 3", "0 or 5", "0 and 5", "max(1, 2)", "[5][0]"):
        assert verl_prime.arithmetic(text, {}) == eval(text)
    for text in ("x", "(1).real", "print(1)", "lambda: 1", "f'{1}'", "[x for x in (1,)]"):
        with pytest.raises((KeyError, ValueError)):
            verl_prime.arithmetic(text, {})


# Rules that run programs.

ADD = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})


@pytest.mark.parametrize(("rule", "program", "score"), [
    ("prime_code@0.9", "a, b = map(int, input().split())\nprint(a + b)", 1.0),
    ("prime_code@0.9", "print(3)", 0.5),
    ("sandbox_fusion@0.9", "print(3)", 0.5),
])  # fmt: skip
def test_programs_run_in_a_sandbox(rule: str, program: str, score: float) -> None:
    assert rule_named(f"verl/{rule}", "x")(f"```python\n{program}\n```", ADD) == score


def test_a_slow_rule_runs_in_a_process_of_its_own_with_its_own_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def part(reference: str, settings: Reward, **more: Any) -> FunctionPart:
        limits.append(settings.time_limit)
        return FunctionPart(reference, settings, **more)

    monkeypatch.setattr(scorer_module, "FunctionPart", part)
    settings = Reward(rules={"mine": "verl/prime_math@0.9"}, time_limit=1.0, workers=1)
    question = Question("mine", [{"role": "user", "content": "x"}], "2x", Origin("rows", 1))
    output = tmp_path / "rewards" / "worker"
    with Scorer.open(settings, ["mine"], torch.device("cpu"), output=output) as scorer:
        score = scorer.submit(question, "\\boxed{x+x}").result()
    assert not isinstance(score, Failure)
    assert (score.total, limits) == (1.0, [60.0])
    assert [file.name for file in output.parent.iterdir()] == ["verl-prime_math@0.9-worker-0.log"]


def test_a_judge_has_the_name_of_its_rule() -> None:
    judge = import_module("lockstep.reward.verl_judge")
    assert judge.verl_geo3k_0_9("mine", "\\boxed{2}", "2", {}) == 0.9
    assert judge.verl_geo3k_0_3_0_post1("mine", "\\boxed{2}", "2", {}) == 0.9
    assert not hasattr(judge, "geo3k")


@pytest.mark.parametrize(("written", "wanted", "same"), [
    ("3\n", "3", True), (" 3 \n\n4", "3\n4", True), ("3\n\n4\n", "3\n4", True), ("0.33333333", "0.3333333", True),
    ("3.0", "3", True), ("03", "3", False), ("3\n5", "3\n4", False), ("a", "b", False), (None, "", False),
])  # fmt: skip
def test_outputs_of_programs_are_compared_as_in_verl(written: Any, wanted: str, same: bool) -> None:
    assert same_output(written, wanted) is same


@pytest.mark.parametrize(("result", "wanted", "same"), [
    (3, 3, True), (3, [3], True), ((1, 2), [1, 2], True), ([(1, 2)], [[1, 2]], False), ([(1, 2)], [[[1, 2]]], True),
    ({1: 2}, {"1": 2}, True), ({"1": 2}, {"1": 2}, False), ([], [], True), (None, [None], True), (3, [], False),
])  # fmt: skip
def test_results_of_functions_are_compared_as_in_verl(result: Any, wanted: Any, same: bool) -> None:
    assert same_result(result, wanted) is same


def test_a_program_becomes_a_function_as_in_verl() -> None:
    program = "import os\nx = 1\nimport re\nif __name__ == '__main__':\n    print(x)"
    assert as_program(program).endswith(
        # Of code with such a block at the end, ast.unparse writes the lines anew.
        "import os\nstdin = sys.stdin\nstdout = sys.stdout\ndef code():\n\tx = 1\n\timport re\n\tprint(x)\n"
    )


def test_sandbox_fusion_takes_the_last_python_block_or_the_first_block() -> None:
    texts = ("```python\na\n```", "```py\na\n```\n```\nb\n```", "```\na\n```", "a")
    assert [fusion_code(text) for text in texts] == ["\na\n", "a\n", "\na\n", None]


@pytest.mark.parametrize("rule", ["prime_code@0.9", "sandbox_fusion@0.9"])
def test_tests_that_no_response_can_pass_are_refused(rule: str) -> None:
    problem = rule_named(f"verl/{rule}", "x").truth_problem
    bad = ("", "[]", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}')
    assert (problem(ADD), [one for one in bad if problem(one) is None]) == (None, [])


def test_a_ground_truth_of_search_needs_a_target() -> None:
    problem = rule_named("verl/search_r1@0.9", "reward.rules.x").truth_problem
    assert (problem('{"target": ["a"]}'), problem('{"target": "a"}')) == (None, None)
    assert all(problem(truth) is not None for truth in ("a", "[1]", '{"target": []}', '{"target": [1]}', "{}"))


# Conversion of commands.

COMMAND = [
    "data.train_files=/d/a.parquet",
    "data.val_files=/d/b.parquet",
    "actor_rollout_ref.model.path=/m",
    "algorithm.adv_estimator=grpo",
]
CODE = "apps"


def converted(*more: str) -> Conversion:
    return convert_verl("verl.trainer.main_ppo", [*COMMAND, *more])


def test_a_command_with_a_sandbox_service_runs_its_programs_in_lockstep_s_sandbox() -> None:
    done = converted("reward_model.sandbox_fusion.url=http://host/run_code")
    assert done.recipe["reward.rules"].value[CODE] == "verl/sandbox_fusion@0.7"
    assert [one.outcome for one in done.outcomes if one.key.endswith("fusion.url")] == ["changed"]
    assert converted().recipe["reward.rules"].value[CODE] == "verl/prime_code@0.9"


def test_the_service_has_no_effect_on_a_reward_function() -> None:
    done = converted("reward_model.sandbox_fusion.url=http://host/run_code", "custom_reward_function.path=/f.py")
    assert [one.outcome for one in done.outcomes if one.key.endswith("fusion.url")] == ["ignored"]
    assert "reward.rules" not in done.recipe
    assert not [remark for remark in done.remarks if remark.startswith("reward rule")]


def test_the_manager_prime_has_no_rule_for_scores_that_it_cannot_read() -> None:
    rules = converted("reward_model.reward_manager=prime").recipe["reward.rules"].value
    assert ("aime*" in rules, rules["openai/gsm8k"]) == (False, "verl/gsm8k@0.9")
    problems = converted("reward_model.reward_manager=batch").problems
    assert [problem.where for problem in problems] == ["reward_model.reward_manager"]


def test_report_and_recipe_name_each_rule_and_its_differences() -> None:
    done = converted()
    for text in (report(done), recipe_yaml(done, "script")):
        for name in set(done.recipe["reward.rules"].value.values()):
            assert f"reward rule {name}: " in text
        assert "`####18`" in text
