"""Architectures on an NVIDIA device: the fused kernels in the dtypes that are trained, and the engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.device.select import select
from lockstep.kernels.attention import interface as attention
from lockstep.model.check import check_architecture
from lockstep.rollout.engine_check import check_engine_architecture
from refusals import refuses

pytestmark = [
    pytest.mark.usefixtures("nothing_remembered"),
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(num_key_value_heads=8),
    "windowed": MistralConfig(sliding_window=4096),
    "half-windowed": Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=14),
    "qwen3": Qwen3Config(),
    "experts": MixtralConfig(),
    "soft caps": Gemma2Config(),
    "sinks": GptOssConfig(),
    "scaled logits": GraniteConfig(logits_scaling=8.0, attention_multiplier=0.1),
    "cohere2": Cohere2Config(),
    "latent attention": DeepseekV3Config(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    device = select("cuda")
    check_architecture(CONFIGS[name], name, dtype, device.attention, device.torch_device(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_generates_what_transformers_does(name: str) -> None:
    device = select("cuda")
    check_engine_architecture(CONFIGS[name], device.attention, device, device.torch_device(0))


def test_a_fused_kernel_that_ignores_the_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 alone, where the fused kernel runs; the twin in fp32 is right."""
    device, right = select("cuda"), attention.varlen_attention

    def blind(q: torch.Tensor, *rest: Any, window: int | None, **more: Any) -> torch.Tensor:
        return right(q, *rest, window=window if q.dtype == torch.float32 else None, **more)

    monkeypatch.setattr(attention, "varlen_attention", blind)
    with refuses("", "unsupported-model", "torch.bfloat16", "median error"):
        check_architecture(CONFIGS["windowed"], "", torch.bfloat16, device.attention, device.torch_device(0))
