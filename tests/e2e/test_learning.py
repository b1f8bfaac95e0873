"""The embedded model really learns: from random weights to held-out sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import lockstep
from hang import HANG
from lockstep.run.metrics import read_metrics


@pytest.mark.slow
def test_from_random_weights_to_held_out_one_digit_sums(tmp_path: Path) -> None:
    """The quickstart's recipe. Questions are sums of two or three digits that are not among the training rows."""
    assert lockstep("tiny", tmp_path / "model").returncode == 0
    assert lockstep("data", "arithmetic", tmp_path / "data").returncode == 0
    done = lockstep(
        "train",
        "sft-arithmetic",
        f"run.folder={tmp_path / 'runs'}",
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'data' / 'sft_train.parquet'}",
        f"data.val={tmp_path / 'data' / 'sft_val.parquet'}",
        f"val.questions={tmp_path / 'data' / 'val.parquet'}",
        # Measured before and after; what lies between is not looked at.
        "val.every=400",
        "checkpoint.every=400",
        timeout=4 * HANG,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "sft-arithmetic"
    history = [
        metrics["val/accuracy"] for _, metrics in read_metrics(run / "metrics.jsonl") if "val/accuracy" in metrics
    ]
    assert history[0] == 0.0
    assert history[-1] >= 0.9
    # The two-number sums alone, so that the easier crowd does not hide them: asked of the exported model.
    out = tmp_path / "answers.jsonl"
    scored = lockstep("eval", run, tmp_path / "data" / "val.parquet", "--max-new-tokens", "48", "--out", out)
    assert scored.returncode == 0, scored.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum(given["score"] for given in answers) / len(answers) == history[-1]
    pairs = [given["score"] for given in answers if given["prompt"][0]["content"].count("+") == 1]
    assert len(pairs) >= 10
    assert sum(pairs) / len(pairs) >= 0.9
