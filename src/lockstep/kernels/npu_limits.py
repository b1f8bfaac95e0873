"""Checks the documented limits of torch_npu 2.13.0's fused operators before one of these operators is chosen.

Each function returns which documented limit a call exceeds, or None. These functions check shapes and dtypes only, so
they never sync with the device. The only limit on values (rotary embedding) is checked in `fused_modules_npu.py`. The
limits come from the documentation and have not yet been tested on Ascend hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32)

MOST_HEADS = 256

# Limits of npu_fusion_attention in the packed (TND) layout: sequences and tokens of one call, and head size.
MOST_SEQUENCES, MOST_TOKENS, LARGEST_HEAD = 1024, 2**20, 768

# Limits of npu_fused_infer_attention_score for decoding: one query token per sequence over a paged KV cache.
MOST_ROWS, MOST_KEYS, LARGEST_DECODE_HEAD = 2**16, 2**18, 512
BLOCK_STEP, LARGEST_BLOCK = 16, 512
WIDEST, MOST_SHARED, MOST_ELEMENTS = 2**16 - 1, 64, 2**31 - 1

# Limits of npu_rotary_mul: the head size must be even and below ROTARY_HEAD. The batch size and the number of heads
# must each be below ROTARY_ROWS.
ROTARY_HEAD, ROTARY_ROWS, ROTARY_TRAINED = 896, 1000, 1024

MOST_DIMENSIONS = 8


def _first(*problems: tuple[bool, str]) -> str | None:
    return next((text for wrong, text in problems if wrong), None)


def quant_problem(x_TK: torch.Tensor, codes_NK: torch.Tensor) -> str | None:
    """Checks npu_dynamic_quant and npu_quant_matmul with one scale per token."""
    outputs, inputs = codes_NK.shape
    return _first(
        (x_TK.dtype not in HALF, f"type {x_TK.dtype}"),
        (not len(x_TK), "no tokens"),
        (max(inputs, outputs) > WIDEST, f"rows of {max(inputs, outputs)}, at most {WIDEST} are supported"),
    )


def fusion_problem(query_THD: torch.Tensor, ends: Sequence[int], dropout: float) -> str | None:
    _, heads, size = query_THD.shape
    return _first(
        (query_THD.dtype not in FLOATING, f"type {query_THD.dtype}"),
        (bool(dropout), "dropout"),
        (heads > MOST_HEADS, f"{heads} heads, at most {MOST_HEADS} are supported"),
        (size > LARGEST_HEAD, f"head size {size}, at most {LARGEST_HEAD} is supported"),
        (len(ends) > MOST_SEQUENCES, f"{len(ends)} sequences, at most {MOST_SEQUENCES} are supported"),
        (ends[-1] > MOST_TOKENS, f"{ends[-1]} tokens, at most {MOST_TOKENS} are supported"),
    )


def part_problem(
    query_THD: torch.Tensor, value_SGE: torch.Tensor, queries: Sequence[int], keys: Sequence[int]
) -> str | None:
    """Checks attention over a part of the keys (context parallelism). The returned text has no numbers that depend on
    the batch, so that each problem gives only one warning."""
    _, heads, size = query_THD.shape
    return _first(
        (query_THD.dtype not in FLOATING, f"type {query_THD.dtype}"),
        # The backward requires equal head sizes of keys and values; the forward also supports smaller value heads.
        (size != value_SGE.shape[-1], f"value head size {value_SGE.shape[-1]} differs from key head size {size}"),
        (heads > MOST_HEADS, f"{heads} heads, at most {MOST_HEADS} are supported"),
        (heads % value_SGE.shape[1] != 0, f"{heads} query heads are no multiple of {value_SGE.shape[1]} key heads"),
        (size > LARGEST_HEAD, f"head size {size}, at most {LARGEST_HEAD} is supported"),
        (len(queries) > MOST_SEQUENCES, f"more than {MOST_SEQUENCES} sequences"),
        (max(sum(queries), sum(keys)) > MOST_TOKENS, f"more than {MOST_TOKENS} tokens"),
    )


def decode_problem(
    query_BHD: torch.Tensor, keys: torch.Tensor, block: int, window: int | None, longest: int
) -> str | None:
    """Checks decode attention. `keys` is the KV cache of shape (slot, head, size). `longest` is the number of keys of
    the longest sequence."""
    batch, heads, size = query_BHD.shape
    groups = keys.shape[1]
    return _first(
        # npu_fused_infer_attention_score does not support fp32. For decoding with one query token per sequence, this
        # operator does not support a sliding window.
        (query_BHD.dtype not in HALF, f"type {query_BHD.dtype}"),
        (keys.dtype != query_BHD.dtype, f"KV cache of {keys.dtype} for queries of {query_BHD.dtype}"),
        (window is not None, "a sliding window"),
        (block % BLOCK_STEP != 0, f"cache blocks of {block} tokens, no multiple of {BLOCK_STEP}"),
        (block > LARGEST_BLOCK, f"cache blocks of {block} tokens, at most {LARGEST_BLOCK} are supported"),
        (heads > MOST_HEADS, f"{heads} heads, at most {MOST_HEADS} are supported"),
        (size > LARGEST_DECODE_HEAD, f"head size {size}, at most {LARGEST_DECODE_HEAD} is supported"),
        (
            heads > MOST_SHARED * groups,
            f"{heads // groups} query heads per key head, at most {MOST_SHARED} are supported",
        ),
        (groups * size > WIDEST, f"{groups * size} key values per token, at most {WIDEST} are supported"),
        (batch > MOST_ROWS, f"{batch} sequences, at most {MOST_ROWS} are supported"),
        (longest > MOST_KEYS, f"{longest} keys in one sequence, at most {MOST_KEYS} are supported"),
        (
            keys.numel() > MOST_ELEMENTS,
            f"KV cache of {keys.numel()} elements per layer, at most {MOST_ELEMENTS} are supported",
        ),
    )


def rotary_problem(x_BNSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    """Checks the rotary embedding. `cos` and `sin` have the operator's shape: 11SD or B1SD for an input of BNSD."""
    if x_BNSD.dim() != 4 or cos.dim() != 4:
        return f"{x_BNSD.dim()} dimensions, not 4"
    batch, heads, tokens, size = x_BNSD.shape
    trained = cos.requires_grad or sin.requires_grad
    return _first(
        (x_BNSD.dtype not in FLOATING, f"type {x_BNSD.dtype}"),
        (not x_BNSD.dtype == cos.dtype == sin.dtype, f"cos and sin of {cos.dtype} for an input of {x_BNSD.dtype}"),
        (size % 2 != 0 or size >= ROTARY_HEAD, f"head size {size}: must be even and below {ROTARY_HEAD}"),
        (
            batch >= ROTARY_ROWS or heads >= ROTARY_ROWS,
            f"{batch} batch rows and {heads} heads: each must be below {ROTARY_ROWS}",
        ),
        (
            trained and batch * heads > ROTARY_TRAINED,
            f"{batch * heads} heads are too many if cos and sin require gradients",
        ),
        (
            cos.shape != sin.shape or tuple(cos.shape) not in {(1, 1, tokens, size), (batch, 1, tokens, size)},
            f"cos and sin of shape {tuple(cos.shape)} for an input of shape {tuple(x_BNSD.shape)}",
        ),
    )


def norm_problem(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    return _first(
        (x.dtype not in FLOATING, f"type {x.dtype}"),
        (x.dtype != weight.dtype, f"a weight of {weight.dtype} for an input of {x.dtype}"),
        (not 2 <= x.dim() <= MOST_DIMENSIONS, f"{x.dim()} dimensions: 2 to {MOST_DIMENSIONS}"),
    )


def swiglu_problem(x: torch.Tensor) -> str | None:
    return _first(
        (x.dtype not in FLOATING, f"type {x.dtype}"),
        (not 1 <= x.dim() <= MOST_DIMENSIONS, f"{x.dim()} dimensions: 1 to {MOST_DIMENSIONS}"),
    )
