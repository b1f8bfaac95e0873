"""The critic: where its values start, that a reward model keeps its head, and that packing changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from lockstep.data.batching import micro_batch
from lockstep.errors import Refusal
from lockstep.model.heads import ValueModel
from lockstep.model.load import load_value_model
from lockstep.recipe.schema import Lora, Model
from lockstep.types import Example, MicroBatch, Origin

SEQUENCES = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9])


def load(path: Path, seed: int = 0, head_init: str = "zeros", **settings: Any) -> ValueModel:
    model = Model(path=str(path), **settings)
    return load_value_model(model, str(path), torch.device("cpu"), "sdpa", seed, head_init=head_init)


def batch_of(sequences: tuple[list[int], ...], *, packed: bool) -> MicroBatch:
    """A value at every token: each sequence gets one more token, so that its last one predicts something too."""
    rows = [Example([*ids, 0], [0] + [1] * len(ids), Origin("x", i)) for i, ids in enumerate(sequences)]
    return micro_batch(rows, packed=packed, pad_id=0)


@pytest.fixture(scope="module")
def reward_model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tiny_folder, tmp_path_factory.mktemp("reward"), labels=1)


def write_classifier(tiny_folder: Path, folder: Path, *, labels: int) -> Path:
    config = AutoConfig.from_pretrained(tiny_folder)
    config.num_labels = labels
    torch.manual_seed(1)
    model = Qwen2ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_a_critic_from_a_language_model_starts_at_zero_everywhere(tiny_folder: Path) -> None:
    values = load(tiny_folder)(batch_of(SEQUENCES, packed=True))
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0] * 15


@torch.no_grad()
@pytest.mark.parametrize("packed", [True, False])
def test_a_critic_from_a_reward_model_gives_its_scores(reward_model: Path, packed: bool) -> None:
    """The library scores the last token of an input, so each prefix by itself is one of our values."""
    library = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    expected = [
        float(library(input_ids=torch.tensor([ids[:end]])).logits)
        for ids in SEQUENCES
        for end in range(1, len(ids) + 1)
    ]
    assert max(map(abs, expected)) > 0.5
    assert load(reward_model)(batch_of(SEQUENCES, packed=packed)).tolist() == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("packed", [True, False])
def test_a_critic_of_verl_keeps_its_head_and_its_bias(tiny_folder: Path, tmp_path: Path, packed: bool) -> None:
    """verl trains and stores a token classification model with one label. Its dropout is off."""
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=1, classifier_dropout=0.0)
    torch.manual_seed(2)
    library = Qwen2ForTokenClassification(config).eval()
    torch.nn.init.normal_(library.score.weight, std=0.5)
    torch.nn.init.constant_(library.score.bias, 0.75)
    library.save_pretrained(tmp_path)
    critic = load(tmp_path)
    assert torch.equal(critic.head.weight, library.score.weight)
    assert critic.head.bias.tolist() == [0.75]
    assert "head.bias" in [name for name, _ in critic.trainable()]
    expected = [value for ids in SEQUENCES for value in library(input_ids=torch.tensor([ids])).logits[0, :, 0].tolist()]
    assert critic(batch_of(SEQUENCES, packed=packed)).tolist() == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_a_new_head_may_start_like_verls(tiny_folder: Path) -> None:
    """Normal numbers of the model's own scale, a bias of 0, and the same ones for the same seed."""
    heads = [load(tiny_folder, seed=seed, head_init="random").head for seed in (0, 0, 1)]
    config = AutoConfig.from_pretrained(tiny_folder)
    assert heads[0].bias.tolist() == [0.0]
    assert 0.7 < float(heads[0].weight.std()) / config.initializer_range < 1.3
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)


def test_a_head_of_two_numbers_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        load(write_classifier(tiny_folder, tmp_path / "two", labels=2))
    (problem,) = caught.value.problems
    assert problem.where.startswith("critic.path")
    assert "2 numbers, not one" in problem.why


def test_a_reward_model_without_its_head_is_refused(reward_model: Path, tmp_path: Path) -> None:
    """It would start at random, and nobody would know."""
    weights = load_file(reward_model / "model.safetensors")
    (tmp_path / "config.json").write_text((reward_model / "config.json").read_text())
    save_file(
        {name: w for name, w in weights.items() if not name.startswith("score")},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(Refusal, match=r"the weights lack score\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_reach_every_weight(reward_model: Path, packed: bool) -> None:
    critic = load(reward_model)
    critic(batch_of(SEQUENCES, packed=packed)).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for _, p in critic.trainable())
    assert len(list(critic.trainable())) == len(list(critic.parameters()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_with_lora_the_adapter_and_the_head_learn_alone(tiny_folder: Path, dtype: str) -> None:
    critic = load(tiny_folder, dtype=dtype, lora=Lora(rank=2, alpha=4.0))
    trained = [name for name, _ in critic.trainable()]
    # Seven linear layers in each of two blocks, two matrices each, and the head.
    assert len(trained) == 2 * 7 * 2 + 1
    assert all("lora_" in name or name == "head.weight" for name in trained)
    assert critic(batch_of(SEQUENCES, packed=True)).tolist() == [0.0] * 15
    with torch.no_grad():
        critic.head.weight.fill_(0.1)
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    optimizer = torch.optim.SGD([p for _, p in critic.trainable()], lr=0.5)
    for _ in range(2):  # the second matrix of an adapter starts at zero, so the first one moves in the second step
        (critic(batch_of(SEQUENCES, packed=True)) - 1).square().mean().backward()
        optimizer.step()
    moved = {name for name, p in critic.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trained)
    assert {p.dtype for p in critic.parameters()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}


def test_adapters_are_drawn_from_the_seed(tiny_folder: Path) -> None:
    torch.manual_seed(5)
    one = load(tiny_folder, lora=Lora(rank=2, alpha=4.0))
    torch.manual_seed(6)
    two = load(tiny_folder, lora=Lora(rank=2, alpha=4.0))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_an_empty_share_keeps_every_weight_in_the_graph(reward_model: Path) -> None:
    critic = load(reward_model)
    values = critic(micro_batch([], packed=True, pad_id=0))
    assert values.shape == (0,)
    values.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in critic.parameters())
