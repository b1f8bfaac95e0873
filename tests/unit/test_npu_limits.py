"""The documented limits of torch_npu's operators, each just inside and just outside. No device is needed to ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.kernels.attention.npu_attention import infer_fits
from lockstep.kernels.npu_limits import (
    decode_problem,
    fusion_problem,
    norm_problem,
    part_problem,
    rotary_problem,
    swiglu_problem,
)

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def shaped(*shape: int, dtype: torch.dtype = BF16, trained: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


def fusion(
    heads: int = 8, size: int = 64, ends: tuple[int, ...] = (4,), dtype: Any = BF16, dropout: float = 0.0
) -> Any:
    return fusion_problem(shaped(ends[-1], heads, size, dtype=dtype), ends, dropout)


def part(
    heads: int = 8,
    groups: int = 2,
    size: int = 64,
    values: int | None = None,
    queries: tuple[int, ...] = (4,),
    keys: tuple[int, ...] = (6,),
    dtype: torch.dtype = BF16,
) -> Any:
    query = shaped(sum(queries), heads, size, dtype=dtype)
    return part_problem(query, shaped(sum(keys), groups, values or size, dtype=dtype), queries, keys)


def decode(
    batch: int = 2,
    heads: int = 8,
    groups: int = 2,
    size: int = 64,
    block: int = 128,
    slots: int = 1024,
    window: int | None = None,
    longest: int = 1024,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
) -> Any:
    query = shaped(batch, heads, size, dtype=dtype)
    return decode_problem(query, shaped(slots, groups, size, dtype=cache or dtype), block, window, longest)


def rotary(
    shape: tuple[int, ...] = (1, 8, 7, 64),
    angles: tuple[int, ...] = (1, 1, 7, 64),
    dtype: torch.dtype = BF16,
    of: torch.dtype | None = None,
    trained: bool = False,
    sines: tuple[int, ...] | None = None,
) -> Any:
    cos = shaped(*angles, dtype=of or dtype, trained=trained)
    return rotary_problem(shaped(*shape, dtype=dtype), cos, shaped(*(sines or angles), dtype=of or dtype))


def norm(dimensions: int = 3, dtype: torch.dtype = BF16, weight: torch.dtype | None = None) -> Any:
    return norm_problem(shaped(*[4] * dimensions, dtype=dtype), shaped(4, dtype=weight or dtype))


def swiglu(dimensions: int = 3, dtype: torch.dtype = BF16) -> Any:
    return swiglu_problem(shaped(*[4] * dimensions, dtype=dtype))


INSIDE = [
    (fusion, {}),
    (fusion, {"dtype": FP16}),
    (fusion, {"dtype": FP32}),
    (fusion, {"heads": 256}),
    (fusion, {"size": 768}),
    (fusion, {"ends": tuple(range(1, 1025))}),
    (fusion, {"ends": (2**20,)}),
    (part, {}),
    (part, {"dtype": FP32}),
    (part, {"heads": 256}),
    (part, {"size": 768}),
    (part, {"queries": (1,) * 1024, "keys": (1,) * 1024}),
    (part, {"keys": (2**20,)}),
    (decode, {}),
    (decode, {"dtype": FP16}),
    (decode, {"block": 16}),
    (decode, {"block": 512}),
    (decode, {"heads": 256, "groups": 4}),
    (decode, {"heads": 64, "groups": 1}),
    (decode, {"size": 512}),
    (decode, {"batch": 2**16}),
    (decode, {"longest": 2**18}),
    (decode, {"heads": 127, "groups": 127, "size": 512}),
    (decode, {"heads": 1, "groups": 1, "size": 1, "slots": 2**31 - 1}),
    (rotary, {}),
    (rotary, {"dtype": FP16}),
    (rotary, {"dtype": FP32}),
    (rotary, {"shape": (2, 8, 7, 894), "angles": (2, 1, 7, 894)}),
    (rotary, {"shape": (999, 999, 1, 64), "angles": (999, 1, 1, 64)}),
    (rotary, {"shape": (4, 256, 7, 64), "trained": True}),
    (norm, {}),
    (norm, {"dtype": FP16}),
    (norm, {"dtype": FP32}),
    (norm, {"dimensions": 2}),
    (norm, {"dimensions": 8}),
    (swiglu, {}),
    (swiglu, {"dtype": FP16}),
    (swiglu, {"dtype": FP32}),
    (swiglu, {"dimensions": 1}),
    (swiglu, {"dimensions": 8}),
]

OUTSIDE = [
    (fusion, {"dtype": FP64}, "float64"),
    (fusion, {"dropout": 0.1}, "dropout"),
    (fusion, {"heads": 257}, "257 heads, at most 256"),
    (fusion, {"size": 769}, "head size 769, at most 768"),
    (fusion, {"ends": tuple(range(1, 1026))}, "1025 sequences, at most 1024"),
    (fusion, {"ends": (2**20 + 1,)}, "1048577 tokens, at most 1048576"),
    (part, {"dtype": FP64}, "float64"),
    (part, {"heads": 258}, "258 heads, at most 256"),
    (part, {"size": 769}, "head size 769, at most 768"),
    (part, {"size": 1023}, "head size 1023, at most 768"),
    (part, {"values": 32}, "value head size 32 differs from key head size 64"),
    (part, {"heads": 7}, "7 query heads are no multiple of 2 key heads"),
    (part, {"queries": (1,) * 1025, "keys": (1,) * 1025}, "more than 1024 sequences"),
    (part, {"queries": (2**20 + 1,)}, "more than 1048576 tokens"),
    (part, {"keys": (2**20 + 1,)}, "more than 1048576 tokens"),
    (decode, {"dtype": FP32}, "float32"),
    (decode, {"cache": FP16}, "KV cache of torch.float16"),
    (decode, {"window": 5}, "sliding window"),
    (decode, {"block": 24}, "no multiple of 16"),
    (decode, {"block": 528}, "blocks of 528 tokens, at most 512"),
    (decode, {"heads": 260, "groups": 65}, "260 heads, at most 256"),
    (decode, {"heads": 65, "groups": 1}, "65 query heads per key head, at most 64"),
    (decode, {"size": 513}, "head size 513, at most 512"),
    (decode, {"heads": 128, "groups": 128, "size": 512}, "65536 key values per token, at most 65535"),
    (decode, {"batch": 2**16 + 1}, "65537 sequences, at most 65536"),
    (decode, {"longest": 2**18 + 1}, "262145 keys in one sequence, at most 262144"),
    (decode, {"heads": 1, "groups": 1, "size": 1, "slots": 2**31}, "2147483648 elements per layer"),
    (rotary, {"dtype": FP64}, "float64"),
    (rotary, {"of": FP32}, "cos and sin of torch.float32 for an input of torch.bfloat16"),
    (rotary, {"shape": (1, 8, 7, 63), "angles": (1, 1, 7, 63)}, "head size 63"),
    (rotary, {"shape": (1, 8, 7, 896), "angles": (1, 1, 7, 896)}, "head size 896: must be even and below 896"),
    (rotary, {"shape": (1000, 8, 7, 64)}, "1000 batch rows"),
    (rotary, {"shape": (1, 1000, 7, 64)}, "1000 heads"),
    (rotary, {"shape": (5, 205, 7, 64), "trained": True}, "1025 heads are too many if cos and sin require gradients"),
    (rotary, {"angles": (1, 1, 7, 32)}, "cos and sin of shape (1, 1, 7, 32)"),
    (rotary, {"angles": (2, 1, 7, 64)}, "cos and sin of shape (2, 1, 7, 64)"),
    (rotary, {"angles": (1, 7, 1, 64)}, "cos and sin of shape (1, 7, 1, 64)"),
    (rotary, {"shape": (2, 8, 7, 64), "sines": (2, 1, 7, 64)}, "cos and sin of shape (1, 1, 7, 64)"),
    (rotary, {"shape": (8, 7, 64), "angles": (1, 7, 64)}, "3 dimensions, not 4"),
    (norm, {"dtype": FP64}, "float64"),
    (norm, {"weight": FP32}, "a weight of torch.float32 for an input of torch.bfloat16"),
    (norm, {"dimensions": 1}, "1 dimensions"),
    (norm, {"dimensions": 9}, "9 dimensions"),
    (swiglu, {"dtype": FP64}, "float64"),
    (swiglu, {"dimensions": 9}, "9 dimensions"),
]


def name(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)[:60]


@pytest.mark.parametrize(("ask", "call"), INSIDE, ids=name)
def test_inside_the_limits(ask: Any, call: dict[str, Any]) -> None:
    assert ask(**call) is None


@pytest.mark.parametrize(("ask", "call", "words"), OUTSIDE, ids=name)
def test_outside_the_limits(ask: Any, call: dict[str, Any], words: str) -> None:
    assert words in ask(**call)


@pytest.mark.parametrize(("queries", "cache"), [(BF16, FP16), (FP16, BF16), (FP16, FP32)])
def test_a_cache_of_another_type_is_left_to_plain_torch(queries: torch.dtype, cache: torch.dtype) -> None:
    query = shaped(2, 8, 64, dtype=queries)
    assert infer_fits(query, shaped(1024, 2, 64, dtype=queries), 128, None, 1024)
    assert not infer_fits(query, shaped(1024, 2, 64, dtype=cache), 128, None, 1024)
