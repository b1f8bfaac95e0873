"""All rewards together: weights, refusals, futures, and the dry run before the first step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from hang import HANG
from lockstep.errors import Refusal
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.row_rewards import overlong_penalty
from lockstep.reward.scorer import Scorer, active_weights
from lockstep.types import Failure, Origin, Question, Score
from refusals import refuses
from reward_models import write_reward_model
from reward_servers import GUARD, by_length, serving

CPU = torch.device("cpu")

FUNCTION = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "slow":
        while not os.path.exists(extra_info["wake"]):
            time.sleep(0.01)
    if solution_str == "fail":
        raise ValueError("no")
    return {"score": 0.5 if ground_truth in solution_str else 0.0, "length": len(solution_str)}

def constant(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def worked(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == extra_info.get("answer"))

def short(data_source, solution_str, ground_truth, extra_info):
    return -len(solution_str) / 100

# Dislikes what it cannot read more than silence.
def tagged(data_source, solution_str, ground_truth, extra_info):
    if not solution_str:
        return 0.0
    return 1.0 if solution_str == f"<final>{ground_truth}</final>" else -1.0

def fragile(data_source, solution_str, ground_truth, extra_info):
    return 1 / len(solution_str)

def answer_tag(data_source, solution_str, ground_truth, extra_info):
    import re
    found = re.search("<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return float(found is not None and found.group(1).strip() == ground_truth)

def reasoned(data_source, solution_str, ground_truth, extra_info):
    import re
    return float(bool(re.fullmatch("<think>.*</think>\\s*<answer>\\s*18\\s*</answer>", solution_str, re.DOTALL)))
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("user") / "mine.py"
    file.write_text(FUNCTION)
    return file


def question(source: str = "arithmetic", truth: str = "18", row: int = 1, **extra) -> Question:
    return Question(source, [{"role": "user", "content": "9+9?"}], truth, Origin("rows.parquet", row), extra)


def opened(sources=("arithmetic",), **values) -> Scorer:
    return Scorer.open(Reward(**{"workers": 1, **values}), sources, CPU)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({}, {"rule": 1.0}),
        ({"weights": {"rule": 2.0}}, {"rule": 2.0}),
        ({"format": "x"}, {"format": 1.0}),
        ({"format": "x", "weights": {"rule": 0.5}}, {"rule": 0.5, "format": 1.0}),
        ({"format": "x", "function": "f", "weights": {"format": 0.0}}, {"function": 1.0, "format": 0.0}),
        ({"remote": "x", "model": "y"}, {"model": 1.0, "remote": 1.0}),
    ],
)
def test_which_parts_count(values, weights) -> None:
    found, problems = active_weights(Reward(**values))
    assert found == weights
    assert list(found) == [name for name in ("rule", "function", "model", "remote", "format") if name in weights]
    assert problems == []


def test_rules_are_scored_at_once() -> None:
    with opened(["arithmetic", "mine"], rules={"mine": "exact"}) as scorer:
        future = scorer.submit(question(), "#### 18.")
        assert future.done()
        assert future.result() == Score(1.0, {"rule": 1.0})
        assert scorer.submit(question(), "18").result() == Score(0.0, {"rule": 0.0})
        assert scorer.submit(question("mine"), "18").result() == Score(1.0, {"rule": 1.0})


def test_an_error_in_the_sum_is_raised_where_the_score_is_read(user, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scorer, *given: object) -> Score:
        raise RuntimeError("no sum")

    monkeypatch.setattr(Scorer, "_sum", broken)
    with opened(function=f"{user}:constant") as scorer, pytest.raises(RuntimeError, match="no sum"):
        scorer.submit(question(), "text").result(timeout=HANG)


def test_a_row_that_no_answer_can_match_is_a_failure() -> None:
    with opened() as scorer:
        failure = scorer.submit(question(truth="eighteen", row=7), "#### 18").result()
        assert failure.part == "rule"
        assert "rows.parquet row 7" in failure.why
        assert "'eighteen' is not a number" in failure.why


def test_a_source_that_nobody_announced_is_refused_not_scored() -> None:
    with opened() as scorer, pytest.raises(Refusal, match="'other'"):
        scorer.submit(question("other"), "18")


def test_the_format_must_match_the_whole_response() -> None:
    with opened(format=r"<think>.*</think>\d+") as scorer:
        texts = ["<think>a\nb</think>18", "<think></think>18 ", "18", "x<think></think>1"]
        assert [scorer.submit(question(), text).result().total for text in texts] == [1.0, 0.0, 0.0, 0.0]


def test_the_total_is_the_weighted_sum_and_parts_are_unweighted(user, tiny_folder, tmp_path) -> None:
    folder = write_reward_model(tiny_folder, tmp_path / "rm")
    text = "#### 18"
    with opened(model=str(folder)) as scorer:
        future = scorer.submit(question(), text)
        scorer.flush()
        judged = future.result(0).total
    with serving(by_length) as server:
        weights = {"rule": 2.0, "function": 3.0, "model": -0.25, "remote": 0.5, "format": 0.125}
        values = {"function": f"{user}:score", "model": str(folder), "remote": server.address, "format": "#.*"}
        with opened(**values, weights=weights) as scorer:
            future = scorer.submit(question(), text)
            assert not future.done()
            scorer.flush()
            score = future.result(GUARD)
    assert score.parts == pytest.approx(
        {"rule": 1.0, "function": 0.5, "function/length": 7.0, "model": judged, "remote": 7.0, "format": 1.0}, abs=1e-5
    )
    assert score.total == pytest.approx(2.0 + 1.5 - 0.25 * judged + 3.5 + 0.125, abs=1e-5)


def test_a_part_that_fails_makes_the_whole_a_failure(user) -> None:
    with opened(function=f"{user}:score", weights={"rule": 1.0}) as scorer:
        outcome = scorer.submit(question(), "fail").result(GUARD)
        assert isinstance(outcome, Failure)
        assert outcome.part == "function"
        assert "ValueError: no (mine.py line " in outcome.why


def test_the_failure_told_is_the_first_of_the_parts_not_of_the_clock(user, tmp_path) -> None:
    """The function fails only after the endpoint was asked: it comes first all the same."""
    wake = tmp_path / "wake"
    file = user.with_name("late.py")
    file.write_text(
        "import os, time\ndef f(**call):\n"
        f"    while not os.path.exists({str(wake)!r}):\n        time.sleep(0.01)\n    raise ValueError('late')\n"
    )
    with serving(lambda number, items: (400, b"")) as server:  # noqa: SIM117
        with opened(function=f"{file}:f", remote=server.address, remote_batch=1, time_limit=GUARD) as scorer:
            future = scorer.submit(question(), "x")
            assert server.asked.wait(GUARD)
            wake.touch()
            assert future.result(GUARD).part == "function"


def test_slow_parts_overlap_with_the_callers_work_and_keep_their_order(user, tmp_path) -> None:
    """Slow calls end only after all are submitted, so submitting did not wait for them."""
    wake = tmp_path / "wake"
    with opened(function=f"{user}:score", workers=2, time_limit=GUARD) as scorer:
        futures = [scorer.submit(question(wake=str(wake)), text) for text in ("slow", "18", "slow", "x")]
        assert not futures[0].done()
        wake.touch()
        assert [future.result(GUARD).total for future in futures] == [0.0, 0.5, 0.0, 0.0]


def test_closing_ends_every_thread_and_answers_everything(user) -> None:
    before = set(threading.enumerate())
    scorer = opened(function=f"{user}:score")
    futures = [scorer.submit(question(wake="/nowhere"), "slow") for _ in range(5)]
    scorer.close()
    assert all(isinstance(future.result(0), Failure) for future in futures)
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile


def test_everything_wrong_is_told_at_once(tmp_path) -> None:
    with pytest.raises(Refusal) as refused:
        opened(
            ["arithmetic", "mine", "other"],
            rules={"mine": "exacty"},
            function=str(tmp_path / "missing.py") + ":f",
            model=str(tmp_path / "missing"),
            remote="nowhere",
            format="(",
            weights={"rule": 1.0},
        )
    wheres = [problem.where for problem in refused.value.problems]
    assert wheres == [
        "reward.rules.mine",
        "data_source 'other'",
        "reward.function",
        f"reward.model {tmp_path / 'missing'}",
        "reward.remote",
        "reward.format",
    ]
    assert "did you mean exact?" in str(refused.value)


def test_a_weight_without_its_part_is_refused() -> None:
    with refuses("reward.weights.function", "needs-key", "reward.function"):
        opened(weights={"function": 1.0, "rule": 1.0})


def test_refusing_leaves_no_process(user) -> None:
    before = set(threading.enumerate())
    with pytest.raises(Refusal, match=r"reward\.format"):
        opened(function=f"{user}:score", format="(")
    # Threads of earlier tests may end meanwhile.
    assert set(threading.enumerate()) <= before


def test_answers_for_votes(user) -> None:
    with opened(["arithmetic", "unruled"], function=f"{user}:score") as scorer:
        assert scorer.answer_of(question(), "#### $1,234.0") == "1234"
        assert scorer.answer_of(question(), "none") is None
        assert scorer.answer_of(question("unruled"), "#### 5") is None


@pytest.mark.slow
def test_math_is_judged_in_a_process_that_can_be_killed() -> None:
    pytest.importorskip("math_verify")
    with opened(["m"], rules={"m": "math"}, time_limit=5.0, memory_limit_gb=1.0) as scorer:
        assert scorer.submit(question("m", r"\frac{1}{2}"), r"\boxed{0.5}").result(GUARD) == Score(1.0, {"rule": 1.0})
        hostile = scorer.submit(question("m", "5"), r"\boxed{9^{9^{9^{9}}} + \sqrt{2}}").result(GUARD)
        assert isinstance(hostile, Failure)
        assert hostile.part == "rule"
        assert scorer.submit(question("m", "5"), r"\boxed{4}").result(GUARD) == Score(0.0, {"rule": 0.0})
        assert scorer.dry_run([question("m", "x^2")]).lines == ["reward rule: right answer 1, empty answer 0"]


# The dry run -----------------------------------------------------------------------------------------------------


def test_a_sound_reward_says_what_it_scored(user) -> None:
    rows = [question(row=i) for i in range(5)]
    with opened(function=f"{user}:score", format="#+ .*", weights={"rule": 1.0}) as scorer:
        assert scorer.dry_run(rows).lines == [
            "reward rule: right answer 1, empty answer 0",
            "reward function: right answer 0.5, empty answer 0",
            "reward format: right answer 1, empty answer 0",
        ]


def test_each_source_is_tried() -> None:
    with opened(["arithmetic", "mine"], rules={"mine": "exact"}) as scorer:
        assert scorer.dry_run([question(), question("mine", "yes")]).lines == [
            "reward rule (arithmetic): right answer 1, empty answer 0",
            "reward rule (mine): right answer 1, empty answer 0",
        ]


def test_a_constant_reward_is_warned_of(user) -> None:
    with opened(function=f"{user}:constant") as scorer:
        tried = scorer.dry_run([question(row=4), question(row=5)])
    assert tried.lines == ["reward function: right answer 1, empty answer 1"]
    (told,) = tried.warnings
    assert "reward function: data source arithmetic: " in told
    assert "both score 1" in told
    assert "on all of 2 rows" in told
    assert r"tested on rows.parquet row 4: '18', '#### 18', '\\boxed{18}', '<answer>18</answer>'" in told
    assert "extra_info.answer" in told


@pytest.mark.parametrize("name", ["answer_tag", "reasoned"])
def test_answers_in_tags_are_tried(user, name: str) -> None:
    with opened(function=f"{user}:{name}") as scorer:
        tried = scorer.dry_run([question()])
    assert tried.lines == ["reward function: right answer 1, empty answer 0"]
    assert tried.warnings == []


def test_the_worked_answer_of_a_row_is_tried_too(user) -> None:
    with opened(function=f"{user}:worked") as scorer:
        assert scorer.dry_run([question(), question(answer="9+9=18\n#### 18")]).lines == [
            "reward function: right answer 1, empty answer 0"
        ]
        (warning,) = scorer.dry_run([question()]).warnings
        assert "both score 0" in warning


def test_a_reward_that_likes_the_empty_answer_best_is_warned_of(user) -> None:
    rows = [question(row=4), question(row=5)]
    with opened(function=f"{user}:short") as scorer:
        tried = scorer.dry_run(rows)
    assert tried.lines == ["reward function: right answer -0.02, empty answer 0"]
    (warning,) = tried.warnings
    assert "data source arithmetic: on 2 of 2 " in warning
    assert "by reward function; on rows.parquet row 4 0 against -0.02 for '18'" in warning
    assert "say nothing" in warning


@pytest.mark.parametrize(
    ("weights", "warned"),
    [
        ({"rule": 1.0}, False),  # at best 1 - 0.07 against 0
        ({"rule": 0.01}, True),
        ({"rule": 0.0}, True),  # it only looks on
        ({"rule": 1.0, "function": -1.0}, False),
        ({"rule": -1.0, "function": 1.0}, True),
    ],
    ids=str,
)
def test_the_weighted_sum_decides_whether_silence_pays(user, weights: dict[str, float], warned: bool) -> None:
    with opened(function=f"{user}:short", weights=weights) as scorer:
        assert bool(scorer.dry_run([question()]).warnings) is warned


def test_a_right_answer_in_a_form_of_its_own_is_found_in_the_row(user) -> None:
    with opened(function=f"{user}:tagged") as scorer:
        (warning,) = scorer.dry_run([question()]).warnings
        assert "extra_info.answer" in warning
        assert scorer.dry_run([question(answer="<final>18</final>")]).warnings == []


def test_each_source_is_warned_of_by_itself(user) -> None:
    rows = [question("a", "18"), question("b", "7", row=9, answer="<final>7</final>"), question("c", "1", row=2)]
    with opened(["a", "b", "c"], function=f"{user}:tagged") as scorer:
        assert [warning[:14] for warning in scorer.dry_run(rows).warnings] == ["data source a:", "data source c:"]


def test_rewards_that_know_no_right_answer_are_not_judged_by_one(tmp_path, tiny_folder) -> None:
    """A model may like silence better than a bare number; with its sign turned round this one does."""
    folder = write_reward_model(tiny_folder, tmp_path / "rm")
    with opened(model=str(folder), weights={"model": -1.0}) as scorer:
        tried = scorer.dry_run([question()])
    right, empty = (float(words.split()[-1]) for words in tried.lines[0].split(","))
    assert -right < -empty
    assert tried.warnings == []


def test_equal_scores_of_right_and_empty_are_no_warning() -> None:
    with opened(format=".*", weights={"rule": 1.0}) as scorer:
        assert scorer.dry_run([question()]).warnings == []


def test_a_failure_in_the_dry_run_is_refused_with_its_reason(user) -> None:
    with opened(function=f"{user}:fragile") as scorer, pytest.raises(Refusal) as refused:
        scorer.dry_run([question(row=4)])
    assert "ZeroDivisionError: division by zero (mine.py line " in str(refused.value)
    assert "rows.parquet row 4" in str(refused.value)
    assert "the answer ''" in str(refused.value)


def test_a_dead_endpoint_is_refused() -> None:
    with opened(remote="http://127.0.0.1:9/", remote_retries=0) as scorer:  # noqa: SIM117
        with refuses("reward.remote", "reward-failed", "http://127.0.0.1:9/"):
            scorer.dry_run([question()])


def test_a_format_that_does_not_match_the_bare_truth_is_only_told() -> None:
    with opened(format="<think>.*", weights={"rule": 1.0}) as scorer:
        assert scorer.dry_run([question()]).lines[1] == "reward format: right answer 0, empty answer 0"


def test_bad_ground_truths_of_all_rows_are_refused() -> None:
    rows = [question(row=i) for i in range(10)] + [question(truth="ten", row=10)]
    with opened() as scorer, refuses("rows.parquet row 10", "invalid-ground-truth", "'ten'"):
        scorer.dry_run(rows)


def test_rules_that_are_set_but_do_not_count_are_told(user) -> None:
    with opened(function=f"{user}:score", rules={"arithmetic": "exact"}) as scorer:
        assert scorer.dry_run([question()]).lines[-1].startswith("reward rule: reward.rules has no effect")


def test_overlong_penalty() -> None:
    """Limit 100, buffer 20, factor 2: nothing up to 80 tokens, then 0.1 a token, 2 at the limit."""
    lengths = [0, 80, 81, 90, 99, 100, 120]
    assert [overlong_penalty(length, 100, 20, 2.0) for length in lengths] == pytest.approx(
        [0.0, 0.0, -0.1, -1.0, -1.9, -2.0, -2.0]
    )
    assert overlong_penalty(100, 100, 0, 1.0) == 0.0
