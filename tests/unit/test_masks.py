"""What each layer may see is read off the model's own masks; whatever is more is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, write_model
from transformers import Llama4TextConfig, LlamaConfig, MistralConfig, PhimoeConfig, Qwen2Config, Qwen2MoeConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.models.llama import modeling_llama

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import transformers_attention
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.masks import CHUNK, WINDOW, BeyondCausal, Seen, read_mask
from lockstep.model.policy import Policy

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("window", [1, 2, 7, 64, 4095, 4096, 131072])
def test_a_window_is_read_off_its_mask(window: int) -> None:
    assert read_mask(sliding_window_causal_mask_function(window), heads=3).window == window


def test_a_causal_mask_has_no_window() -> None:
    assert read_mask(causal_mask_function, heads=3).window is None
    assert read_mask(and_masks(causal_mask_function, causal_mask_function), heads=3).window is None


@pytest.mark.parametrize("chunk", [2, 8, 128, 8192])
def test_chunks_are_read_off_their_mask(chunk: int) -> None:
    nothing = torch.zeros(1, dtype=torch.long)
    assert read_mask(chunked_causal_mask_function(chunk, nothing), heads=3) == Seen(None, chunk)
    with pytest.raises(BeyondCausal, match=r"not causal attention within a window: token \d+ sees token 0"):
        read_mask(or_masks(chunked_causal_mask_function(chunk, nothing), first_token_too), heads=3)


def test_a_mask_that_holds_tensors_is_read_on_their_device() -> None:
    """The default device is another one here, as the CPU is for a model on an accelerator."""
    padding = torch.zeros(1, dtype=torch.long)
    with torch.device("meta"):
        assert read_mask(chunked_causal_mask_function(8, padding), 3, padding.device) == Seen(None, 8)


def first_token_too(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key == 0


def first_four(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < 4


def not_the_last(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key != query - 1


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        or_masks(sliding_window_causal_mask_function(8), first_token_too),
        or_masks(sliding_window_causal_mask_function(64), first_four),
        and_masks(causal_mask_function, not_the_last),
    ],
    ids=["both ways", "window and a sink token", "first and last tokens", "a hole"],
)
def test_what_is_more_than_causal_and_window_is_refused(mask: Any) -> None:
    with pytest.raises(BeyondCausal):
        read_mask(mask, heads=3)


def of_head(number: int, window: int) -> Any:
    """Within a window on one head, without one on the others."""

    def mask(batch: Any, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (head != number) | (key > query - window)

    return mask


@pytest.mark.parametrize("head", [0, 1, 3])
@pytest.mark.parametrize("others", [None, 64], ids=["causal", "in a wider window"])
def test_a_window_on_one_head_only_is_refused(head: int, others: int | None) -> None:
    around = causal_mask_function if others is None else sliding_window_causal_mask_function(others)
    mask = and_masks(around, of_head(head, 32))
    with pytest.raises(BeyondCausal, match=rf"its heads see different tokens \(head {head or 1} and head 0 differ\)"):
        read_mask(mask, heads=4)


@pytest.mark.usefixtures("nothing_remembered")
def test_a_model_with_a_window_on_its_last_head_is_refused(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the model's four heads are asked, by the mask that its own forward makes."""
    folder = write_model(tmp_path / "model", LlamaConfig(**SIZES), tiny_folder)
    right = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **how: right(**how, and_mask_function=of_head(3, 6))
    )
    with pytest.raises(Refusal, match=r"LlamaForCausalLM: its heads see different tokens \(head 3 and head 0"):
        load(folder)


def windows(policy: Policy) -> list[int | None]:
    return [getattr(module, WINDOW) for module in policy.modules() if hasattr(module, WINDOW)]


WINDOWED: dict[str, tuple[Any, list[int | None]]] = {
    # Reaches attention through the mask alone.
    "qwen2-moe": (
        Qwen2MoeConfig(
            **SIZES,
            use_sliding_window=True,
            sliding_window=6,
            max_window_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        [6, None],
    ),
    "phimoe": (PhimoeConfig(**SIZES, **EXPERTS, sliding_window=7), [7, 7]),
    # As a keyword and through the mask.
    "mistral": (MistralConfig(**SIZES, sliding_window=5), [5, 5]),
    "qwen2": (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1), [None, 6]),
}


@pytest.mark.daily("qwen2", "phimoe")
@pytest.mark.parametrize("name", WINDOWED)
def test_each_layer_gets_its_own_window(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    config, wanted = WINDOWED[name]
    policy = load(write_model(tmp_path / "model", config, tiny_folder))
    assert windows(policy) == wanted
    # And looks through it: the last token of a long sequence does not see the first.
    ids = torch.arange(40)[None]
    other = ids.clone()
    other[0, 0] = 99
    layout = make_layout([40], torch.device("cpu"), "sdpa")
    decoder = policy.eval().causal_lm.get_decoder()
    with torch.no_grad():
        a, b = (
            decoder(input_ids=x, position_ids=ids, use_cache=False, layout=layout).last_hidden_state
            for x in (ids, other)
        )
    seen = (a != b).any(-1)[0]
    assert bool(seen[-1]) == (None in wanted)


def test_the_chunks_of_a_model_are_read(tmp_path: Path, tiny_folder: Path) -> None:
    config = Llama4TextConfig(**SIZES, **EXPERTS, attention_chunk_size=16, intermediate_size_mlp=48)
    policy = load(write_model(tmp_path / "model", config, tiny_folder))
    kinds = {"chunked_attention": 16, "full_attention": None}
    assert [getattr(module, CHUNK) for module in policy.decoder.attentions] == [kinds[k] for k in config.layer_types]


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(**more: Any) -> torch.Tensor:
    module = Layer()
    setattr(module, WINDOW, None)
    query = key = value = torch.randn(1, 2, 4, 8)
    layout = make_layout([4], torch.device("cpu"), "sdpa")
    return transformers_attention(module, query, key, value, more.pop("mask", None), layout=layout, **more)[0]


def test_arguments_that_we_do_not_know_are_refused() -> None:
    assert attend(position_ids=torch.arange(4), use_cache=False, block_indices=None).shape == (1, 4, 2, 8)
    for more in ({"block_indices": torch.zeros(1)}, {"position_bias": torch.zeros(1)}, {"anything": False}):
        with pytest.raises(BeyondCausal, match=f"unsupported arguments to its attention: {next(iter(more))}"):
            attend(**more)
    with pytest.raises(BeyondCausal, match="in both directions"):
        attend(is_causal=False)
    with pytest.raises(BeyondCausal, match="builds its own mask"):
        attend(mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
