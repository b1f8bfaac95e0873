"""A table of the fused operators on this machine's Ascend device: error against plain torch on the CPU, and times.

python tools/ascend_kernels.py [--repeat 20] [--keys 32768] prints a line for each operator, size and type, and exits
with 1 where an operator is wrong. The CPU computes in float32 on the same rounded inputs. Errors are those of the
Ascend documents: the mean of abs(found - wanted), x 100 %; next to it the sum of the same relative to the sum of
abs(wanted). A row fails where the relative error or the largest single one is over the bound of its type, or a number
is not finite. Times are medians in milliseconds, of the fused operator and of its plain-torch reference on the device,
forward only, each waited for. Attention of generated tokens is swept from 128 to 32,768 keys, with and without a mask:
this operator has been reported wrong beyond 512 keys.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_npu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.npu_attention import infer_decode
from lockstep.kernels.attention.paged import gathered_decode
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.fused_modules import Rotary
from lockstep.kernels.fused_modules_npu import rotate

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
    size: str = ""


class Bounds(NamedTuple):
    """How far an operator may lie from plain torch: over all numbers, and in one of them relative to the largest."""

    relative: float
    worst: float


BOUNDS = {
    torch.float32: Bounds(1e-4, 1e-3),
    torch.float16: Bounds(2e-3, 1e-2),
    torch.bfloat16: Bounds(1e-2, 5e-2),
}
MOST_KEYS = 32768


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kernel: str) -> Callable[..., torch.Tensor]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return varlen_attention(query, key, value, make_layout(LENGTHS, query.device, kernel), scale=SIZE**-0.5)

    return attend


def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable) -> torch.Tensor:  # type: ignore[type-arg]
    return torch.cat(turn(q, k, cos, sin), dim=1)


def decode_case(keys: int, masked: bool) -> Case:
    """One query each of two sequences, the second a token shorter than half; their blocks lie in another order.

    With a mask every other key is masked out, the first one is not.
    """
    lengths = [keys, max(1, keys // 2 - 1)]
    blocks = -(-keys // BLOCK)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(keys))
    table = order.view(2, blocks)
    cache = [drawn(2 * blocks * BLOCK, GROUPS, SIZE, seed=seed) for seed in (2, 3)]
    mask = torch.arange(blocks * BLOCK) % 2 == 1
    mask = mask.expand(2, 1, -1)

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not masked:
            return infer_decode(query, key, value, table.to(query.device), lengths, BLOCK, SIZE**-0.5)
        out, _ = torch_npu.npu_fused_infer_attention_score(
            query.reshape(2, 1, HEADS * SIZE),
            key.view(-1, BLOCK, GROUPS * SIZE),
            value.view(-1, BLOCK, GROUPS * SIZE),
            atten_mask=mask.contiguous().to(query.device),
            actual_seq_lengths_kv=lengths,
            block_table=table.to(query.device, torch.int32),
            num_heads=HEADS,
            num_key_value_heads=GROUPS,
            scale=SIZE**-0.5,
            input_layout="BSH",
            block_size=BLOCK,
        )
        return out.view(2, HEADS, SIZE)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = []
        for row, length in enumerate(lengths):
            slots = (table[row][:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length].to(query.device)
            k, v = (part[slots].repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for part in (key, value))
            scores = query[row][:, None] @ k.transpose(1, 2) * SIZE**-0.5
            if masked:
                scores = scores.masked_fill(mask[row, :, :length].to(query.device), float("-inf"))
            found.append((scores.softmax(-1) @ v)[:, 0])
        return torch.stack(found)

    size = f"{keys} keys{', mask' if masked else ''}"
    return Case("npu_fused_infer_attention_score", fused, plain, [drawn(2, HEADS, SIZE), *cache], HALF, size)


def swept(most: int) -> Iterator[int]:
    """Powers of two, and a token past each: the border of a block and of an operator's tile."""
    keys = 128
    while keys <= most:
        yield keys
        if keys < most:
            yield keys + 1
        keys *= 2


def cases(most_keys: int) -> Iterator[Case]:
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

    yield Case("npu_fused_infer_attention_score", decode, gathered, [drawn(4, HEADS, SIZE), *cache], HALF, "4 lengths")
    for keys in swept(most_keys):
        for masked in (False, True):
            yield decode_case(keys, masked)
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


class Errors(NamedTuple):
    absolute: float
    """The mean of abs(found - wanted), x 100 %, as the Ascend documents have it."""
    relative: float
    worst: float

    @classmethod
    def of(cls, found: torch.Tensor, wanted: torch.Tensor) -> Errors:
        apart = (found.double() - wanted.double()).abs()
        size = wanted.double().abs()
        return cls(float(apart.mean()) * 100, float(apart.sum() / size.sum()), float(apart.max() / size.max()))

    def fit(self, bounds: Bounds) -> bool:
        """False also where they are no numbers."""
        return self.relative <= bounds.relative and self.worst <= bounds.worst


@torch.no_grad()
def line(case: Case, dtype: torch.dtype, repeat: int) -> tuple[str, bool]:
    rounded = [tensor.to(dtype) for tensor in case.inputs]
    there = [tensor.to("npu") for tensor in rounded]
    errors = Errors.of(case.fused(*there).float().cpu(), case.plain(*(tensor.float() for tensor in rounded)))
    fused, plain = (milliseconds(lambda run=run: run(*there), repeat) for run in (case.fused, case.plain))  # type: ignore[misc]
    right = errors.fit(BOUNDS[dtype])
    named = f"{case.operator:<33}{case.size:<18}{str(dtype)[6:]:<10}"
    figures = f"{errors.absolute:>10.2e}{errors.relative * 100:>10.2e}{errors.worst:>10.2e}"
    return f"{named}{figures}{fused:>10.3f}{plain:>10.3f}{'' if right else '  WRONG'}", right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--keys", type=int, default=MOST_KEYS, help="sweep attention of generated tokens up to here")
    given = parser.parse_args()
    heads = f"{'mean %':>10}{'rel. %':>10}{'worst':>10}{'fused ms':>10}{'plain ms':>10}"
    print(f"{'operator':<33}{'size':<18}{'type':<10}{heads}")
    wrong = 0
    for case in cases(given.keys):
        for dtype in case.dtypes:
            try:
                text, right = line(case, dtype, given.repeat)
            except RuntimeError as error:
                first = str(error).strip().splitlines()[0]
                text, right = f"{case.operator:<33}{case.size:<18}{str(dtype)[6:]:<10}  FAILED: {first}", False
            wrong += not right
            print(text, flush=True)
    if wrong:
        sys.exit(f"{wrong} rows are wrong: the operator differs from plain torch by more than its type explains")


if __name__ == "__main__":
    main()
