"""GSM8K rows from raw files: the schema, the ground truth, the counts, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from conftest import write_jsonl
from lockstep.data.prepare.generated import write_gsm8k
from lockstep.errors import Refusal

ROWS = [
    {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "1000+1\n#### 1,001"},
    {"question": "Three less five?", "answer": "3-5\n#### -2"},
]


def raw(folder: Path, train=ROWS, test=ROWS[:1]) -> Path:
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "test.jsonl", test)
    return folder


def test_rows_in_the_rl_schema(tmp_path: Path) -> None:
    assert write_gsm8k(tmp_path / "out", source=raw(tmp_path / "raw"), check_counts=False) == {
        "train.parquet": 3,
        "test.parquet": 1,
    }
    rows = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["4", "1001", "-2"]
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "A thousand and one? Think step by step, and give the final answer after ####.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1001"},
        "extra_info": {"split": "train", "index": 1, "question": ROWS[1]["question"], "answer": ROWS[1]["answer"]},
    }


def test_worked_examples_begin_each_prompt(tmp_path: Path) -> None:
    """The first training question is the example, without the calculator's notes, and no longer a training row."""
    counts = write_gsm8k(tmp_path / "out", source=raw(tmp_path / "raw"), check_counts=False, examples=1)
    assert counts == {"train.parquet": 2, "test.parquet": 1}
    for split, question in (("train", "A thousand and one?"), ("test", "Two and two?")):
        first = parquet.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()[0]
        asked = "Think step by step, and give the final answer after ####."
        assert first["prompt"] == [
            {"role": "user", "content": f"Two and two? {asked}"},
            {"role": "assistant", "content": "2+2=4\n#### 4"},
            {"role": "user", "content": f"{question} {asked}"},
        ]
    with pytest.raises(Refusal, match="3 worked examples are requested, and the file has 3 rows"):
        write_gsm8k(tmp_path / "none", source=tmp_path / "raw", check_counts=False, examples=3)
    bad = [{"question": "What?", "answer": "no mark"}, *ROWS]
    with pytest.raises(Refusal, match=r"train\.jsonl line 1"):
        write_gsm8k(tmp_path / "no", source=raw(tmp_path / "bad", train=bad), check_counts=False, examples=1)


def test_a_part_of_the_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="has 3 rows, but the complete data set has 7,473"):
        write_gsm8k(tmp_path / "out", source=raw(tmp_path / "raw"))
    assert not (tmp_path / "out").exists()


def test_bad_rows_are_named(tmp_path: Path) -> None:
    bad = [*ROWS, {"question": "What?", "answer": "no mark"}, {"question": "What?", "answer": "#### many"}]
    with pytest.raises(Refusal) as caught:
        write_gsm8k(tmp_path / "out", source=raw(tmp_path / "raw", train=bad), check_counts=False)
    assert ["train.jsonl line 4" in str(p) for p in caught.value.problems] == [True, False]
    assert "train.jsonl line 5" in str(caught.value)


@pytest.mark.skipif("LOCKSTEP_GSM8K" not in os.environ, reason="LOCKSTEP_GSM8K names no copy of the data set")
def test_the_whole_data_set(tmp_path: Path) -> None:
    counts = write_gsm8k(tmp_path, source=Path(os.environ["LOCKSTEP_GSM8K"]))
    assert counts == {"train.parquet": 7473, "test.parquet": 1319}
    for split in ("train", "test"):
        for row in parquet.read_table(tmp_path / f"{split}.parquet").to_pylist():
            float(row["reward_model"]["ground_truth"])
