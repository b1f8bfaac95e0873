"""Weights that are all there and all numbers, adapters that are merged as they compute, and settings that stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gguf_files import write_gguf
from lockstep.commands.generate import Conversation
from lockstep.errors import Refusal
from lockstep.model.export_folder import export_model, merge_adapter
from lockstep.model.gguf import import_gguf
from lockstep.model.load import load_policy, load_value_model
from lockstep.model.resolve import folders_of, model_folder
from lockstep.model.tiny import write_tiny
from lockstep.recipe.schema import Model
from refusals import refuses

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    write_tiny(folder, hidden=32, layers=2)
    return folder


def changed(model: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The model with other weights in its file."""
    shutil.copytree(model, out)
    weights = load_file(out / WEIGHTS)
    change(weights)
    save_file(weights, out / WEIGHTS, {"format": "pt"})
    return out


def speak(folder: Path) -> str:
    settings: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0, "seed": 0, "system": None}
    return Conversation(str(folder), "cpu", **settings).answer("hello")


def adapter(model: Path, folder: Path, *layers: str) -> Path:
    """One that changes the model."""
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=list(layers), task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def test_a_model_without_all_its_weights_does_not_speak(model: Path, tmp_path: Path) -> None:
    up = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(Refusal, match=f"the weights lack {up}"):
        speak(changed(model, tmp_path / "lacking", lambda weights: weights.pop(up)))
    with pytest.raises(Refusal, match=f"{up} holds NaN or infinity"):
        speak(changed(model, tmp_path / "nan", lambda weights: weights[up][3, 5].fill_(float("nan"))))
    with pytest.raises(Refusal, match=r"embed_tokens.weight holds NaN or infinity"):
        speak(
            changed(
                model, tmp_path / "inf", lambda weights: weights["model.embed_tokens.weight"][9, 9].fill_(float("inf"))
            )
        )


def test_weights_that_are_no_numbers_are_not_trained(model: Path, tmp_path: Path) -> None:
    """By a policy, a critic or a reward model; of a row that no token of the check reads, too."""
    name = "model.layers.0.self_attn.k_proj.bias"
    folder = str(changed(model, tmp_path / "nan", lambda weights: weights[name][2].fill_(float("nan"))))
    told = f"{name.removeprefix('model.')} holds NaN or infinity"
    with pytest.raises(Refusal, match=told):
        load_policy(Model(path=folder), torch.device("cpu"), "sdpa", 0)
    with pytest.raises(Refusal, match=told):
        load_value_model(Model(path=folder), folder, torch.device("cpu"), "sdpa", 0)


def test_a_tokenizer_with_more_tokens_than_the_model_does_not_speak(model: Path, tmp_path: Path) -> None:
    def fewer(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:257].clone()

    folder = changed(model, tmp_path / "fewer", fewer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 257, "pad_token_id": 0}))
    with pytest.raises(Refusal, match="the embedding has 257 rows"):
        speak(folder)


@pytest.mark.daily("layers1")
@pytest.mark.parametrize("layers", [("lm_head",), ("embed_tokens", "q_proj"), ("q_proj", "down_proj")])
def test_a_merged_adapter_computes_what_it_does_beside_its_base(
    model: Path, tmp_path: Path, layers: tuple[str, ...]
) -> None:
    """Also one on the head or the embedding of a tied model, in which these are one matrix."""
    assert AutoConfig.from_pretrained(model).tie_word_embeddings
    folder = adapter(model, tmp_path / "adapter", *layers)
    merge_adapter(folder, str(model), tmp_path / "merged", "here")
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = logits(base)
    beside = logits(PeftModel.from_pretrained(base, folder))
    assert (beside - plain).abs().max() > 0.01
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), beside, rtol=1e-4, atol=1e-5
    )


def test_an_adapter_of_a_deeper_model_is_refused(model: Path, tmp_path: Path) -> None:
    """Its lower layers would fit; PEFT passes over the others without a word."""
    write_tiny(tmp_path / "deeper", hidden=32, layers=3)
    folder = adapter(tmp_path / "deeper", tmp_path / "adapter", "q_proj")
    with pytest.raises(Refusal, match=r"its base has no parameter for .*layers\.2\.self_attn\.q_proj\.lora_A"):
        merge_adapter(folder, str(model), tmp_path / "merged", "here")
    folder = adapter(model, tmp_path / "shallow", "q_proj")
    with pytest.raises(Refusal, match=r"the adapter has no .*layers\.2\.self_attn"):
        merge_adapter(folder, str(tmp_path / "deeper"), tmp_path / "merged", "here")
    assert not (tmp_path / "merged").exists()


def test_a_gguf_file_that_is_not_whole_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGUFWriter

    whole = write_gguf(model, tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refusal, match="is truncated or damaged"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    add = GGUFWriter.add_tensor

    def without_a_layer(self: Any, name: str, *content: Any, **more: Any) -> None:
        if name != "blk.1.ffn_up.weight":
            add(self, name, *content, **more)

    monkeypatch.setattr(GGUFWriter, "add_tensor", without_a_layer)
    file = write_gguf(model, tmp_path / "lacking.gguf")
    with pytest.raises(Refusal, match=r"the weights lack model.layers.1.mlp.up_proj.weight"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", [False, True])
def test_an_export_keeps_the_generation_settings_of_its_base(model: Path, tmp_path: Path, lora: bool) -> None:
    """Also those that transformers reads and would not write."""
    base = tmp_path / "base"
    shutil.copytree(model, base)
    said = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [257, 10]}
    (base / "generation_config.json").write_text(json.dumps(said))
    settings = Model(path=str(base), lora={"rank": 2, "alpha": 4, "targets": ["q_proj"]} if lora else None)  # type: ignore[arg-type]
    if lora:
        names = dict(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora_of(settings)).named_parameters())
        weights = {name: weight.detach() for name, weight in names.items() if "lora_" in name}
    else:
        weights = load_file(base / WEIGHTS)
    export_model(settings, weights, tmp_path / "out", where="here", folders=folders_of(settings), end_tokens=[65])
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.do_sample, found.temperature, found.top_p) == (False, 0.6, 0.9)
    assert found.eos_token_id == [257, 10, 65]


def lora_of(settings: Model) -> LoraConfig:
    assert settings.lora is not None
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_a_name_that_is_no_model_is_answered_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("runs/first/recipe.yaml", "runs/first/checkpoints/step_2/state.json", "packed/q8.gguf", "tiny/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for path, told in {
        "runs": "use a model inside this folder: runs/first",
        "runs/first/checkpoints": "use one of its checkpoints: runs/first/checkpoints/step_2",
        "packed": "packed/q8.gguf",
        "tinny": "did you mean tiny?",
        "rums/first": "did you mean the folder runs?",
        "runs/frist": "did you mean runs/first?",
        "far/away/from/all": "give the path of a model, a run or a checkpoint",
        "quickstart/model": "lockstep tiny quickstart/model",
        "packed/q8.gguf/x": "no such folder",
    }.items():
        with pytest.raises(Refusal) as refused:
            model_folder(path)
        assert told in str(refused.value), path
    adapter_of = {"base_model_name_or_path": "someone/model"}
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps(adapter_of))
    with refuses("", "", remedy="set model.path to the base model and model.adapter to this folder"):
        model_folder("adapter")
