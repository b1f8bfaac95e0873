"""GRPO through a vLLM server learns the quickstart's task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.data.prepare.generated import write_arithmetic
from lockstep.run.metrics import read_metrics
from lockstep.train.start import train

STEPS = 40


@pytest.fixture
def warmed(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a quickstart that has had its supervised start."""
    monkeypatch.chdir(tmp_path)
    write_arithmetic(Path("quickstart/carry"), difficulty=2)
    train("warmup-arithmetic", **{"model.path": str(embedded), "val.questions": None, "log.every": 1000})
    return tmp_path


def test_grpo_learns_the_quickstarts_task(server, warmed: Path) -> None:
    keys = {"rollout.engine": "vllm", "rollout.url": server.url, "run.steps": STEPS, "checkpoint.every": STEPS}
    run = train("grpo-arithmetic", **keys, **{"val.every": None, "tape": True, "log.every": 1000})
    told = [metrics for _, metrics in read_metrics(run / "metrics.jsonl")]
    # As much as the built-in engine's run lifts it (tests/e2e/test_online_learning.py).
    accuracy = [metrics["val/accuracy"] for metrics in told if "val/accuracy" in metrics]
    assert accuracy[-1] > accuracy[0] + 0.25
    steps = [metrics for metrics in told if "critic/score/mean" in metrics]
    assert len(steps) == STEPS
    # Engine and trainer are two programs on the same weights, and what little they differ by is corrected.
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in steps) < 1e-3
    assert all("rollout_corr/ratio_mean" in metrics and "timing_s/sync" in metrics for metrics in steps)
    # Every sample says which weights drew it.
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    drawn = {(line["step"], version) for line in samples if line["kind"] == "train" for version in line["versions"]}
    assert drawn == {(step, step - 1) for step in range(1, STEPS + 1)}
