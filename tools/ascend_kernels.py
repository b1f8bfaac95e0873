"""A table of the fused operators on this machine's Ascend device: error against plain torch on the CPU, and times.

python tools/ascend_kernels.py [--repeat 20] prints a line an operator and type. Errors are the largest, relative to the
largest number; the CPU computes in float32 on the same rounded inputs. Times are medians in milliseconds, of the fused
operator and of its plain-torch twin on the device, forward only, each waited for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_npu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lockstep.kernels.fused_rotary import Rotary
from lockstep.kernels.layout import make_layout
from lockstep.kernels.npu_attention import infer_decode
from lockstep.kernels.npu_modules import rotate
from lockstep.kernels.paged import gathered_decode
from lockstep.kernels.varlen import varlen_attention

# Heads and widths of a model of half a billion parameters.
HEADS, GROUPS, SIZE, WIDTH, INNER = 14, 2, 64, 896, 4864
LENGTHS = [1, 127, 128, 129, 300]
BLOCK, EPSILON = 128, 1e-6
HALF = (torch.float16, torch.bfloat16)
Tensors = list[torch.Tensor]


class Case(NamedTuple):
    operator: str
    fused: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    inputs: Tensors
    dtypes: tuple[torch.dtype, ...] = (*HALF, torch.float32)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kernel: str) -> Callable[..., torch.Tensor]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return varlen_attention(query, key, value, make_layout(LENGTHS, query.device, kernel), scale=SIZE**-0.5)

    return attend


def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable) -> torch.Tensor:  # type: ignore[type-arg]
    return torch.cat(turn(q, k, cos, sin), dim=1)


def cases() -> Iterator[Case]:
    tokens = sum(LENGTHS)
    lines = [drawn(tokens, heads, SIZE, seed=heads + i) for i, heads in enumerate((HEADS, GROUPS, GROUPS))]
    yield Case("npu_fusion_attention", packed("npu_fusion"), packed("sdpa"), lines)
    lengths = [1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
    table = torch.tensor([[7, 0, 0, 0], [3, 0, 0, 0], [1, 9, 0, 0], [5, 2, 8, 4]])
    cache = [drawn(10 * BLOCK, GROUPS, SIZE, seed=seed) for seed in (2, 3)]

    def decode(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return infer_decode(query, keys, values, table.to(query.device), lengths, BLOCK, SIZE**-0.5)

    def gathered(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        where = table.to(query.device), torch.tensor(lengths, device=query.device)
        return gathered_decode(query, keys, values, *where, BLOCK, SIZE**-0.5, None)

    yield Case("npu_fused_infer_attention_score", decode, gathered, [drawn(4, HEADS, SIZE), *cache], HALF)
    yield Case(
        "npu_rms_norm",
        lambda x, weight: torch_npu.npu_rms_norm(x, weight, epsilon=EPSILON)[0],
        lambda x, weight: F.rms_norm(x, (WIDTH,), weight, EPSILON),
        [drawn(1, tokens, WIDTH), drawn(WIDTH, seed=1)],
    )
    yield Case(
        "npu_swiglu",
        lambda x: torch_npu.npu_swiglu(x, dim=-1),
        lambda x: F.silu(x[..., :INNER]) * x[..., INNER:],
        [drawn(1, tokens, 2 * INNER)],
    )
    angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(SIZE) % (SIZE // 2) / (SIZE // 2))
    own = apply_rotary_pos_emb.own if isinstance(apply_rotary_pos_emb, Rotary) else apply_rotary_pos_emb
    yield Case(
        "npu_rotary_mul",
        lambda q, k, cos, sin: both(q, k, cos, sin, rotate),
        lambda q, k, cos, sin: both(q, k, cos, sin, own),
        [drawn(1, HEADS, tokens, SIZE), drawn(1, GROUPS, tokens, SIZE), angles.cos()[None], angles.sin()[None]],
    )


def milliseconds(run: Callable[[], torch.Tensor], repeat: int) -> float:
    run()
    taken = []
    for _ in range(repeat):
        torch_npu.npu.synchronize()
        started = time.perf_counter()
        run()
        torch_npu.npu.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


@torch.no_grad()
def line(case: Case, dtype: torch.dtype, repeat: int) -> str:
    rounded = [tensor.to(dtype) for tensor in case.inputs]
    there = [tensor.to("npu") for tensor in rounded]
    found = case.fused(*there).float().cpu()
    wanted = case.plain(*(tensor.float() for tensor in rounded))
    error = float((found - wanted).abs().max() / wanted.abs().max())
    fused, plain = (milliseconds(lambda run=run: run(*there), repeat) for run in (case.fused, case.plain))  # type: ignore[misc]
    return f"{case.operator:<33}{str(dtype)[6:]:<10}{error:>10.2e}{fused:>10.3f}{plain:>10.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=20)
    repeat = parser.parse_args().repeat
    print(f"{'operator':<33}{'type':<10}{'error':>10}{'fused ms':>10}{'plain ms':>10}")
    for case in cases():
        for dtype in case.dtypes:
            print(line(case, dtype, repeat), flush=True)


if __name__ == "__main__":
    main()
