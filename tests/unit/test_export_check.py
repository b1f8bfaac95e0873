"""An export is compared with the trained model by plain transformers, and refused where it computes something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import write_model
from transformers import AutoModelForCausalLM, GPT2Config

from lockstep.errors import Refusal
from lockstep.model import export_check
from lockstep.model.export_check import probe_of, verify_export
from lockstep.model.export_folder import export_model, export_value_model
from lockstep.model.load import load_policy, load_value_model
from lockstep.model.policy import Policy
from lockstep.model.resolve import folders_of
from lockstep.model.weights import trained_weights
from lockstep.recipe.schema import Lora, Model
from refusals import refuses

CPU = torch.device("cpu")
LORA = Lora(rank=2, alpha=4, targets=["q_proj", "down_proj"])


@torch.no_grad()
def changed(module: Any, by: float = 0.05) -> dict[str, torch.Tensor]:
    """The trained weights, after training that moved all of them."""
    torch.manual_seed(1)
    for _, weight in module.trainable():
        weight.add_(torch.randn_like(weight), alpha=by)
    return trained_weights(module.stored)


def exported(settings: Model, out: Path, *, wrong: bool = False, **how: Any) -> export_check.Verification:
    """A policy whose weights moved, exported; `wrong` stores other weights than it has."""
    policy = load_policy(settings, CPU, "sdpa", 0)
    weights = changed(policy)
    probe = probe_of(policy, CPU)
    assert policy.training
    if wrong:
        weights = {name: weight if index % 2 else weight * 3 for index, (name, weight) in enumerate(weights.items())}
    return export_model(settings, weights, out, where="test", folders=folders_of(settings), probe=probe, **how)


@pytest.mark.daily("lora2-True-bf16", "lora1-False-fp32", "None-False-fp16")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("lora", "adapter"), [(None, False), (LORA, False), (LORA, True)])
def test_every_kind_of_export_is_verified(
    tiny_folder: Path, tmp_path: Path, dtype: Any, lora: Lora | None, adapter: bool
) -> None:
    settings = Model(path=str(tiny_folder), dtype=dtype, lora=lora)
    verified = exported(settings, tmp_path / "out", adapter=adapter)
    assert verified.done, verified.sentence
    assert verified.sentence.startswith("verified: loaded by plain transformers")
    with pytest.raises(Refusal, match="gives other log-probs than the trained model"):
        exported(settings, tmp_path / "wrong", wrong=True, adapter=adapter)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left of the wrong one


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_reward_model_is_verified_by_its_scores(tiny_folder: Path, tmp_path: Path, lora: Lora | None) -> None:
    settings = Model(path=str(tiny_folder), lora=lora)
    module = load_value_model(settings, str(tiny_folder), CPU, "sdpa", seed=0)
    weights = changed(module)
    probe = probe_of(module, CPU)
    assert len(probe["values"]) == len(probe["rows"])
    assert len({round(value, 4) for value in probe["values"]}) == len(probe["values"])
    verified = export_value_model(
        settings, weights, tmp_path / "out", where="test", folders=folders_of(settings), probe=probe
    )
    assert verified.done, verified.sentence
    weights["head.weight"] = weights["head.weight"] + 0.5
    with refuses("test", "export-differs", "scores"):
        export_value_model(
            settings, weights, tmp_path / "wrong", where="test", folders=folders_of(settings), probe=probe
        )


@torch.no_grad()
def test_a_merged_tie_is_caught(tiny_folder: Path, tmp_path: Path) -> None:
    """An adapter on GPT-2's embedding, which is its head too: training leaves the head alone, merging does not."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=259, bos_token_id=1, eos_token_id=1)
    folder = write_model(tmp_path / "gpt2", config, tiny_folder)
    policy = load_policy(Model(path=str(folder)), CPU, "sdpa", 0)
    wanted = LoraConfig(r=2, lora_alpha=4, target_modules=["wte"], task_type="CAUSAL_LM")
    policy = Policy(get_peft_model(policy.causal_lm, wanted), "sdpa")
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    probe = probe_of(policy, CPU)
    merged: Any = policy.model.merge_and_unload()  # type: ignore[operator]
    merged.save_pretrained(tmp_path / "merged")
    with pytest.raises(Refusal, match="gives other log-probs"):
        verify_export(tmp_path / "merged", probe, "policy", torch.float32, "test")


def test_what_cannot_be_verified_is_said(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Model(path=str(tiny_folder))
    weights = trained_weights(load_policy(settings, CPU, "sdpa", 0).stored)
    found = export_model(settings, weights, tmp_path / "old", where="test", folders=folders_of(settings))
    assert (found.done, found.sentence[:12]) == (False, "NOT verified")
    assert "an earlier version saved it" in found.sentence
    told = export_check.host_memory()
    monkeypatch.setattr(export_check, "host_memory", lambda: replace(told, free=1000))
    found = exported(settings, tmp_path / "large")
    assert not found.done
    assert "GiB of host memory" in found.sentence
    assert (tmp_path / "large" / "model.safetensors").is_file()


def test_weights_that_transformers_does_not_use_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    policy = load_policy(Model(path=str(tiny_folder)), CPU, "sdpa", 0)
    probe = probe_of(policy, CPU)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    state = {**model.state_dict(), "model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}
    model.save_pretrained(tmp_path / "more", state_dict=state)
    with pytest.raises(Refusal, match=r"has model\.layers\.7\.mlp\.up_proj\.weight, which transformers does not use"):
        verify_export(tmp_path / "more", probe, "policy", torch.float32, "test")
