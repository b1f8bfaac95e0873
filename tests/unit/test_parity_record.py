"""The support table and its evidence: rows replaced, kept, sorted and refused; no path of a machine in them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Refusal
from lockstep.parity.compare.compare_report import page_data
from lockstep.parity.compare.comparison import Comparison, Difference
from lockstep.parity.compare.support_record import HEADER, INTRODUCTION, RULE, evidence_of, read_table, record, slug
from parity_example import HOSTILE, STEPS, example, reward


def kept(comparison: Comparison, folder: Path) -> str:
    return record(comparison, folder / "support.md", folder / "support")


def table_lines(folder: Path) -> list[str]:
    return [line for line in (folder / "support.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def with_facts(comparison: Comparison, **facts: tuple[Any, Any]) -> Comparison:
    return replace(comparison, facts={**comparison.facts, **facts})


def test_a_row_says_what_was_found(tmp_path: Path) -> None:
    message = kept(example(), tmp_path)
    header, rule, row = table_lines(tmp_path)
    assert (header, rule) == (HEADER, RULE)
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[:7] == [
        "grpo",
        "tiny-7",
        "train/loss 0.312 %, scaled 0.399 %, bar 2 %; critic/rewards/mean 4.83 %, scaled 8.91 %, bar 4 %",
        "7.81, 7.55 at equal lengths",
        "CPU, 16 cores, float32 vs 1 emulated chip, bfloat16",
        "A: lockstep 0.1.0, torch 2.11.0; B: lockstep 0.1.0, torch 2.13.0",
        "out of step",
    ]
    (file,) = (tmp_path / "support").iterdir()
    assert cells[7] == f"[json](support/{file.name})"
    assert message == f"added a row of {tmp_path / 'support.md'} (out of step), evidence in {file}"
    text = (tmp_path / "support.md").read_text(encoding="utf-8")
    assert text.startswith("# Support")


def test_the_same_pair_replaces_its_row_and_others_stay(tmp_path: Path) -> None:
    kept(example(), tmp_path)
    other = with_facts(example(), dtype=("float32", "float32"), method=("dpo", "dpo"))
    kept(other, tmp_path)
    support = tmp_path / "support.md"
    support.write_text(support.read_text(encoding="utf-8") + "\nA closing word.\n", encoding="utf-8")
    (_, _, dpo, grpo) = table_lines(tmp_path)
    assert dpo.startswith("| dpo ")
    assert grpo.startswith("| grpo ")

    message = kept(replace(example("in step"), a="elsewhere/again"), tmp_path)
    assert message.startswith("replaced")
    (_, _, dpo_after, grpo_after) = table_lines(tmp_path)
    assert dpo_after == dpo
    assert grpo_after == grpo.replace("| out of step |", "| in step |")
    assert support.read_text(encoding="utf-8").endswith("|\n\nA closing word.\n")
    assert len(list((tmp_path / "support").iterdir())) == 2


@pytest.mark.parametrize(
    ("fact", "pair"),
    [
        ("method", ("ppo", "ppo")),
        ("model", ("tiny.7", "tiny.7")),  # the same letters and digits as tiny-7
        ("hardware", ("1 emulated chip", "CPU, 16 cores")),
        ("dtype", ("bfloat16", "float32")),
    ],
)
def test_what_makes_another_pair(fact: str, pair: tuple[str, str]) -> None:
    assert slug(with_facts(example(), **{fact: pair})) != slug(example())
    assert slug(with_facts(example(), versions=("other", "other"))) == slug(example())


def test_cells_hold_any_text(tmp_path: Path) -> None:
    odd = with_facts(example(), hardware=("a | b\nc", None), versions=("same", "same"))
    kept(odd, tmp_path)
    (row,) = read_table(tmp_path / "support.md").rows
    assert row.hardware == "a | b c, float32 vs unknown, bfloat16"
    assert row.versions == "same"
    before = (tmp_path / "support.md").read_text(encoding="utf-8")
    kept(odd, tmp_path)
    assert (tmp_path / "support.md").read_text(encoding="utf-8") == before


def test_evidence_names_runs_and_no_folders() -> None:
    comparison = replace(
        example(),
        a="/secret/runs/one",
        reason="/secret/runs/one and (/secret/other/two) differ in critic/rewards/mean; see https://example.org/a/b",
        differences=[
            Difference("recipe", "data.train", "/secret/my data/train.jsonl", "data/train.jsonl", "blocks", "rows"),
            Difference("recipe", "model.path", "~/models/x", "C:\\models\\y", "blocks", "weights"),
        ],
        samples=[({"origin": "/secret/rows.jsonl:7", "prompt": "cd /secret/x", "response": HOSTILE}, None)],
    )
    data = evidence_of(comparison)
    assert (data["a"], data["b"]) == ("one", "grpo-accelerator")
    assert data["reason"] == "one and (two) differ in critic/rewards/mean; see https://example.org/a/b"
    assert [(each["a"], each["b"]) for each in data["differences"]] == [
        ("train.jsonl", "data/train.jsonl"),
        ("x", "y"),
    ]
    assert data["samples"][0][0] == {"origin": "rows.jsonl:7", "prompt": "cd /secret/x", "response": HOSTILE}
    assert data["facts"]["model"] == ["tiny-7", "tiny-7"]


def test_evidence_has_the_curves_thinned_above_2000_steps() -> None:
    short, _, rewards = evidence_of(example())["metrics"]
    assert (rewards["every"], rewards["steps"]) == (1, STEPS)
    assert rewards["a"][80] == pytest.approx(reward(81), rel=1e-6)
    assert short["b"][49] is None  # the NaN at step 50

    steps = list(range(1, 5002))
    metric = replace(example().metrics[1], steps=steps, a=[*map(float, steps)], b=[0.0] * 5001, repeats=[[1.0] * 5001])
    (thinned,) = evidence_of(replace(example(), metrics=[metric]))["metrics"]
    assert thinned["every"] == 3
    assert thinned["steps"][:3] == [1, 4, 7]
    assert thinned["steps"][-2:] == [4999, 5001]
    assert thinned["a"] == thinned["steps"]
    assert len(thinned["b"]) == len(thinned["repeats"][0]) == 1668
    assert thinned["figures"]["mean_error_percent"] == 0.3120471


def test_evidence_is_strict_json(tmp_path: Path) -> None:
    figures = replace(example().metrics[2].figures, worst=math.inf, drift=math.nan)
    kept(replace(example(), metrics=[replace(example().metrics[2], figures=figures)]), tmp_path)
    (file,) = (tmp_path / "support").iterdir()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    stored = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    assert stored["metrics"][0]["figures"]["worst"] is None


def test_logs_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="method of A and of B is unknown"):
        kept(replace(example(), facts={}), tmp_path)
    assert list(tmp_path.iterdir()) == []
    kept(with_facts(example(), method=(None, "grpo"), model=(None, "tiny")), tmp_path)
    assert read_table(tmp_path / "support.md").rows[0].algorithm == "grpo"


# The number of lines above the table.
TABLE = INTRODUCTION.count("\n") + 1
DAMAGE = [
    ("no table", lambda text: "# Support\n", "contains no support table"),
    ("no rule", lambda text: text.replace(RULE + "\n", ""), f"line {TABLE + 2} [damaged-file]"),
    ("a cell less", lambda text: text.replace("| tiny-7 ", ""), f"line {TABLE + 3} [damaged-file]: has 7 cells"),
    ("no link", lambda text: text.replace("[json]", "json"), f"line {TABLE + 3} [damaged-file]: its last cell"),
    ("words", lambda text: text + "and so on\n", f"line {TABLE + 4} [damaged-file]"),
    ("an empty line", lambda text: text.replace(RULE, RULE + "\n"), f"line {TABLE + 4} [damaged-file]"),
    (
        "twice",
        lambda text: text + text.splitlines()[-1] + "\n",
        f"line {TABLE + 4} [damaged-file]: links to the same JSON file as line {TABLE + 3}",
    ),
]


@pytest.mark.parametrize(("damage", "reason"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_table_is_refused_and_left_alone(tmp_path: Path, damage: Any, reason: str) -> None:
    kept(example(), tmp_path)
    support = tmp_path / "support.md"
    support.write_text(damage(support.read_text(encoding="utf-8")), encoding="utf-8")
    before = support.read_text(encoding="utf-8")
    with pytest.raises(Refusal) as refused:
        kept(example(), tmp_path)
    assert reason in str(refused.value)
    assert support.read_text(encoding="utf-8") == before


def test_many_points_are_rounded_on_the_page_and_steps_written_once() -> None:
    steps = list(range(10_000))
    curve = [1 / (3 + step) for step in steps]
    many = [replace(example().metrics[1], steps=steps, a=curve, b=curve, repeats=[]) for _ in range(11)]
    data = page_data(replace(example(), metrics=many))
    assert data["rounded_to"] == 7
    assert data["steps"] == [steps]
    assert {metric["steps"] for metric in data["metrics"]} == {0}
    assert data["metrics"][10]["a"][4] == 0.1428571
    exact = page_data(replace(example(), metrics=many[:10]))
    assert (exact["rounded_to"], exact["metrics"][0]["a"][4]) == (None, 1 / 7)
