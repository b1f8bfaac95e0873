"""Metrics of judged answers: against brute force over subsets, and counted by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from hand_rollouts import rollout
from lockstep.evaluate.validation import answer_metrics, pass_at
from lockstep.types import Failure, Question, Rollout, Score


def final(question: Question, text: str) -> str | None:
    return text or None


def answer(place: int, right: float, text: str = "a", *, source: str = "one", stop: str = "token") -> Rollout:
    return rollout(place, [1], Score(right, {"rule": right}), text=text, source=source, stop=stop)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            subsets = list(combinations(answers, k))
            assert pass_at(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_one_answer_a_question() -> None:
    given = [answer(0, 1), answer(1, 0), answer(2, 1, stop="length"), answer(3, 1)]
    assert answer_metrics(given, final, 1) == {
        "val/accuracy": 0.75,
        "val-core/one/reward/mean@1": 0.75,
        "val/answered": 0.75,
    }


def test_several_answers_a_question() -> None:
    first = [answer(0, 1, "x"), answer(0, 0, "y"), answer(0, 0, "z"), answer(0, 0, "z")]
    second = [answer(1, 0, "p"), answer(1, 1, "q"), answer(1, 1, "q"), answer(1, 0, "p")]
    metrics = answer_metrics([*first, *second], final, 4)
    assert metrics["val/accuracy"] == 3 / 8
    # pass@2: of six pairs three hold the one right answer; of six pairs five hold one of the two.
    assert metrics["val/pass@2"] == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert metrics["val/pass@4"] == 1.0
    # maj@2: x (first of a tie, right), p (first of a tie, wrong). maj@4: z (wrong), p (first of a tie, wrong).
    assert metrics["val/maj@2"] == 0.5
    assert metrics["val/maj@4"] == 0.0
    assert metrics["val-core/one/reward/mean@4"] == 3 / 8


def test_sizes_of_the_votes_are_powers_of_two_and_n() -> None:
    metrics = answer_metrics([answer(0, 1)] * 6, final, 6)
    assert [name for name in metrics if "pass" in name] == ["val/pass@2", "val/pass@4", "val/pass@6"]
    assert "val/pass@2" not in answer_metrics([answer(0, 1)], final, 1)


@pytest.mark.parametrize(
    ("votes", "right"),
    [
        ([("a", 1), ("b", 0), ("b", 0)], 0.0),
        ([("b", 0), ("a", 1), ("a", 1)], 1.0),
        ([("a", 1), ("b", 0), ("c", 0)], 1.0),
        ([("b", 0), ("a", 1), ("c", 0)], 0.0),
        # No answer is no vote: two silent ones do not outvote a given one.
        ([("", 0), ("", 0), ("a", 1)], 1.0),
        ([("", 0), ("", 0), ("", 0)], 0.0),
        ([("", 0), ("b", 0), ("a", 1)], 0.0),
    ],
)
def test_majority_with_ties_and_silent_answers(votes: list[tuple[str, float]], right: float) -> None:
    assert answer_metrics([answer(0, score, text) for text, score in votes], final, 3)["val/maj@3"] == right


def test_several_data_sources_have_numbers_of_their_own() -> None:
    given = [
        *(answer(0, 1, source="one"), answer(0, 1, source="one")),
        *(answer(1, 0, source="two"), answer(1, 1, "b", source="two")),
        *(answer(2, 0, source="two"), answer(2, 0, source="two")),
    ]
    metrics = answer_metrics(given, final, 2)
    assert metrics["val/accuracy"] == 0.5
    assert metrics["val/accuracy/one"] == 1.0
    assert metrics["val/accuracy/two"] == 0.25
    assert metrics["val/pass@2"] == pytest.approx(2 / 3)
    assert metrics["val/pass@2/two"] == 0.5
    assert metrics["val/maj@2/two"] == 0.0
    assert metrics["val-core/two/reward/mean@2"] == 0.25


def test_answers_that_could_not_be_scored_are_counted_and_not_zero() -> None:
    failed = rollout(0, [1], Failure("rule", "broken"), text="a", source="one")
    metrics = answer_metrics([failed, answer(0, 1), answer(1, 0), answer(1, 1)], final, 2)
    assert metrics["val/failed"] == 1.0
    assert metrics["val/accuracy"] == pytest.approx(2 / 3)
    # The first question has one answer left: two of them cannot be drawn.
    assert metrics["val/pass@2"] == 1.0
    assert metrics["val/answered"] == 1.0
    assert "val/failed" not in answer_metrics([answer(0, 1)], final, 1)


def test_nothing_scored_leaves_only_the_count() -> None:
    failed = rollout(0, [1], Failure("rule", "broken"), source="one", stop="length")
    assert answer_metrics([failed], final, 1) == {"val/answered": 0.0, "val/failed": 1.0}


def test_accuracy_is_the_rules_and_reward_the_weighted_whole() -> None:
    """A format reward must not make a wrong answer right, nor a small weight a right one wrong."""
    given = [
        rollout(0, [1], Score(1.2, {"rule": 0.0, "format": 1.0}), source="one"),
        rollout(1, [1], Score(0.4, {"rule": 1.0, "format": 0.0}), source="one"),
        rollout(2, [1], Score(1.1, {"rule": 0.0, "format": 1.0}), source="one"),
    ]
    metrics = answer_metrics(given, final, 1)
    assert metrics["val/accuracy"] == pytest.approx(1 / 3)
    assert metrics["val/reward"] == pytest.approx(0.9)


def test_without_a_rule_an_answer_is_right_when_its_whole_reward_is_one() -> None:
    given = [rollout(i, [1], Score(total, {"function": total})) for i, total in enumerate((1.0, 0.0, 1.0, 0.0))]
    metrics = answer_metrics(given, final, 1)
    assert metrics["val/accuracy"] == metrics["val/reward"] == 0.5


def test_a_reward_of_degrees_calls_nothing_right() -> None:
    given = [rollout(i, [1], Score(total, {"model": total})) for i, total in enumerate((1.0, 0.99, 1.5, 0.0))]
    metrics = answer_metrics(given, final, 1)
    assert "val/accuracy" not in metrics
    assert metrics["val/reward"] == pytest.approx(3.49 / 4)
