"""Rows made of scored responses: every number by hand, every response that is not used counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from conftest import write_jsonl
from lockstep.data.prepare.sampled import Selection, SelectionCounts, choice_of, write_pairs
from lockstep.data.sources.read import read_rows
from lockstep.errors import Refusal

Sample = tuple[str, float | None]


def rows_of(*questions: list[Sample], stop: str = "token") -> list[dict[str, object]]:
    """Rows as `lockstep sample` writes them; a response has as many tokens as letters."""
    return [
        {
            "question": question,
            "prompt": [{"role": "user", "content": f"question {question}"}],
            "response": text,
            "reward": reward,
            "stop": stop,
            "tokens": len(text),
            "sample": sample,
        }
        for question, samples in enumerate(questions)
        for sample, (text, reward) in enumerate(samples)
    ]


def made(
    folder: Path, rows: list[dict[str, object]], choice: Selection
) -> tuple[list[dict[str, object]], SelectionCounts]:
    out = folder / "out.jsonl"
    counts = write_pairs(str(write_jsonl(folder / "samples.jsonl", rows)), out, choice)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()], counts


def texts(rows: list[dict[str, object]]) -> list[tuple[str, str, float]]:
    return [(row["chosen"][0]["content"], row["rejected"][0]["content"], row["margin"]) for row in rows]  # type: ignore[index,misc]


def said(row: dict[str, object]) -> str:
    return row["messages"][-1]["content"]  # type: ignore[index]


def test_best_against_worst(tmp_path: Path) -> None:
    rows, counts = made(tmp_path, rows_of([("b", 0.5), ("a", 1.0), ("c", 0.25)], [("d", 1.0), ("e", 1.0)]), Selection())
    assert rows == [
        {
            "prompt": [{"role": "user", "content": "question 0"}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "c"}],
            "margin": 0.75,
            "score_chosen": 1.0,
            "score_rejected": 0.25,
        }
    ]
    assert (counts.questions, counts.used, counts.ties, counts.responses, counts.rows) == (2, 1, 1, 5, 1)
    assert counts.left_out == {"all rewards equal": 1}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (Selection(per_prompt=1), [("a", "f", 1.0)]),
        (Selection(per_prompt=9), [("a", "f", 1.0), ("b", "e", 0.5), ("c", "d", 0.25)]),
        # At least the margin: half is enough for a half.
        (Selection(per_prompt=9, min_margin=0.5), [("a", "f", 1.0), ("b", "e", 0.5)]),
        (Selection(per_prompt=9, min_margin=0.6), [("a", "f", 1.0)]),
        (Selection(per_prompt=9, min_reward=0.75), [("a", "f", 1.0), ("b", "e", 0.5)]),
    ],
)
def test_several_pairs_go_inwards(tmp_path: Path, choice: Selection, wanted: list[tuple[str, str, float]]) -> None:
    samples: list[Sample] = [("c", 0.5), ("f", 0.0), ("a", 1.0), ("e", 0.25), ("d", 0.25), ("b", 0.75)]
    rows, _ = made(tmp_path, rows_of(samples), choice)
    assert texts(rows) == wanted


def test_a_pair_of_equal_rewards_is_never_made(tmp_path: Path) -> None:
    rows, _ = made(tmp_path, rows_of([("a", 1.0), ("b", 0.5), ("c", 0.5), ("d", 0.0)]), Selection(per_prompt=9))
    assert texts(rows) == [("a", "d", 1.0)]


@pytest.mark.parametrize(("tie", "wanted"), [("first", ("long one", "worse one", 1.0)), ("shortest", ("a", "b", 1.0))])
def test_of_equal_rewards_the_first_or_the_shortest_is_taken(
    tmp_path: Path, tie: str, wanted: tuple[str, str, float]
) -> None:
    samples: list[Sample] = [("long one", 1.0), ("worse one", 0.0), ("b", 0.0), ("a", 1.0)]
    rows, _ = made(tmp_path, rows_of(samples), Selection(length_tie=tie))
    assert texts(rows) == [wanted]


def test_identical_texts_never_make_a_pair(tmp_path: Path) -> None:
    """A reward that is not the same for the same text: the next worst is taken, and no text stands twice."""
    samples: list[Sample] = [("same", 1.0), ("same", 0.0), ("other", 0.25)]
    rows, _ = made(tmp_path, rows_of(samples), Selection(per_prompt=9))
    assert texts(rows) == [("same", "other", 0.75)]


def test_best_of_n(tmp_path: Path) -> None:
    questions: list[list[Sample]] = [
        [("b", 0.5), ("a", 1.0), ("a", 1.0), ("c", 0.75)],
        [("d", 0.25), ("e", 0.0)],
        [("f", 0.5)],
    ]
    rows, counts = made(tmp_path, rows_of(*questions), Selection("sft", per_prompt=2, min_reward=0.5))
    assert [(said(row), row["reward"]) for row in rows] == [("a", 1.0), ("c", 0.75), ("f", 0.5)]
    assert rows[0]["messages"] == [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "a"},
    ]
    assert (counts.used, counts.rows) == (2, 3)
    assert counts.left_out == {"best reward below --min-reward": 1}


@pytest.mark.parametrize(
    ("threshold", "labels"),
    [
        (0.5, {"a": True, "b": True, "c": False, "d": True, "e": True}),
        (0.6, {"a": True, "b": False, "c": False, "d": False, "e": False}),
        # Means: (1 + 0.5 + 0) / 3 = 0.5 for the first question; the second has nothing to tell apart.
        (None, {"a": True, "b": True, "c": False}),
    ],
)
def test_labels(tmp_path: Path, threshold: float | None, labels: dict[str, bool]) -> None:
    rows, _ = made(
        tmp_path,
        rows_of([("a", 1.0), ("b", 0.5), ("c", 0.0)], [("d", 0.5), ("e", 0.5), ("d", 0.5)]),
        Selection("kto", threshold=threshold),
    )
    assert {row["completion"][0]["content"]: row["label"] for row in rows} == labels  # type: ignore[index]
    assert len(rows) == len(labels)
    assert rows[0]["prompt"] == [{"role": "user", "content": "question 0"}]


def test_what_cannot_be_used_is_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        *rows_of([("a", 1.0), ("b", 0.0), ("  ", 2.0), ("x", None)]),
        *rows_of([("cut", 3.0), ("cut too", -1.0)], stop="length"),
    ]
    pairs, counts = made(tmp_path, rows, Selection())
    assert texts(pairs) == [("a", "b", 1.0)]
    assert counts.unused == {"empty": 1, "without a score": 1, "cut off at the length limit": 2}
    assert ("  left out: cut off at the length limit", "2") in counts.table()
    assert ("rows written", "1") in counts.table()
    (tmp_path / "out.jsonl").unlink()
    kept, counts = made(tmp_path, rows, Selection(keep_cut=True))
    assert texts(kept) == [("cut", "cut too", 4.0)]
    assert counts.unused == {"empty": 1, "without a score": 1}


def test_files_of_one_question_are_taken_together_and_others_apart(tmp_path: Path) -> None:
    one, two = rows_of([("a", 1.0)], [("b", 1.0)]), rows_of([("c", 0.0)], [("d", 0.0)])
    two[1]["prompt"] = [{"role": "user", "content": "question 1 of other data"}]
    write_jsonl(tmp_path / "s1.jsonl", one)
    write_jsonl(tmp_path / "s2.jsonl", two)
    counts = write_pairs(str(tmp_path / "s*.jsonl"), tmp_path / "pairs.parquet", Selection())
    (row,) = pq.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert texts([row]) == [("a", "c", 1.0)]
    assert (counts.questions, counts.left_out["fewer than two different responses"]) == (3, 2)
    assert next(iter(read_rows(str(tmp_path / "pairs.parquet")))) == row


@pytest.mark.parametrize(
    ("rows", "choice", "said"),
    [
        (rows_of([("a", 1.0), ("b", 1.0)]), Selection(), ["1 questions: all rewards equal", "--n"]),
        (rows_of([("a", 1.0), ("b", 0.5)]), Selection(min_margin=0.6), ["lower --min-margin"]),
        (rows_of([("a", 0.1)]), Selection("sft", min_reward=1.0), ["lower --min-reward"]),
        (rows_of([("a", 1.0)], stop="length"), Selection("sft"), ["1 responses cut off", "--keep-cut"]),
        (rows_of([("a", None), ("b", None)]), Selection("kto"), ["2 responses without a score", "`failure`"]),
        ([{"prompt": [], "response": "a"}], Selection(), ["lacks the columns question, reward, stop, tokens"]),
        ([{**rows_of([("a", 1.0)])[0], "prompt": ["hello"]}], Selection(), ["line 1", "chat messages"]),
        ([{**rows_of([("a", 1.0)])[0], "reward": "high"}], Selection(), ["line 1", "'high'"]),
        ([{**rows_of([("a", 1.0)])[0], "response": None}], Selection(), ["line 1", "not text"]),
    ],
)
def test_nothing_to_write_is_refused_with_the_reason(
    tmp_path: Path, rows: list[dict[str, object]], choice: Selection, said: list[str]
) -> None:
    with pytest.raises(Refusal) as refused:
        made(tmp_path, rows, choice)
    assert all(words in str(refused.value) for words in said), refused.value
    assert not (tmp_path / "out.jsonl").exists()


def test_an_out_that_is_there_or_has_no_format_is_refused(tmp_path: Path) -> None:
    samples = write_jsonl(tmp_path / "samples.jsonl", rows_of([("a", 1.0), ("b", 0.0)]))
    for name, words in (("samples.jsonl", "exists already"), ("out.csv", ".parquet or .jsonl")):
        with pytest.raises(Refusal, match=words):
            write_pairs(str(samples), tmp_path / name, Selection())


def test_options_of_another_kind_are_refused() -> None:
    assert choice_of("pairs", 2, 0.5, 1.0, None, "shortest", True) == Selection(
        "pairs", 2, 0.5, 1.0, 0.5, "shortest", True
    )
    assert choice_of("kto", threshold="mean").threshold is None
    assert choice_of("kto", threshold="-1.5").threshold == -1.5
    for words in ("nan", "high"):
        with pytest.raises(Refusal, match="--threshold"):
            choice_of("kto", threshold=words)
    with pytest.raises(Refusal) as refused:
        choice_of("kto", per_prompt=2, min_margin=0.5, min_reward=0.0, length_tie="first")
    assert len(refused.value.problems) == 4
    for given, option in (({"kind": "dpo"}, "--kind"), ({"kind": "sft", "length_tie": "longest"}, "--length-tie")):
        with pytest.raises(Refusal, match=rf"{option} \[unknown-name\]: "):
            choice_of(**given)
    with pytest.raises(Refusal, match="it applies only to --kind kto"):
        choice_of("sft", threshold="0.5")


def test_needs_no_torch() -> None:
    code = "import sys, lockstep.data.prepare.sampled; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_conditional_rows_have_the_reward_in_the_prompt(tmp_path: Path) -> None:
    samples = rows_of([("a", 1.0), ("b", -0.256), ("a", 1.0)], [("c {input}", 3.0)])
    samples[-1]["prompt"] = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is {reward}?"}]
    rows, counts = made(tmp_path, samples, choice_of("conditional"))
    assert [(row["messages"][-2]["content"], said(row), row["reward"]) for row in rows] == [  # type: ignore[index]
        ("question 0 <rm_score>: 1.00 ", "a", 1.0),
        ("question 0 <rm_score>: -0.26 ", "b", -0.256),
        ("what is {reward}? <rm_score>: 3.00 ", "c {input}", 3.0),
    ]
    assert rows[-1]["messages"][0] == {"role": "system", "content": "s"}  # type: ignore[index]
    assert (counts.used, counts.rows) == (2, 3)


def test_conditional_rewards_may_be_normalised_over_all_responses(tmp_path: Path) -> None:
    """1, 2 and 6 have the mean 3 and, with n - 1, the variance (4 + 1 + 9) / 2 = 7."""
    samples = rows_of([("a", 1.0), ("b", 2.0)], [("c", 6.0)])
    choice = choice_of("conditional", normalize=True, reward_template="{reward}|{input}")
    rows, _ = made(tmp_path, samples, choice)
    assert [row["messages"][0]["content"] for row in rows] == [  # type: ignore[index]
        f"{(reward - 3) / 7**0.5:.2f}|question {question}" for reward, question in ((1, 0), (2, 0), (6, 1))
    ]
    even = write_jsonl(tmp_path / "even.jsonl", rows_of([("a", 1.0), ("b", 1.0)]))
    with pytest.raises(Refusal, match="all rewards are equal"):
        write_pairs(str(even), tmp_path / "rows.jsonl", choice)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"kind": "conditional", "reward_template": "{input}"}, "--reward-template"),
        ({"kind": "sft", "reward_template": "{input}{reward}"}, "--reward-template"),
        ({"kind": "kto", "normalize": True}, "--normalize"),
        ({"kind": "conditional", "per_prompt": 2}, "--per-prompt"),
    ],
)
def test_options_of_conditional_rows(options: dict[str, object], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        choice_of(**options)  # type: ignore[arg-type]
    assert [problem.where for problem in refused.value.problems] == [where]
