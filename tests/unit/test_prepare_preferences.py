"""Generated preferences: rows by hand, held-out sums, no way to be right without reading the request."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from lockstep.data.prepare.generated import BRIEF, WORKED, RequestedSum, _pair_row, write_preferences
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe

KINDS = ("pairs", "prompts", "steps")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    counts = write_preferences(folder)
    assert counts == {
        f"{kind}_{split}.parquet": rows for split, rows in (("train", 2000), ("val", 200)) for kind in KINDS
    }
    return folder


def rows(folder: Path, name: str) -> list[dict]:
    return parquet.read_table(folder / f"{name}.parquet").to_pylist()


def content(messages: list[dict]) -> str:
    (message,) = messages
    return message["content"]


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("numbers", "brief", "worked"),
    [
        ((3, 4), "#### 7", "3 + 4 = 7\n#### 7"),
        ((3, 4, 5), "#### 12", "3 + 4 = 7\n7 + 5 = 12\n#### 12"),
        ((9, 9, 9), "#### 27", "9 + 9 = 18\n18 + 9 = 27\n#### 27"),
    ],
)
def test_pairs_by_hand(numbers: tuple[int, ...], brief: str, worked: str) -> None:
    question = f"What is {' + '.join(map(str, numbers))}?"
    assert _pair_row(RequestedSum(numbers, BRIEF)) == {
        "prompt": user(f"{question} Be brief."),
        "chosen": assistant(brief),
        "rejected": assistant(worked),
    }
    assert _pair_row(RequestedSum(numbers, WORKED)) == {
        "prompt": user(f"{question} Show the work."),
        "chosen": assistant(worked),
        "rejected": assistant(brief),
    }


@pytest.mark.parametrize("split", ["train", "val"])
def test_only_the_request_tells_which_answer_is_better(written: Path, split: str) -> None:
    """Every sum stands there twice with the same answers swapped: a judge who skips the request gets exactly half."""
    by_sum: dict[str, list[tuple[str, str]]] = {}
    for row in rows(written, f"pairs_{split}"):
        asked, _, _ = content(row["prompt"]).partition("?")
        by_sum.setdefault(asked, []).append((content(row["chosen"]), content(row["rejected"])))
    assert all(len(pairs) == 2 and pairs[0] == pairs[1][::-1] for pairs in by_sum.values())


def test_answers_are_right_and_prompts_are_those_of_the_pairs(written: Path) -> None:
    for split in ("train", "val"):
        for index, (pair, row) in enumerate(
            zip(rows(written, f"pairs_{split}"), rows(written, f"prompts_{split}"), strict=True)
        ):
            asked, _, request = content(pair["prompt"]).removeprefix("What is ").partition("? ")
            # Python is the independent judge.
            truth = str(eval(asked))
            assert content(pair["chosen"]).rpartition("#### ")[2] == truth
            assert row["prompt"] == pair["prompt"]
            assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("brevity", truth)
            assert row["extra_info"] == {"split": split, "index": index, "request": request}
            for line in content(pair["chosen"]).splitlines()[:-1]:
                left, _, right = line.partition(" = ")
                assert eval(left) == int(right)


def test_validation_is_held_out(written: Path) -> None:
    sums = {
        split: {content(row["prompt"]).partition("?")[0] for row in rows(written, f"pairs_{split}")}
        for split in ("train", "val")
    }
    assert (len(sums["train"]), len(sums["val"])) == (1000, 100)
    assert not sums["train"] & sums["val"]
    steps = [
        tuple(step.partition("=")[0] for step in row["completions"])
        for split in ("train", "val")
        for row in rows(written, f"steps_{split}")
    ]
    assert len(set(steps)) == len(steps) == 2200


def test_steps_are_judged_right_and_half_of_them_are_wrong_at_every_place(written: Path) -> None:
    right: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for row in rows(written, "steps_train"):
        assert len(row["completions"]) == len(row["labels"])
        for place, (step, label) in enumerate(zip(row["completions"], row["labels"], strict=True)):
            left, _, result = step.partition("=")
            assert label is (eval(left) == int(result))
            assert 0 <= int(result) <= 9
            right[place] += label
            count[place] += 1
    assert min(count.values()) >= 300
    assert all(0.4 < right[place] / count[place] < 0.6 for place in count)


def test_the_recipe_marks_are_tokens_that_no_row_holds(written: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tiny(tmp_path / "model", hidden=32, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    marks = load_recipe("prm-steps").prm
    assert all(len(tokenizer(text)["input_ids"]) == 1 for text in (marks.placeholder, *marks.tokens))
    texts = [text for row in rows(written, "steps_train") for text in (content(row["prompt"]), *row["completions"])]
    assert not any(marks.placeholder in text for text in texts)


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_preferences(tmp_path / name, train_rows=20, val_rows=4, seed=seed)
    for kind in ("pairs_train", "prompts_val", "steps_train"):
        a, b, c = (rows(tmp_path / name, kind) for name in "abc")
        assert a == b != c


def test_more_than_there_is_and_odd_numbers(tmp_path: Path) -> None:
    counts = write_preferences(tmp_path / "all", train_rows=3000, val_rows=900)
    assert (counts["pairs_train.parquet"], counts["pairs_val.parquet"]) == (1760, 440)
    assert counts["steps_train.parquet"] == 3000
    counts = write_preferences(tmp_path / "odd", train_rows=7, val_rows=3)
    assert set(counts.values()) == {7, 3}
    requests = Counter(row["extra_info"]["request"] for row in rows(tmp_path / "odd", "prompts_train"))
    assert requests == {BRIEF: 4, WORKED: 3}


def test_bad_arguments_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        write_preferences(tmp_path, train_rows=0, val_rows=-1)
    assert [problem.where for problem in caught.value.problems] == ["train_rows", "val_rows"]
