"""The calculator of floors against numbers worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers

from lockstep.preflight.cluster import model_cost

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from roofline import decode_seconds, generation_seconds, training_flops
from shapes import SHAPES, Shape

# 2 layers of 4 wide, 2 query heads and 1 key head of 2, 3 inside, 5 words.
SMALL = Shape(layers=2, hidden=4, queries=2, keys=1, head=2, inner=3, vocabulary=5)


def test_multiplied_weights_by_hand():
    # A layer: queries and output 2 * 4 * 4 = 32, keys and values 2 * 4 * 2 = 16, feed-forward 3 * 4 * 3 = 36. Head: 20.
    assert SMALL.multiplied == 2 * 84 + 20
    # As published: 0.49B with 0.36B outside of the embedding.
    half = SHAPES["qwen2.5-0.5b"]
    assert half.multiplied == 493_961_216
    assert half.multiplied - half.vocabulary * half.hidden == 357_826_560
    assert SHAPES["qwen2.5-7b"].multiplied == pytest.approx(7.07e9, rel=1e-3)


def test_a_decode_step_by_hand():
    # Keys and values: 2 layers * 2 (k, v) * 1 head * 2 numbers * 2 bytes.
    assert 2 * SMALL.cost.cached == 16
    # 376 bytes of weights at 100 bytes/s, over 376 FLOP * 3 / 1000; 3 sequences of 10 tokens of 16 bytes.
    assert decode_seconds(SMALL.cost, 3, 10, flops=1000, bandwidth=100) == pytest.approx(3.76 + 4.8)
    # With slow arithmetic the products decide: 376 * 3 / 10.
    assert decode_seconds(SMALL.cost, 3, 10, flops=10, bandwidth=100) == pytest.approx(112.8 + 4.8)
    # 4 tokens at a mean context of 10.
    assert generation_seconds(SMALL.cost, 3, 8, 4, flops=1000, bandwidth=100) == pytest.approx(4 * 8.56)


def test_training_by_hand():
    # Lengths 3 and 1: 6 * 188 * 4 = 4512, and 6 * 2 layers * 2 heads * 2 = 48 times (9 + 1).
    assert training_flops(SMALL.cost, [3, 1]) == 4512 + 480
    # Without the weights' own gradients 4 * 188 * 4.
    assert training_flops(SMALL.cost, [3, 1], frozen=True) == 3008 + 480
    # 0.5B on 16 x 1,024 tokens: 6 * 493,961,216 * 16,384 and 6 * 24 * 14 * 64 * 16 * 1,024^2.
    assert training_flops(SHAPES["qwen2.5-0.5b"].cost, [1024] * 16) == 48_558_363_377_664 + 2_164_663_517_184


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b"])
def test_a_model_is_counted_as_its_shape_says(name):
    """Over the parameters of the real modules, with a tied head and with one of its own."""
    assert model_cost(SHAPES[name].config()) == SHAPES[name].cost


def test_of_experts_a_token_goes_to_a_few():
    config = transformers.Qwen3MoeConfig(
        vocab_size=5,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        moe_intermediate_size=3,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        tie_word_embeddings=True,
    )
    cost = model_cost(config)
    # Attention 32 + 16, a router of 8 * 4, the head 20; an expert has 3 * 4 * 3 = 36, of which a token sees two.
    assert cost.multiplied == 48 + 32 + 20 + 2 * 36
    assert cost.read == 48 + 32 + 20 + 8 * 36
