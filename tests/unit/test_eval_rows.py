"""`lockstep eval` on pairs and steps: the numbers of plain transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from conftest import write_jsonl
from eval_by_hand import evaluated, response_logprob
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.reward.process_model import PROCESS
from reward_models import write_reward_model

PAIRS = [
    {"prompt": "2+3?", "chosen": "#### 5", "rejected": "so #### 6"},
    {"prompt": "7+1?", "chosen": "so so #### 8", "rejected": "#### 9"},
    {"prompt": "4+4?", "chosen": "8", "rejected": "nine or so"},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "pairs.jsonl", PAIRS)


def test_a_language_models_own_preference(tiny_folder: Path, pairs: Path, tmp_path: Path) -> None:
    metrics, lines = evaluated(tiny_folder, pairs, tmp_path / "out.jsonl")
    for row, line in zip(PAIRS, lines, strict=True):
        sums = [response_logprob(tiny_folder, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        assert line["scores"] == pytest.approx([total / count for total, count in sums], abs=1e-4)
    wins = [line["scores"][0] > line["scores"][1] for line in lines]
    assert metrics["pair_accuracy"] == pytest.approx(sum(wins) / 3)
    assert metrics["rows"] == 3
    assert "loss" not in metrics


def test_against_a_reference(tiny_folder: Path, pairs: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "other", hidden=64, layers=2, seed=1)
    metrics, lines = evaluated(tiny_folder, pairs, tmp_path / "out.jsonl", reference=str(tmp_path / "other"), rows=2)
    assert metrics["rows"] == len(lines) == 2
    for row, line in zip(PAIRS, lines, strict=False):
        ratios = [
            response_logprob(tiny_folder, row["prompt"], row[side])[0]
            - response_logprob(tmp_path / "other", row["prompt"], row[side])[0]
            for side in ("chosen", "rejected")
        ]
        assert line["scores"] == pytest.approx(ratios, abs=1e-3)
    margins = [line["scores"][0] - line["scores"][1] for line in lines]
    assert metrics["margin"] == pytest.approx(sum(margins) / 2, abs=1e-3)


def test_a_reward_model(tiny_folder: Path, pairs: Path, tmp_path: Path) -> None:
    folder = write_reward_model(tiny_folder, tmp_path / "rm")
    metrics, lines = evaluated(folder, pairs, tmp_path / "out.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for row, line in zip(PAIRS, lines, strict=True):
        for side, score in zip(("chosen", "rejected"), line["scores"], strict=True):
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            with torch.no_grad():
                own = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0]
            assert score == pytest.approx(float(own), abs=1e-4)
    best = [line["scores"][0] for line in lines]
    assert metrics["chosen"] == pytest.approx(sum(best) / 3, abs=1e-5)
    with pytest.raises(Refusal, match="--reference"):
        evaluated(folder, pairs, tmp_path / "out.jsonl", reference=str(tiny_folder))


def test_a_process_reward_model(tiny_folder: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "prm", hidden=64, layers=2)
    words = {"placeholder": "~", "tokens": ["+", "-"]}
    (tmp_path / "prm" / PROCESS).write_text(json.dumps(words), encoding="utf-8")
    rows = [
        {"prompt": "2+3+4?", "completions": ["2+3=5", "5+4=9"], "labels": [True, False]},
        {"prompt": "1+1?", "completions": ["1+1=2"], "labels": [False]},
    ]
    data = write_jsonl(tmp_path / "steps.jsonl", rows)
    metrics, lines = evaluated(tmp_path / "prm", data, tmp_path / "out.jsonl")
    assert [line["labels"] for line in lines] == [[1.0, 0.0], [0.0]]
    assert [len(line["steps"]) for line in lines] == [2, 1]
    verdicts = [(p > 0.5) == bool(y) for line in lines for p, y in zip(line["steps"], line["labels"], strict=True)]
    assert metrics["step_accuracy"] == pytest.approx(sum(verdicts) / 3)
    assert metrics["positive"] == pytest.approx(sum(sum(line["steps"]) for line in lines) / 3, abs=1e-6)


def test_a_reference_without_pairs_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    row = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "1+1?"}]}
    data = write_jsonl(tmp_path / "rl.jsonl", [{**row, "reward_model": {"style": "rule", "ground_truth": "2"}}])
    with pytest.raises(Refusal, match="has no pairs"):
        evaluated(tiny_folder, data, tmp_path / "out.jsonl", reference=str(tiny_folder))
