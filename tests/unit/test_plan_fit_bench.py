"""bench/plan_fit.py on tiny models: a setting is chosen, trained in a process of its own, and recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import plan_fit
import random_weights
from lockstep.kernels.quantized.quantized_linear import quantized_layers
from lockstep.model import load_folder
from lockstep.model.load import load_policy
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.recipe.schema import Lora, Model


def test_the_cases_cover_limits_sizes_and_methods() -> None:
    cases = plan_fit.CASES
    assert len({case.name for case in cases}) == 12
    assert {case.limit for case in cases} == {24, 48, 80}
    assert {case.model for case in cases} == {"0.5b", "1.5b", "8b"}
    assert {case.method for case in cases} == {"sft", "dpo", "grpo"}
    kinds = {(plan_fit.LORA in case.words, plan_fit.NF4 in case.words) for case in cases}
    assert kinds == {(False, False), (True, False), (True, True)}


def test_weights_without_files_are_drawn_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = plan_fit.MODELS["tiny"].config()
    parameters = random_weights.write_hollow(tmp_path, config)
    held = (tmp_path / "model.safetensors").stat()
    assert held.st_size > 2 * parameters > 512 * held.st_blocks  # the values are a hole
    for owner, name in ((StoredTensors, "fill"), (StoredTensors, "__getitem__"), (load_folder, "has_codes")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    cpu = torch.device("cpu")
    random_weights.draw_weights(cpu)
    plain = load_policy(Model(path=str(tmp_path), dtype="fp32"), cpu, "sdpa", 0)
    assert sum(one.numel() for one in plain.causal_lm.parameters()) == parameters
    whole = dict(plain.causal_lm.named_parameters())
    drawn = whole["model.layers.1.mlp.down_proj.weight"].detach()
    assert float(drawn.std()) == pytest.approx(random_weights.SPREAD, rel=0.05)
    assert not torch.equal(drawn, whole["model.layers.0.mlp.down_proj.weight"])
    coded = load_policy(Model(path=str(tmp_path), quantize="nf4", lora=Lora(rank=2, alpha=4.0)), cpu, "sdpa", 0)
    layers = dict(quantized_layers(coded.causal_lm))
    near = layers["model.layers.1.mlp.down_proj.base_layer"].weight.float() - drawn
    assert 0 < float(near.norm() / drawn.norm()) < 0.15


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
