"""Generated rows: worked answers by hand, held-out questions, both schemas, every difficulty."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from lockstep.data.prepare.generated import LEVELS, _worked, write_arithmetic
from lockstep.errors import Refusal
from lockstep.reward.rules import rule_for


def rows(path: Path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize(
    ("question", "text", "answer"),
    [
        (("+", (3, 4)), "What is 3 + 4?", "3 + 4 = 7\n#### 7"),
        (("+", (9, 8, 5)), "What is 9 + 8 + 5?", "9 + 8 = 17\n17 + 5 = 22\n#### 22"),
        (("+", (47, 85)), "What is 47 + 85?", "7 + 5 + 0 = 12\n4 + 8 + 1 = 13\n#### 132"),
        (("-", (503, 128)), "What is 503 - 128?", "13 - 8 = 5\n10 - 3 = 7\n5 - 2 = 3\n#### 375"),
        (("*", (34, 27)), "What is 34 * 27?", "34 * 20 = 680\n34 * 7 = 238\n680 + 238 = 918\n#### 918"),
    ],
)
def test_worked_by_hand(question, text, answer) -> None:
    worked = _worked(*question)
    assert (worked.question, worked.answer) == (text, answer)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_answers_are_right_and_val_is_held_out(tmp_path: Path, difficulty: int) -> None:
    counts = write_arithmetic(tmp_path, train_rows=300, val_rows=50, difficulty=difficulty)
    assert counts == {"train.parquet": 300, "sft_train.parquet": 300, "val.parquet": 50, "sft_val.parquet": 50}
    questions = {}
    for split in ("train", "val"):
        rl, sft = rows(tmp_path / f"{split}.parquet"), rows(tmp_path / f"sft_{split}.parquet")
        assert [row["prompt"] for row in rl] == [row["messages"][:1] for row in sft]
        for row, chat in zip(rl, sft, strict=True):
            question = row["prompt"][0]["content"]
            # Python is the independent judge.
            truth = eval(question.removeprefix("What is ").removesuffix("?"))
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(truth)}
            assert rule_for(row["data_source"])(chat["messages"][1]["content"], str(truth)) == 1.0
        questions[split] = [row["extra_info"]["question"] for row in rl]
        assert len(set(questions[split])) == len(questions[split])
    assert not set(questions["train"]) & set(questions["val"])


@pytest.mark.daily("1-0-9", "2-10-99", "4-10-99")
@pytest.mark.parametrize(("level", "smallest", "largest"), [(1, 0, 9), (2, 10, 99), (3, 100, 999), (4, 10, 99)])
def test_every_question_of_a_level_is_there_once(level: int, smallest: int, largest: int) -> None:
    size, question_at = LEVELS[level]
    questions = {question_at(number) for number in range(size)}
    assert len(questions) == size
    numbers = {number for _, numbers in questions for number in numbers}
    assert (min(numbers), max(numbers)) == (smallest, largest)
    assert all(numbers[0] > numbers[1] for sign, numbers in questions if sign == "-")


def test_a_small_level_gives_what_it_has(tmp_path: Path) -> None:
    counts = write_arithmetic(tmp_path, train_rows=2000, val_rows=500)
    assert (counts["train.parquet"], counts["val.parquet"]) == (880, 220)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_arithmetic(tmp_path / name, train_rows=20, val_rows=4, difficulty=3, seed=seed)
    a, b, c = (rows(tmp_path / name / "train.parquet") for name in "abc")
    assert a == b != c


def test_bad_arguments_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        write_arithmetic(tmp_path, train_rows=0, difficulty=9)
    assert [problem.where for problem in caught.value.problems] == ["train_rows", "difficulty"]
