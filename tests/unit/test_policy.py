"""Architectures that are scored as transformers scores them, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from lockstep.errors import Refusal
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy
from lockstep.recipe.schema import Lora, Model

SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def folder(tmp_path: Path, name: str, **settings) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Sharper logits than a fresh model has, so that a wrong mask shows.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(tmp_path / name)
    return tmp_path / name


def load(path: Path, **settings) -> Policy:
    return load_policy(Model(path=str(path), **settings), torch.device("cpu"), "sdpa", seed=0)


@pytest.mark.daily("Qwen2-settings4", "Mistral-settings3", "Cohere-settings8", "Olmo2-settings6")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Llama", {"tie_word_embeddings": False}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("Phi3", {"pad_token_id": 0}),
        ("Olmo2", {}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.25, "bos_token_id": None, "eos_token_id": None}),
    ],
)
def test_packed_policies_score_as_transformers_does(tmp_path: Path, name: str, settings: dict) -> None:
    policy = load(folder(tmp_path, name, **settings))
    assert sum(1 for _ in policy.trainable()) == sum(1 for _ in policy.model.parameters())


def test_attention_we_would_score_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"do not use transformers' attention interface"):
        load(folder(tmp_path, "Bloom"))


def test_a_head_we_would_score_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody knew what this architecture divides its logits by."""
    monkeypatch.setattr("lockstep.model.policy.DIVISORS", {})
    with pytest.raises(Refusal, match="log-probs differ"):
        load(folder(tmp_path, "Granite", logits_scaling=4.0))


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=120, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    with pytest.raises(Refusal, match=r"model\.path"):
        load(tmp_path / "m")


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone(tiny_folder: Path) -> None:
    lora = Lora(rank=4, alpha=8.0)
    first = load(tiny_folder, lora=lora)
    torch.randn(100)
    second = load(tiny_folder, lora=lora)
    names = [name for name, _ in first.trainable()]
    assert all("lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)
    for (_, a), (_, b) in zip(first.trainable(), second.trainable(), strict=True):
        assert torch.equal(a, b)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), first.generating() as model:
        adapted = model(ids).logits
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.testing.assert_close(adapted, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_unknown_adapter_targets_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(Refusal, match=r"model\.lora\.targets"):
        load(tiny_folder, lora=Lora(rank=4, alpha=8.0, targets=["no_such_layer"]))


def test_folders_that_are_not_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no such folder"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=r"no config\.json"):
        load(tmp_path / "empty")
