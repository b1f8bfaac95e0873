"""The check at load finds what goes wrong past a limit, in single gradients and in a coarse dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, write_model
from transformers import (
    AutoConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi4MultimodalConfig,
    PhimoeConfig,
)

from lockstep.data.batching import micro_batch
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.kernels.attention import interface as attention
from lockstep.kernels.attention import paged, varlen
from lockstep.kernels.attention.layout import make_layout
from lockstep.model import miniature, trials
from lockstep.model.check import LENGTHS, check_architecture, reference_logprobs, tokens
from lockstep.model.miniature import LIMIT, VOCABULARY, miniature_config
from lockstep.model.router import refuse_router_loss, refuse_router_noise
from lockstep.model.text_model import placeholder_ids
from lockstep.model.trials import Unfit
from lockstep.preflight.model_checks import refuse_placeholders
from lockstep.rollout.engine_check import check_engine_architecture
from lockstep.types import Example, Origin
from refusals import refuses

CPU = torch.device("cpu")
# Full sizes, as a folder has them: a window of thousands of tokens is checked all the same.
WINDOWED = MistralConfig(sliding_window=4096)

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def check(config: Any, dtype: torch.dtype = torch.float32) -> None:
    check_architecture(config, "folder", dtype, "sdpa", CPU)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [LlamaConfig(), WINDOWED, MixtralConfig()], ids=["llama", "mistral", "mixtral"])
def test_what_is_right_passes(config: Any, dtype: torch.dtype) -> None:
    check(config, dtype)


def test_a_window_of_thousands_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", lambda *a, window, **k: right(*a, window=None, **k))
    with pytest.raises(Refusal, match=rf"folder \[unsupported-model\]: .*from token {LIMIT + 1} of .* {LIMIT + 4} on"):
        check(WINDOWED)
    check(LlamaConfig())


def test_sequences_that_see_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.varlen_attention

    def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, **more: Any) -> torch.Tensor:
        return right(q, k, v, make_layout([len(q)], q.device, layout.kernel), **more)

    monkeypatch.setattr(attention, "varlen_attention", mixed)
    with pytest.raises(Refusal, match="packed log-probs differ"):
        check(LlamaConfig())


def test_a_wrong_gradient_names_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 1.01

    right = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", lambda q, k, v, *a, **m: right(q, Doubled.apply(k), v, *a, **m))
    with pytest.raises(Refusal, match=r"the gradient of model.layers.\d.self_attn.k_proj.weight is off by 0.01"):
        check(LlamaConfig())


def test_a_parameter_without_a_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", lambda q, k, *a, **m: right(q, k.detach(), *a, **m))
    with pytest.raises(Refusal, match=r"model.layers.\d.self_attn.k_proj.weight gets no gradient"):
        check(LlamaConfig())


def test_a_kernel_that_is_wrong_in_a_coarse_dtype_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a factor that a tolerance of 0.25 nats would hide."""
    right = varlen.varlen_attention

    def coarse(q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        out = right(q, *rest, **more)
        return out * 1.05 if q.dtype == torch.bfloat16 else out

    monkeypatch.setattr(attention, "varlen_attention", coarse)
    check(LlamaConfig())
    with refuses("model.path", "unsupported-model", "torch.bfloat16", "median error"):
        check(LlamaConfig(), torch.bfloat16)


def engine(config: Any) -> None:
    check_engine_architecture(config, "sdpa", select("cpu"), CPU)


def test_an_engine_that_looks_past_the_window_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine(WINDOWED)
    trials._verified_here.cache_clear()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "another"))
    right = paged.decode_attention

    def blind(q: Any, k: Any, v: Any, step: Any, scale: float, window: int | None, *rest: Any, **more: Any) -> Any:
        return right(q, k, v, step, scale, None, *rest, **more)

    monkeypatch.setattr(paged, "decode_attention", blind)
    with pytest.raises(Unfit, match="greedy tokens or log-probs"):
        engine(WINDOWED)


def test_a_check_is_remembered_until_code_or_configuration_change(monkeypatch: pytest.MonkeyPatch) -> None:
    check(LlamaConfig())
    trials._verified_here.cache_clear()  # as in another process

    def built(*_: Any) -> None:
        raise KeyError("a miniature was built")

    monkeypatch.setattr("lockstep.model.check.build_miniature", built)
    check(LlamaConfig())
    for config, dtype in ((LlamaConfig(rms_norm_eps=1e-4), torch.float32), (LlamaConfig(), torch.bfloat16)):
        with pytest.raises(KeyError):
            check(config, dtype)
    monkeypatch.setattr(trials, "_code", lambda: "changed")
    with pytest.raises(KeyError):
        check(LlamaConfig())


