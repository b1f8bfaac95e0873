"""Models whose positions move with the length, wherever a run meets one: right, or refused before training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from moving_models import FIXED, MOVING, longrope, sft_recipe
from small_models import SIZES, write_model
from transformers import LlamaConfig

from conftest import question_rows, run, write_jsonl
from eval_by_hand import evaluated, response_logprob
from lockstep.reward.process_model import PROCESS, load_process_model
from lockstep.run.metrics import read_metrics
from preference_rows import write_recipe

CPU = torch.device("cpu")
# Prompt and response have 25 tokens of their own besides: 26 to 56 of them, on both sides of an original length of 40.
ORIGINAL = 40
PAIRS: list[dict[str, object]] = [
    {"prompt": "2+3?", "chosen": "5", "rejected": "so so so so so so so 6"},
    {"prompt": "7+1?", "chosen": "so so so so so so so so so so 8", "rejected": "9"},
    {"prompt": "4+4?", "chosen": "8", "rejected": "9"},
]


@pytest.mark.parametrize("kind", MOVING)
def test_a_process_model_judges_a_row_beside_a_longer_one_as_alone(
    kind: str, tmp_path: Path, tiny_folder: Path
) -> None:
    folder = write_model(tmp_path / "model", MOVING[kind](), tiny_folder)
    (folder / PROCESS).write_text(json.dumps({"placeholder": "~", "tokens": ["+", "-"]}), encoding="utf-8")
    model = load_process_model(str(folder), CPU)
    mark = model.writer.marks.placeholder_id
    short, long = [*range(3, 12), mark, *range(5), mark], [*[7 + i % 50 for i in range(FIXED + 15)], mark]
    (alone,) = model.judge([short])
    beside, longer = model.judge([short, long])
    assert len(alone) == 2
    assert beside == pytest.approx(alone, abs=1e-5)
    assert longer == pytest.approx(model.judge([long])[0], abs=1e-5)


@pytest.fixture
def moving(tmp_path: Path, tiny_folder: Path) -> Path:
    return write_model(tmp_path / "moving", longrope(ORIGINAL), tiny_folder)


@pytest.fixture
def plain(tmp_path: Path, tiny_folder: Path) -> Path:
    return write_model(tmp_path / "plain", LlamaConfig(**SIZES), tiny_folder)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    return " ".join((printed.out + printed.err).split())


def trained(run_folder: Path) -> bool:
    return any((run_folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("precompute", ["false", "true"], ids=["beside the policy", "on disk"])
def test_pairs_too_long_for_a_reference_are_refused_by_row(
    precompute: str, moving: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy's own positions are fixed; packed, the reference would have to place one beginning twice."""
    recipe = write_recipe(tmp_path, plain, "dpo", PAIRS)
    changes = ["batch.rows_per_update=3", f"preference.reference={moving}", f"preference.precompute={precompute}"]
    assert run("train", recipe, *changes) == 2
    said = told(capsys)
    assert f"over {ORIGINAL} tokens all positions of phi3" in said
    assert re.search(r"train.jsonl line 1 \[[a-z-]+\] .*47 tokens", said)
    assert "train.jsonl line 3" not in said
    assert "set batch.micro_batch_size instead of batch.tokens" in said
    assert not trained(tmp_path / "runs" / "run")


def test_padded_pairs_are_compared_with_a_reference_at_its_own_positions(
    moving: Path, plain: Path, tmp_path: Path
) -> None:
    """DPO's loss before the first update, from transformers' own log-probs of each response by itself."""
    recipe = write_recipe(tmp_path, plain, "dpo", PAIRS)
    changes = [
        "batch.rows_per_update=3",
        "batch.tokens=null",
        "batch.micro_batch_size=3",
        "run.steps=1",
        "optim.warmup=0",
    ]
    assert run("train", recipe, *changes, f"preference.reference={moving}", "preference.beta=0.1") == 0
    losses = []
    for row in PAIRS:
        texts = [(str(row["prompt"]), str(row[side])) for side in ("chosen", "rejected")]
        ratios = [response_logprob(plain, *text)[0] - response_logprob(moving, *text)[0] for text in texts]
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(0.1 * (ratios[0] - ratios[1]))).item())
    ((_, metrics),) = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert metrics["train/loss"] == pytest.approx(sum(losses) / 3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("with_reference", [False, True], ids=["the model", "the reference"])
def test_eval_scores_pairs_at_their_own_positions(
    with_reference: bool, moving: Path, plain: Path, tmp_path: Path
) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    more = {"reference": str(moving)} if with_reference else {}
    _, lines = evaluated(plain if with_reference else moving, pairs, tmp_path / "out.jsonl", **more)
    for row, line in zip(PAIRS, lines, strict=True):
        texts = [(str(row["prompt"]), str(row[side])) for side in ("chosen", "rejected")]
        own = [response_logprob(moving, *text) for text in texts]
        wanted = [total / count for total, count in own]
        if with_reference:
            wanted = [response_logprob(plain, *text)[0] - total for text, (total, _) in zip(texts, own, strict=True)]
        assert line["scores"] == pytest.approx(wanted, abs=1e-3)


def test_validation_questions_that_would_move_positions_are_refused_before_training(
    moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are read. The longest question has 35 tokens with what opens an answer; five more may be
    written."""
    rows: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]} for _ in range(4)
    ]
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(5))
    recipe = sft_recipe(tmp_path, moving, rows, f"val: {{questions: {questions}}}")
    with monkeypatch.context() as unread:
        unread.delattr("lockstep.train.training.load_models")
        assert run("train", recipe, "run.name=long", "val.max_new_tokens=6") == 2
    said = told(capsys)
    assert "val.max_new_tokens [rotary-limit]" in said
    assert f"val.max_new_tokens within {ORIGINAL}" in said
    assert not trained(tmp_path / "long")
    assert run("train", recipe, "run.name=short", "val.max_new_tokens=5") == 0
    assert trained(tmp_path / "short")


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_answers_that_would_move_positions_are_refused_by_option(
    verb: str, moving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights are read. The longest question leaves five tokens."""
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(5))
    words = [verb, moving, questions, *([tmp_path / "out.parquet"] if verb == "sample" else []), "--device", "cpu"]
    with monkeypatch.context() as unread:
        unread.delattr("lockstep.rollout.generator.load_policy")
        assert run(*words, "--max-new-tokens", 6) == 2
    said = told(capsys)
    assert "--max-new-tokens [rotary-limit]" in said
    assert f"--max-new-tokens within {ORIGINAL}" in said
    assert run(*words, "--max-new-tokens", 5) == 0
