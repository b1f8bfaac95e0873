"""Soft caps, sinks and scaled logits in whole models: trained and sampled as with transformers' eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, native, prompts, run, write_model
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    HyperCLOVAXConfig,
    MptConfig,
    NanoChatConfig,
    Qwen2Config,
    VaultGemmaConfig,
)

from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.model.policy import Policy, Scoring, output_head
from lockstep.types import MicroBatch, Request, Sampling

CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 6}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, Any] = {
    "gemma2": Gemma2Config(**SIZES, **CAPS),
    "vaultgemma": VaultGemmaConfig(**SIZES, **CAPS),
    "gpt-oss": GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0, attention_multiplier=0.3),
    "granite-swa": GraniteSWAConfig(**SIZES, logits_scaling=4.0, sliding_window=6, **NO_TOKENS),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25, **NO_TOKENS),
    "cohere2": Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=6, **NO_TOKENS),
    "hyperclovax": HyperCLOVAXConfig(**SIZES, logits_scaling=0.5),
    "nanochat": NanoChatConfig(**SIZES, final_logit_softcapping=3.0),
}
SEQUENCES = [[(7 * i + 3 * which) % 259 for i in range(n)] for which, n in enumerate((5, 30, 17, 24))]


def policy_of(folder: Path) -> Policy:
    register_attention()
    return Policy(AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION).eval(), "sdpa")


def written(folder: Path, name: str, tokenizer_from: Path) -> Path:
    write_model(folder, MODELS[name], tokenizer_from)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


@contextmanager
def eager(policy: Policy) -> Iterator[Any]:
    """The attention that each of these models brings along; torch's own knows neither caps nor sinks."""
    policy.causal_lm.set_attn_implementation("eager")
    try:
        yield policy.causal_lm
    finally:
        policy.causal_lm.set_attn_implementation(ATTENTION)


def line_of(sequences: list[list[int]]) -> MicroBatch:
    flat = [token for ids in sequences for token in ids]
    positions = [place for ids in sequences for place in range(len(ids))]
    predictors = [place for place in range(len(flat) - 1) if positions[place + 1]]
    return MicroBatch(
        input_ids_NT=torch.tensor([flat]),
        position_ids_NT=torch.tensor([positions]),
        lengths=tuple(map(len, sequences)),
        packed=True,
        predictors_K=torch.tensor(predictors),
        targets_K=torch.tensor([flat[place + 1] for place in predictors]),
        index_K=torch.arange(len(predictors)),
    )


def distribution(model: Any, temperature: float) -> torch.distributions.Categorical:
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].double() for ids in SEQUENCES]
    return torch.distributions.Categorical(logits=torch.cat(logits) / temperature)


@pytest.mark.daily("gpt-oss", "gemma2", "cohere")
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_line_is_scored_and_differentiated_as_each_sequence_alone(
    name: str, tmp_path: Path, tiny_folder: Path
) -> None:
    policy = policy_of(written(tmp_path / "model", name, tiny_folder))
    policy.scoring = Scoring(temperature=0.7, entropy=True)
    line = line_of(SEQUENCES)
    ours = policy(line)
    assert ours.entropies_K is not None
    with eager(policy) as model:
        theirs = distribution(model, 0.7)
    torch.testing.assert_close(ours.logprobs_K.double(), theirs.log_prob(line.targets_K), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropies_K.double(), theirs.entropy(), rtol=1e-4, atol=1e-4)
    one, two = torch.randn(2, len(line.targets_K), generator=torch.Generator().manual_seed(0))
    parameters = dict(policy.named_parameters())
    if name in ("gpt-oss", "granite-swa"):
        assert any(parameter.endswith("sinks") for parameter in parameters)
    found, wanted = (
        torch.autograd.grad(total.sum(), list(parameters.values()), allow_unused=True)
        for total in (
            ours.logprobs_K * one + ours.entropies_K * two,
            theirs.log_prob(line.targets_K) * one + theirs.entropy() * two,
        )
    )
    for parameter, a, b in zip(parameters, found, wanted, strict=True):
        assert (a is None) == (b is None), parameter
        if a is not None and b is not None:
            assert b.norm() > 0, parameter
            assert (a - b).norm() <= 1e-4 * b.norm(), parameter


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_layers_and_their_attention_may_both_be_computed_again(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    """Gradient checkpointing of the layers, around that of the attention's blocks of queries."""
    policy = policy_of(written(tmp_path / "model", name, tiny_folder)).train()
    parameters = [parameter for key, parameter in policy.named_parameters() if "self_attn" in key]
    plain = torch.autograd.grad(policy(line_of(SEQUENCES)).logprobs_K.sum(), parameters)
    policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = torch.autograd.grad(policy(line_of(SEQUENCES)).logprobs_K.sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.daily("gemma2")
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_samples_from_the_same_distribution(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    """Prompts in one pass and in chunks, then token by token, far beyond the window."""
    folder = written(tmp_path / "model", name, tiny_folder)
    policy = policy_of(folder)
    requests = [Request(ids, key) for key, ids in enumerate(prompts(4, seed=2))]
    for settings in ({"block_tokens": 4}, {"block_tokens": 4, "prefill_tokens": 3, "max_sequences": 2}):
        for sampling in (Sampling(max_tokens=12, temperature=0), Sampling(max_tokens=12, temperature=0.8, seed=3)):
            for made in run(native(policy, folder, **settings), requests, sampling):
                asked = list(requests[made.request].ids)
                ids = torch.tensor([[*asked, *made.ids]])
                with eager(policy) as model, torch.no_grad():
                    logits = model(input_ids=ids, use_cache=False).logits[0, len(asked) - 1 : -1].double()
                if not sampling.temperature:
                    assert made.ids == logits.argmax(-1).tolist()
                every = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
                right = every.gather(-1, ids[0, len(asked) :, None])[:, 0]
                torch.testing.assert_close(torch.tensor(made.logprobs).double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        (MODELS["gemma2"], 1.0, 3.0),
        (MODELS["granite"], 0.25, None),
        (MODELS["cohere"], 0.25, None),
        # The same name as granite's, with the opposite meaning.
        (MODELS["hyperclovax"], 0.5, None),
        (Qwen2Config(**SIZES), 1.0, None),
        # A setting that transformers' own model does not look at.
        (MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=259, max_seq_len=64, logit_scale=0.5), 1.0, None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_a_configuration_says_of_its_head(config: Any, scale: float, softcap: float | None) -> None:
    model = AutoModelForCausalLM.from_config(config)
    head = output_head(model)
    assert head.weight_VH is model.get_output_embeddings().weight
    assert (head.scale, head.softcap) == (scale, softcap)
