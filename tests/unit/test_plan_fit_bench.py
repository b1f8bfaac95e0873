"""bench/plan_fit.py on tiny models: a setting is chosen, trained in a process of its own, and recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import plan_fit


def test_the_cases_cover_limits_sizes_and_methods() -> None:
    cases = plan_fit.CASES
    assert len({case.name for case in cases}) == 12
    assert {case.limit for case in cases} == {24, 48, 80}
    assert {case.model for case in cases} == {"0.5b", "1.5b", "8b"}
    assert {case.method for case in cases} == {"sft", "dpo", "grpo"}
    kinds = {(plan_fit.LORA in case.words, plan_fit.NF4 in case.words) for case in cases}
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.slow
def test_tiny_cases_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    monkeypatch.setattr(
        sys, "argv", ["plan_fit.py", "--device", "cpu", "--tiny", "--cases", "2", "3", "4", "--out", str(out)]
    )
    plan_fit.main()
    results = json.loads(out.read_text())["results"]
    assert [result["method"] for result in results] == ["sft", "dpo", "grpo"]
    for result in results:
        assert "error" not in result
        assert result["predicted_gb"] <= result["limit"]
        assert result["train_s"] > 0
    assert "model.quantize=nf4" in results[0]["arguments"]
    assert any(word.startswith("rollout.cache_gb=") for word in results[2]["arguments"])