@pytest.mark.parametrize(
    ("sections", "small"),
    [([22, 22, 20], [2, 2, 4]), ([16, 24, 24], [2, 3, 3]), ([16, 16, 16, 16], [2, 2, 2, 2]), ([8, 12, 12], [2, 3, 3])],
)
def test_rotary_sections_of_equal_size_stay_equal(sections: list[int], small: list[int]) -> None:
    assert miniature._shrink_sections(sections, 8) == small


def test_a_miniature_shares_keys_of_kept_layers_and_rotates_the_same_part_of_a_head() -> None:
    """Layers 0, 1 and 71 are kept: layer 1 reads the keys of layer 0, and layer 71 those of a layer that is dropped."""
    sources = [0, 0, *range(2, 71), 70]
    assert miniature._shrink_list("kv_source_layers", sources, [0, 1, 71], 72) == [0, 0, 2]
    small = miniature_config(AutoConfig.for_model("mistral4"))
    rotated = small.rope_parameters["partial_rotary_factor"] * small.head_dim
    assert (rotated, small.head_dim) == (small.qk_rope_head_dim, small.qk_rope_head_dim + small.qk_nope_head_dim)


def test_test_sequences_contain_no_placeholders() -> None:
    """transformers replaces the embedding of a placeholder even if there is no image."""
    config = AutoConfig.for_model("muse_glimmer")
    assert min(placeholder_ids(miniature_config(config, towers=False))) >= miniature.WORDS
    assert max(tokens(500, miniature.WORDS)) < miniature.WORDS


def test_a_miniature_keeps_switches_and_scales_limits() -> None:
    small = miniature_config(MistralConfig(sliding_window=4096, rms_norm_eps=1e-3, tie_word_embeddings=True))
    assert (small.sliding_window, small.rms_norm_eps, small.tie_word_embeddings) == (LIMIT, 1e-3, True)
    assert miniature_config(MistralConfig(sliding_window=None)).sliding_window is None
    assert miniature_config(LlamaConfig(num_key_value_heads=1)).num_key_value_heads == 1


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=5, eos_token_id=4, bos_token_id=3),
        LlamaConfig(max_position_embeddings=8),
        GPT2Config(vocab_size=2, n_positions=4, eos_token_id=1, bos_token_id=1),
    ],
    ids=["five words", "eight positions", "two words and four positions"],
)
def test_a_model_smaller_than_the_trial_is_tried_all_the_same(config: Any) -> None:
    small = miniature_config(config)
    assert small.vocab_size == VOCABULARY
    assert small.max_position_embeddings >= max(LENGTHS)
    check(config)


def test_a_model_of_few_words_is_loaded_and_trains(tmp_path: Path, tiny_folder: Path) -> None:
    """The real model is held to transformers on tokens that it has."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 3}, eos_token_id=2, bos_token_id=1)
    policy = load(write_model(tmp_path / "model", config, tiny_folder))
    example = Example([0, 1, 2, 1], [0, 1, 1, 1], Origin("rows", 0))
    logprobs = policy(micro_batch([example], packed=True, pad_id=0)).logprobs_K
    with policy.generating() as model:
        wanted = reference_logprobs(model, torch.tensor([[0, 1, 2, 1]]))
    torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)


def test_a_load_balancing_loss_that_the_recipe_does_not_speak_of_is_refused() -> None:
    refuse_router_loss(MixtralConfig(), "folder")
    refuse_router_loss(MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.0), "folder")
    with pytest.raises(Refusal, match=r"load-balancing loss .*coefficient 0\.02") as refusal:
        refuse_router_loss(MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.02), "folder")
    assert "model.aux_loss_coef=0.02 " in refusal.value.problems[0].remedy


def test_router_noise_is_refused_and_dropout_is_not() -> None:
    refuse_router_noise(MixtralConfig(attention_dropout=0.1), "folder")
    with pytest.raises(Refusal, match="router noise"):
        refuse_router_noise(MixtralConfig(router_jitter_noise=0.1), "folder")
    with pytest.raises(Refusal, match="router noise"):
        refuse_router_noise(PhimoeConfig(input_jitter_noise=0.1), "folder")


def test_rows_with_a_token_that_means_a_picture_are_refused_by_name() -> None:
    config = Gemma3Config(image_token_index=7, text_config={"vocab_size": 20})
    rows = [(Origin("rows.jsonl", 0), [1, 2]), (Origin("rows.jsonl", 3), [1, 7, 2])]
    (problem,) = refuse_placeholders(config, rows)
    assert problem.where == "rows.jsonl row 3"
    assert "token 7" in problem.why
    # Also where a part of the model names it.
    nested = Phi4MultimodalConfig(vision_config={"image_token_id": 7})
    assert 7 in placeholder_ids(nested)
    assert not refuse_placeholders(LlamaConfig(), rows)
