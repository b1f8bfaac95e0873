"""Models with a vision tower: the text part equals the full class of transformers, and the tower is never loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import load, native, prompts, run
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3nConfig, LlamaConfig, WhisperConfig

from lockstep.data.batching import micro_batch
from lockstep.errors import Refusal
from lockstep.model.check import build_miniature, check_architecture
from lockstep.model.load_folder import config_of
from lockstep.model.policy import Policy
from lockstep.model.text_model import LanguageModel, is_nested, multimodal_class, text_config, text_sizes
from lockstep.model.towers.tower import tower_tensors
from lockstep.model.trials import Unfit
from lockstep.recipe.schema import Lora
from lockstep.rollout.hf import HfEngine
from lockstep.types import Example, Origin, Request, Sampling
from vision_models import CONFIGS, small_vision_model, stored, write_vision_model

CPU = torch.device("cpu")
LENGTHS = (23, 2, 9)
FAMILIES = [*CONFIGS]
SLOW = pytest.mark.slow
MROPE = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Any:
    made: dict[tuple[str, bool], Path] = {}

    def folder(family: str, tied: bool = False) -> Path:
        if (family, tied) not in made:
            made[family, tied] = write_vision_model(
                tmp_path_factory.mktemp(family) / "m", family, tiny_folder, tied=tied
            )
        return made[family, tied]

    return folder


def full_class(folder: Path) -> Any:
    """The model as transformers loads it, with its tower."""
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def own_logprobs(model: Any, sequences: Sequence[list[int]]) -> torch.Tensor:
    """The log-probs of the full class, one sequence at a time."""
    found = []
    for ids in sequences:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])])
    return torch.cat(found)


DAILY = {("gemma3", True), ("llava", False), ("qwen2_5_vl", False), ("qwen3_vl", True)}


@pytest.mark.daily("gemma3-True", "qwen2_5_vl-False")
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=[] if (family, tied) in DAILY else SLOW)
        for family in FAMILIES
        for tied in (False, True)
    ],
)
def test_logprobs_and_gradients_are_those_of_the_full_class(folders: Any, family: str, tied: bool) -> None:
    folder = folders(family, tied)
    full, policy = full_class(folder), load(folder).eval()
    sequences = rows()
    wanted = own_logprobs(full, sequences)
    (wanted**2).sum().backward()
    gradients = {name: p.grad for name, p in full.named_parameters()}
    ours = dict(policy.causal_lm.named_parameters())
    # The language model has the names that its parameters have in the full class; the rest is the tower.
    assert {name for name, gradient in gradients.items() if gradient is not None} == ours.keys()
    examples = [Example(ids, [1] * len(ids), Origin("rows", row)) for row, ids in enumerate(sequences)]
    for packed in (True, False):
        policy.zero_grad(set_to_none=True)
        found = policy(micro_batch(examples, packed=packed, pad_id=0)).logprobs_K
        (found**2).sum().backward()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        for name, parameter in ours.items():
            wanted_gradient = gradients[name]
            assert wanted_gradient is not None
            assert parameter.grad is not None
            error = (parameter.grad - wanted_gradient).norm() / (wanted_gradient.norm() + 1e-4)
            assert error < 1e-3, f"{name} {'packed' if packed else 'padded'}"


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in ("gemma3", "qwen2_5_vl") else SLOW) for one in FAMILIES]
)
def test_greedy_tokens_are_those_of_the_full_class(folders: Any, family: str) -> None:
    folder = folders(family)
    full, policy = full_class(folder), load(folder)
    asked = prompts(3, longest=12)
    requests, sampling = [Request(ids, key) for key, ids in enumerate(asked)], Sampling(max_tokens=10, temperature=0)
    wanted = []
    for ids in asked:
        grown = full.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=10, eos_token_id=None)
        wanted.append(grown[0, len(ids) :].tolist())
    engine = native(policy, folder, block_tokens=8)
    assert [made.ids for made in run(engine, requests, sampling)] == wanted
    # transformers' own generation pads the prompts on the left.
    padded = HfEngine(policy.generating, lambda ids: "")
    assert [made.ids for made in run(padded, requests, sampling)] == wanted


@pytest.mark.parametrize("family", MROPE)
def test_all_dimensions_of_text_positions_are_the_token_index(folders: Any, family: str) -> None:
    """M-RoPE: for plain text transformers gives each of its three dimensions the index of the token."""
    full = full_class(folders(family))
    seen = []
    full.model.language_model.rotary_emb.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone()))
    full(input_ids=torch.tensor([rows()[0]]), use_cache=False)
    assert torch.equal(seen[0], torch.arange(LENGTHS[0]).expand(3, 1, -1))


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in ("llava", "qwen3_vl_moe") else SLOW) for one in FAMILIES]
)
def test_the_tower_is_not_loaded_and_loading_names_no_unused_weights(folders: Any, family: str) -> None:
    folder = folders(family)
    policy = load(folder)
    assert policy.unused == ()
    tower = set(tower_tensors(config_of(str(folder)), str(folder), "model.path"))
    everything = stored(folder)
    assert tower
    assert tower < everything.keys()
    assert sum(p.numel() for p in policy.parameters()) == sum(
        tensor.numel() for name, tensor in everything.items() if name not in tower
    )
    assert type(policy.causal_lm).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]


def test_lora_adapts_only_the_language_model(folders: Any) -> None:
    policy = load(folders("llava"), Lora(rank=2, alpha=4, targets="all-linear"))
    names = [name for name, _ in policy.trainable()]
    assert names
    assert all(".language_model." in name for name in names)


def test_a_small_model_has_a_tower_of_full_size_without_memory() -> None:
    """The check before training needs no memory for a tower: these two have 400 M parameters in their towers."""
    for family in ("gemma3", "llava"):
        policy: Policy = build_miniature(AutoConfig.for_model(family), "sdpa", CPU).policy
        assert sum(p.numel() for p in policy.parameters()) < 200_000
        assert not any(p.is_meta for p in [*policy.parameters(), *policy.buffers()])


def test_a_rotation_that_differs_from_the_full_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architecture check notices positions that are not those of the full class."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    original = modeling.Qwen2_5_VLTextModel.forward

    def shifted(self: Any, *, position_ids: Any = None, **more: Any) -> Any:
        # lockstep passes two dimensions. A second one that is twice the index is wrong for text.
        if position_ids is not None and position_ids.dim() == 2:
            position_ids = torch.stack([position_ids, 2 * position_ids, position_ids])
        return original(self, position_ids=position_ids, **more)

    config = small_vision_model("qwen2_5_vl").config
    monkeypatch.setattr(modeling.Qwen2_5_VLTextModel, "forward", shifted)
    with pytest.raises(Refusal, match="differ from those of transformers"):
        check_architecture(config, "m", torch.float32, "sdpa", CPU)


def test_sizes_come_from_the_text_config() -> None:
    gemma = small_vision_model("gemma3").config
    assert is_nested(gemma)
    assert text_config(gemma) is gemma.text_config
    assert text_sizes(gemma) == (32, 48, 4, 2, 8, 2, 259)
    flat = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=80, vocab_size=9)
    assert not is_nested(flat)
    assert text_config(flat) is flat
    assert text_sizes(flat) == (64, 80, 4, 4, 16, 3, 9)
    # Whisper's config names the sizes of its decoder otherwise than those of its encoder.
    assert text_sizes(WhisperConfig(decoder_layers=5, encoder_layers=2)).layers == 5
    # Layers of several widths: the widest counts.
    widths = Gemma3nConfig(text_config={"num_hidden_layers": 2, "intermediate_size": [16, 32]})
    assert text_sizes(widths).inner == 32
    # transformers refuses to read a size that differs between layers. Full attention has heads of 512 here.
    assert text_sizes(AutoConfig.for_model("gemma4")).head_size == 512


def test_the_class_is_the_one_that_architectures_names() -> None:
    config = AutoConfig.for_model("qwen3_5")
    kind = multimodal_class(config)
    assert kind is not None
    assert kind.__name__ == "Qwen3_5ForConditionalGeneration"
    assert multimodal_class(text_config(config)) is None


@pytest.mark.parametrize("model_type", ["clip", "t5", "vit", "qwen2_5_omni_talker", "rag"])
def test_a_config_without_a_language_model_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(Refusal) as caught:
        config_of(str(tmp_path))
    assert {problem.code for problem in caught.value.problems} <= {"unsupported-model", "unreadable"}


def test_a_class_that_mixes_text_and_towers_is_refused() -> None:
    config = AutoConfig.for_model("blip")
    with pytest.raises(Unfit, match="no output head"):
        build_miniature(config, "sdpa", CPU)


def test_a_missing_tower_tensor_is_refused(folders: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("qwen3_vl"), tmp_path / "m")
    tensors = stored(folder)
    del tensors["model.visual.blocks.0.attn.proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refusal, match=r"lack model\.visual\.blocks\.0\.attn\.proj\.weight") as caught:
        tower_tensors(config_of(str(folder)), str(folder), "model.path")
    assert [problem.code for problem in caught.value.problems] == ["missing-weight"]


def test_weights_that_are_not_safetensors_are_refused(folders: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("qwen3_vl"), tmp_path / "m")
    torch.save(stored(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Refusal) as caught:
        tower_tensors(config_of(str(folder)), str(folder), "model.path")
    assert [problem.code for problem in caught.value.problems] == ["unsupported-format"]


def test_a_flat_config_is_built_by_transformers_itself() -> None:
    config = LlamaConfig(
        **{name: value for name, value in CONFIGS["llava"]["text_config"].items() if name != "model_type"}
    )
    assert type(LanguageModel.from_config(config)).__name__ == "LlamaForCausalLM"
    assert tower_tensors(config, "nowhere", "model.path") == []
