"""LoRA that goes on from a stored adapter, and layers that get none, against PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, MixtralConfig, PreTrainedConfig

from lockstep.errors import Refusal
from lockstep.model.load import load_policy, load_value_model, with_lora
from lockstep.model.policy import Policy
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Lora, Model
from refusals import refuses

CPU = torch.device("cpu")
IDS = torch.tensor([[257, 65, 66, 67, 10, 11, 12]])


def stored(tiny_folder: Path, folder: Path, **keys: object) -> Path:
    """An adapter whose matrices are all drawn, so that it changes the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    layers = ["q_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=layers, task_type="CAUSAL_LM", **keys)  # type: ignore[arg-type]
    adapted = get_peft_model(model, config)
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def policy_of(tiny_folder: Path, **keys: object) -> Policy:
    return load_policy(Model(path=str(tiny_folder), lora=Lora(**keys)), CPU, "sdpa", 0)  # type: ignore[arg-type]


@torch.no_grad()
def test_training_starts_from_the_stored_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    folder = stored(tiny_folder, tmp_path / "adapter")
    policy = policy_of(tiny_folder, adapter=str(folder))
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    base = plain(input_ids=IDS).logits
    theirs = PeftModel.from_pretrained(plain, folder)(input_ids=IDS).logits
    policy.eval()
    with policy.generating() as model:
        found = model(input_ids=IDS).logits
        with policy.without_adapter():
            reference = model(input_ids=IDS).logits
    assert (theirs - base).abs().max() > 0.01
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reference, base, rtol=1e-4, atol=1e-5)
    trained = [name for name, _ in policy.trainable()]
    assert trained
    assert all("lora_" in name and ("q_proj" in name or "down_proj" in name) for name in trained)


@pytest.mark.parametrize(
    ("keys", "stored_keys", "where"),
    [
        ({"rank": 4}, {}, "model.lora.rank"),
        ({"alpha": 6.0}, {}, "model.lora.alpha"),
        ({}, {"modules_to_save": ["lm_head"]}, "model.lora.adapter"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "model.lora.adapter"),
        ({}, {"lora_bias": True}, "model.lora.adapter"),
        ({}, {"layer_replication": [[0, 2], [1, 2]]}, "model.lora.adapter"),
    ],
)
def test_adapters_that_are_something_else(
    tiny_folder: Path, tmp_path: Path, keys: dict[str, object], stored_keys: dict[str, object], where: str
) -> None:
    folder = stored(tiny_folder, tmp_path / "adapter", **stored_keys)
    with pytest.raises(Refusal) as refused:
        with_lora(
            AutoModelForCausalLM.from_pretrained(tiny_folder),
            Lora(adapter=str(folder), **keys),  # type: ignore[arg-type]
            0,
        )
    assert refused.value.problems[0].where.startswith(where)


def test_weights_that_are_missing_or_left_over_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = stored(tiny_folder, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    said = json.loads(file.read_text())
    for layers, why in ((["q_proj"], "no parameter for"), (["q_proj", "down_proj", "k_proj"], "the adapter has no")):
        file.write_text(json.dumps({**said, "target_modules": layers}))
        with pytest.raises(Refusal, match=why):
            with_lora(AutoModelForCausalLM.from_pretrained(tiny_folder), Lora(adapter=str(folder)), 0)
    with pytest.raises(Refusal, match="no-adapter"):
        with_lora(AutoModelForCausalLM.from_pretrained(tiny_folder), Lora(adapter=str(tmp_path)), 0)


@pytest.mark.parametrize("exclude", [["down_proj", "k_proj"], r".*\.(down|k)_proj"])
def test_excluded_layers_get_no_adapter(tiny_folder: Path, exclude: str | list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    lora = Lora(rank=2, alpha=4.0, exclude=exclude)
    names = {name.split(".")[-4] for name, p in with_lora(model, lora, 0).named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, bos_token_id=1, eos_token_id=1)
TIED, APART = (LlamaConfig(**SIZES, tie_word_embeddings=tied) for tied in (True, False))
EXPERTS = MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False)


def layers_of(config: PreTrainedConfig, lora: Lora, place: str = "meta") -> set[str]:
    """The last names of the layers that carry an adapter."""
    with torch.device(place):
        model = with_lora(AutoModelForCausalLM.from_config(config), lora, 0)
    names = [name.partition(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad]
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("config", "name", "values"),
    [
        (GPT2, "wte", ("transformer.wte", "lm_head.weight")),
        (TIED, "embed_tokens", ("model.embed_tokens", "lm_head.weight")),
        (GPT2, "lm_head", ("lm_head", "output head")),
        (APART, "lm_head", ("lm_head", "output head")),
    ],
)
def test_a_tied_layer_gets_no_adapter_whatever_its_name(
    config: PreTrainedConfig, name: str, values: tuple[str, ...], place: str
) -> None:
    with pytest.raises(Refusal) as refused:
        layers_of(config, Lora(rank=2, alpha=4, targets=[name]), place)
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == ("model.lora.targets", "unfit-adapter")
    assert all(value in problem.why for value in values)
    assert problem.remedy


def test_a_layer_that_peft_cannot_adapt_is_named_with_the_remedy() -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=100)
    with refuses("model.lora.targets", "unfit-adapter", "out_proj", remedy="add out_proj to model.lora.exclude"):
        layers_of(config, Lora(rank=2, alpha=4))
    assert layers_of(config, Lora(rank=2, alpha=4, exclude=["out_proj"])) == {"in_proj", "x_proj", "dt_proj"}


