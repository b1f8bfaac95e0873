"""The built-in engine runs architectures as transformers has them, and refuses those it cannot run exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, prompts, run, uncached_config, write_model
from transformers import (
    BambaConfig,
    Cohere2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Lora, Model
from lockstep.rollout.engine_check import check_engine
from lockstep.rollout.generator import Generator
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Completion, Request, Sampling

CPU = torch.device("cpu")

SUPPORTED: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen2-half-windowed": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 16}),
    "llama": LlamaConfig(**SIZES),
    "llama3-rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral-windowed": MistralConfig(**SIZES, sliding_window=5),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0, attention_multiplier=0.3),
    "cohere2-windowed": Cohere2Config(
        **SIZES, logit_scale=0.25, sliding_window=5, bos_token_id=None, eos_token_id=None, pad_token_id=None
    ),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "bamba": BambaConfig(
        **SIZES, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
    ),
    "gpt2": GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.4),
}


def greedy_of_transformers(model: Any, ids: list[int], tokens: int) -> list[int]:
    made = model.generate(
        input_ids=torch.tensor([ids], device=model.device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(ids) :].tolist()


@pytest.mark.daily("qwen3", "mistral-windowed", "gpt2", "lfm2")
@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_is_that_of_generate(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    folder = write_model(tmp_path / "model", SUPPORTED[name], tiny_folder)
    policy = load(folder)
    asked = prompts(5, seed=2)
    requests = [Request(ids, key) for key, ids in enumerate(asked)]
    made = run(native(policy, folder, block_tokens=4), requests, Sampling(max_tokens=20, temperature=0))
    with policy.generating() as model:
        theirs = [greedy_of_transformers(model, ids, 20) for ids in asked]
    assert [c.ids for c in made] == theirs
    chunked = native(policy, folder, block_tokens=4, prefill_tokens=3, max_sequences=2)
    assert [c.ids for c in run(chunked, requests, Sampling(max_tokens=20, temperature=0))] == theirs
    # The check is about the model, whatever the run scores.
    policy.scoring = Scoring(temperature=0.5)
    check_engine(chunked, policy, CPU, str(folder), paged_on=chunked.device)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize(
    "name", ["llama", "qwen2-half-windowed", "qwen3", "mistral-windowed", "granite", "lfm2", "bamba"]
)
def test_greedy_on_an_nvidia_device_is_that_of_generate(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    """With recorded passes, kernels and all."""
    folder = write_model(tmp_path / "model", SUPPORTED[name], tiny_folder)
    device = select("cuda")
    policy = load_policy(Model(path=str(folder)), device.torch_device(), device.attention, 0)
    asked = prompts(24, seed=2)
    engine = NativeEngine(policy, device, RolloutSettings(max_sequences=16, block_tokens=4), str)
    made = run(engine, [Request(ids, key) for key, ids in enumerate(asked)], Sampling(max_tokens=20, temperature=0))
    with policy.generating() as model:
        theirs = [greedy_of_transformers(model, ids, 20) for ids in asked]
    assert [c.ids for c in made] == theirs


class Off(HfEngine):
    """An engine whose log-probs are not those of its tokens."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for made in super().generate(requests, sampling):
            yield replace(made, logprobs=[logprob - 0.01 for logprob in made.logprobs])


@pytest.mark.slow
def test_a_model_that_trains_and_cannot_be_cached_is_refused_by_the_engine(tmp_path: Path, tiny_folder: Path) -> None:
    """DeepSeek-V4 caches compressed keys in classes of its own."""
    folder = write_model(tmp_path / "model", uncached_config(), tiny_folder)
    policy = load(folder)
    tokenizer, device = load_tokenizer(str(folder)), select("cpu")
    with pytest.raises(Refusal, match=r"DeepseekV4ForCausalLM.*need .* of transformers' cache") as refusal:
        Generator(policy, tokenizer, RolloutSettings(), device, World(), str(folder))
    assert "rollout.engine=hf" in refusal.value.problems[0].remedy
    Generator(policy, tokenizer, RolloutSettings(engine="hf"), device, World(), str(folder))


def test_an_engine_is_held_against_the_trainer(tmp_path: Path, tiny_folder: Path) -> None:
    folder = write_model(tmp_path / "model", Qwen2Config(**SIZES), tiny_folder)
    policy = load(folder)
    policy.scoring = before = Scoring(temperature=0.5)
    policy.train()
    engine = Off(policy.generating, load_tokenizer(str(folder)).decode)
    with pytest.raises(Refusal, match=r"engine's log-probabilities differ from the trainer's by 0\.01") as refusal:
        check_engine(engine, policy, CPU, str(folder), paged_on=None)
    assert "another model" in refusal.value.problems[0].remedy
    assert policy.training
    assert policy.scoring is before


ROPE = {
    "dynamic": (
        LlamaConfig,
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"max_position_embeddings": 40},
    ),
    "longrope": (
        Phi3Config,
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 40,
        },
        {"max_position_embeddings": 160, "original_max_position_embeddings": 40, "pad_token_id": 0},
    ),
}


@pytest.mark.parametrize("kind", ROPE)
def test_positions_that_depend_on_the_batch_are_refused_where_they_would(
    kind: str, tmp_path: Path, tiny_folder: Path
) -> None:
    family, rope, more = ROPE[kind]
    config = family(**{**SIZES, **more}, rope_parameters=rope)
    folder = write_model(tmp_path / "model", config, tiny_folder)
    policy = load(folder)
    asked = [list(range(30)), list(range(7))]
    requests = [Request(ids, key) for key, ids in enumerate(asked)]
    # Up to 40 tokens they are the usual positions.
    made = run(native(policy, folder), requests, Sampling(max_tokens=10, temperature=0))
    with policy.generating() as model:
        assert [c.ids for c in made] == [greedy_of_transformers(model, ids, 10) for ids in asked]
    with pytest.raises(Refusal, match=rf"rollout.max_tokens \[rotary-limit\]: .* 41 tokens.* over 40 tokens .*{kind}"):
        list(native(policy, folder).generate(requests, Sampling(max_tokens=11)))


@pytest.fixture
def adapted(tmp_path: Path, tiny_folder: Path) -> tuple[Policy, Path]:
    folder = write_model(tmp_path / "model", Qwen2Config(**SIZES), tiny_folder)
    return load(folder, Lora(rank=4, alpha=8.0)), folder


@pytest.mark.slow
def test_an_adapter_is_active_and_not_merged(adapted: tuple[Policy, Path]) -> None:
    policy, folder = adapted
    asked = prompts(4, seed=3)
    requests = [Request(ids, key) for key, ids in enumerate(asked)]
    sampling = Sampling(max_tokens=16, temperature=0)
    before = run(native(policy, folder), requests, sampling)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    weights = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    made = run(native(policy, folder), requests, sampling)
    assert [c.ids for c in made] != [c.ids for c in before]
    with policy.generating():
        assert [c.ids for c in made] == [greedy_of_transformers(policy.model, ids, 16) for ids in asked]
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.named_parameters())
    with policy.without_adapter():
        assert [c.ids for c in run(native(policy, folder), requests, sampling)] == [c.ids for c in before]