def test_layers_that_share_no_weight_get_theirs() -> None:
    assert layers_of(APART, Lora(rank=2, alpha=4, targets=["embed_tokens"])) == {"embed_tokens"}
    assert layers_of(GPT2, Lora(rank=2, alpha=4, targets=["wpe", "c_fc"])) == {"wpe", "c_fc"}
    # PEFT reads the names of single experts as the parameters that hold all of them.
    found = layers_of(EXPERTS, Lora(rank=2, alpha=4, targets=["w1", "w2", "w3", "q_proj"]))
    assert found == {"experts", "base_layer", "q_proj"}


@pytest.mark.parametrize(
    ("config", "keys", "where", "remedy"),
    [
        (APART, {"targets": ["q_proj", "v_prj"]}, "model.lora.targets", "did you mean v_proj?"),
        (APART, {"targets": ["v_prj"]}, "model.lora.targets", "did you mean v_proj?"),
        (APART, {"targets": ["query_key_value"]}, "model.lora.targets", "names of modules end with model, embed"),
        (APART, {"targets": ["q_proj", "mlp.dwn_proj"]}, "model.lora.targets", "did you mean mlp.down_proj?"),
        (EXPERTS, {"targets": ["w1", "w2", "w3", "q_prj"]}, "model.lora.targets", "did you mean q_proj?"),
        (APART, {"targets": ["mlp"]}, "model.lora.targets", "name linear layers"),
        (EXPERTS, {"targets": ["w1", "w2", "w3"], "dropout": 0.1}, "model.lora.dropout", "set model.lora.dropout=0"),
        (APART, {"exclude": ["down_prj"]}, "model.lora.exclude", "did you mean down_proj?"),
        (APART, {"exclude": "layers.0.*"}, "model.lora.exclude", "it must match a full name"),
        (APART, {"exclude": "(down"}, "model.lora.exclude", "fix it"),
    ],
)
def test_a_name_that_matches_nothing_is_refused_with_the_nearest(
    config: PreTrainedConfig, keys: dict[str, object], where: str, remedy: str
) -> None:
    with pytest.raises(Refusal) as refused:
        layers_of(config, Lora(rank=2, alpha=4, **keys))  # type: ignore[arg-type]
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.remedy.startswith(remedy)


def test_names_are_matched_in_a_reward_model_too(tiny_folder: Path) -> None:
    model = Model(path=str(tiny_folder), lora=Lora(rank=2, alpha=4, targets=["q_proj", "v_prj"]))
    with pytest.raises(Refusal, match=r"'v_prj' matches no module"):
        load_value_model(model, str(tiny_folder), CPU, "sdpa", seed=0)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["model.lora={}"], "model.lora.rank"),
        (["model.lora={adapter: a, targets: [q_proj]}"], "model.lora.targets"),
        (["model.lora={adapter: a}", "method=rm"], "model.lora.adapter"),
    ],
)
def test_settings_that_contradict(tmp_path: Path, words: list[str], where: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {path: m}\ndata: {train: rows.jsonl}\n")
    with pytest.raises(Refusal) as refused:
        load_recipe(str(file), words)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_names_of_the_language_model_are_understood_by_a_critic(tiny_folder: Path) -> None:
    """It has the decoder alone, without the head and without the prefix."""
    lora = {
        "rank": 2,
        "alpha": 4,
        "targets": ["q_proj", "v_proj"],
        "exclude": ["lm_head", "model.layers.0.self_attn.q_proj"],
    }
    settings = Model.model_validate({"path": str(tiny_folder), "lora": lora})
    critic = load_value_model(settings, str(tiny_folder), torch.device("cpu"), "sdpa", 0)
    trained = {name for name, _ in critic.trainable() if "lora_A" in name}
    assert any("layers.0.self_attn.v_proj" in name for name in trained)
    assert any("layers.1.self_attn.q_proj" in name for name in trained)
    assert not any("layers.0.self_attn.q_proj" in name for name in trained)
