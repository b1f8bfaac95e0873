"""The grouped products of experts with a LoRA adapter: torch's kernel and a separate sum, and one kernel for both.

    python bench/experts.py --out bench/results/experts_h200.json

Each line is one of the products of a layer: outputs of the first and of the second projection, and the gradients of
their inputs. `_products` is a candidate for `lockstep/kernels/experts/adapted_experts_triton.py`: it computes
x W + scale (x A) B without reading the output again. It reads the narrow product x A ("one kernel"), or computes it
beside x W and writes it for the backward pass ("one kernel for all").
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.device.select import select
from lockstep.kernels.experts.adapted_experts_triton import add_products
from lockstep.kernels.experts.grouped_experts import grouped_linear
from lockstep.kernels.triton_math import INTERPRETED
from report import machine, summary, write_record
from sides import Stopwatch

# rows, columns and depth of a tile, warps, stages, tiles of rows that share the columns
CONFIGS = [
    (128, 256, 64, 8, 3, 8),
    (128, 128, 64, 4, 4, 8),
    (128, 128, 64, 8, 4, 8),
    (128, 256, 64, 8, 4, 8),
    (256, 128, 64, 8, 3, 8),
    (128, 256, 64, 8, 3, 16),
    (128, 256, 128, 8, 2, 8),
]


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x,
    weight,
    down,
    narrow,
    matrix,
    out,
    ends,
    scale,
    tiles,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A program has some rows of one expert, and some columns. TOGETHER tiles of rows run one after the other with the
    same columns, so that the weights stay in the cache. With ALL, each program computes the narrow product of its rows,
    and the programs of the first columns write it."""
    columns: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) // (TOGETHER * columns)
    inside_group = tl.program_id(0) % (TOGETHER * columns)
    height = tl.minimum(tiles - group * TOGETHER, TOGETHER)
    tile = group * TOGETHER + inside_group % height
    column = (inside_group // height) * COLUMNS
    expert_E = tl.arange(0, PADDED)
    end_E = tl.load(ends + expert_E, mask=expert_E < EXPERTS, other=0)
    start_E = tl.load(ends + expert_E - 1, mask=(expert_E > 0) & (expert_E < EXPERTS), other=0)
    tiles_E = tl.where(expert_E < EXPERTS, (end_E - start_E + ROWS - 1) // ROWS, 0)
    expert = tl.sum((tl.cumsum(tiles_E, 0) <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(expert_E < expert, tiles_E, 0), 0)
        first = tl.sum(tl.where(expert_E == expert, start_E, 0), 0) + (tile - before) * ROWS
        limit = tl.sum(tl.where(expert_E == expert, end_E, 0), 0)
        sum_PO = tl.zeros((ROWS, COLUMNS), tl.float32)
        narrow_PR = tl.zeros((ROWS, RANK), tl.float32)
        for depth in range(0, INPUTS, DEPTH):
            x_PI = x.load([first, depth])
            if INPUTS_FIRST:
                weight_IO = weight.load([expert * INPUTS + depth, column])
            else:
                weight_IO = weight.load([expert * WIDTH + column, depth]).T
            if INTERPRETED:
                x_PI, weight_IO = x_PI.to(tl.float32), weight_IO.to(tl.float32)
            sum_PO = tl.dot(x_PI, weight_IO, sum_PO)
            if ALL:
                down_IR = down.load([expert * INPUTS + depth, 0])
                if INTERPRETED:
                    down_IR = down_IR.to(tl.float32)
                narrow_PR = tl.dot(x_PI, down_IR, narrow_PR)
        row_P = (first + tl.arange(0, ROWS)).to(tl.int64)
        column_O = column + tl.arange(0, COLUMNS)
        rank_R = tl.arange(0, RANK)
        inside_P, inside_O = row_P < limit, column_O < WIDTH
        places_PR = row_P[:, None] * RANK + rank_R[None, :]
        if ALL:
            narrow_PR = narrow_PR.to(narrow.dtype.element_ty)
            if column == 0:
                tl.store(narrow + places_PR, narrow_PR, mask=inside_P[:, None])
        else:
            narrow_PR = tl.load(narrow + places_PR, mask=inside_P[:, None], other=0.0)
        places_RO = expert.to(tl.int64) * RANK * WIDTH + rank_R[:, None] * WIDTH + column_O[None, :]
        matrix_RO = tl.load(matrix + places_RO, mask=inside_O[None, :], other=0.0)
        if INTERPRETED:
            narrow_PR, matrix_RO = narrow_PR.to(tl.float32), matrix_RO.to(tl.float32)
        sum_PO += scale * tl.dot(narrow_PR, matrix_RO)
        place_PO = row_P[:, None] * WIDTH + column_O[None, :]
        tl.store(out + place_PO, sum_PO.to(out.dtype.element_ty), mask=inside_P[:, None] & inside_O[None, :])


def products(
    x_PI: torch.Tensor,
    weight: torch.Tensor,
    down_EIR: torch.Tensor | None,
    narrow_PR: torch.Tensor,
    matrix_ERO: torch.Tensor,
    scale: float,
    ends_E: torch.Tensor,
    config: tuple[int, ...],
    *,
    inputs_first: bool,
) -> torch.Tensor:
    """`weight` is (E, I, O) with `inputs_first`, otherwise (E, O, I). With `down_EIR`, `narrow_PR` is written."""
    rows, columns, depth, warps, stages, together = config
    (count, rank, width), (total, inputs) = matrix_ERO.shape, x_PI.shape
    out = x_PI.new_empty(total, width)
    flat = weight.reshape(-1, weight.shape[-1])
    block = [depth, columns] if inputs_first else [columns, depth]
    tiles = triton.cdiv(total, rows) + count
    _products[(tiles * triton.cdiv(width, columns),)](
        TensorDescriptor.from_tensor(x_PI, [rows, depth]),
        TensorDescriptor.from_tensor(flat, block),
        None if down_EIR is None else TensorDescriptor.from_tensor(down_EIR.view(-1, rank), [depth, rank]),
        narrow_PR,
        matrix_ERO,
        out,
        ends_E,
        scale,
        tiles,
        EXPERTS=count,
        PADDED=triton.next_power_of_2(count),
        INPUTS=inputs,
        WIDTH=width,
        RANK=rank,
        INPUTS_FIRST=inputs_first,
        ALL=down_EIR is not None,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        TOGETHER=together,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pairs", type=int, default=131_072, help="tokens times experts of a token")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--configs", type=int, default=len(CONFIGS), help="the number of configurations that are tried")
    parser.add_argument("--out")
    args = parser.parse_args()
    device = select(args.device)
    record: dict[str, Any] = {"settings": vars(args), "machine": machine(device), "rows": {}}
    where: Any = {"device": device.torch_device(), "dtype": torch.bfloat16}
    torch.manual_seed(0)
    shares = torch.rand(args.experts) + 0.5
    ends = (shares.cumsum(0) / shares.sum() * args.pairs).to(torch.int32)
    ends[-1] = args.pairs
    ends_E = ends.to(where["device"])
    cases = {
        "first": (args.hidden, 2 * args.inner, False),
        "second": (args.inner, args.hidden, False),
        "gradient of first": (2 * args.inner, args.hidden, True),
        "gradient of second": (args.hidden, args.inner, True),
    }
    for name, (inputs, width, inputs_first) in cases.items():
        x = torch.randn(args.pairs, inputs, **where)
        shape = (inputs, width) if inputs_first else (width, inputs)
        weight = torch.randn(args.experts, *shape, **where) / inputs**0.5
        matrix = torch.randn(args.experts, args.rank, width, **where)
        down = torch.randn(args.experts, inputs, args.rank, **where) / inputs**0.5
        narrow, written = grouped_linear(x, down, ends_E), torch.empty(args.pairs, args.rank, **where)
        weight_EIO = weight if inputs_first else weight.transpose(-2, -1)
        product = partial(grouped_linear, x, weight_EIO, ends_E)

        def with_sum(narrow: Any = narrow, product: Any = product, matrix: Any = matrix) -> torch.Tensor:
            out = product()
            add_products(out, narrow, matrix, 0.5, ends_E)
            return out

        def separate(x: Any = x, down: Any = down, with_sum: Any = with_sum) -> torch.Tensor:
            return with_sum(grouped_linear(x, down, ends_E))

        work: dict[str, Callable[[], torch.Tensor]] = {
            "product alone": product,
            "product and sum": with_sum,
            "narrow product, product and sum": separate,
        }
        one = partial(products, x, weight, inputs_first=inputs_first)
        for config in CONFIGS[: args.configs]:
            work[f"one kernel {config}"] = partial(one, None, narrow, matrix, 0.5, ends_E, config)
            work[f"one kernel for all {config}"] = partial(one, down, written, matrix, 0.5, ends_E, config)
        expected, flops = with_sum().float(), 2.0 * args.pairs * inputs * width
        record["rows"][name] = {}
        for label, call in work.items():
            try:
                error = (call().float() - expected).abs().max().item() if label != "product alone" else 0.0
                found = timed(device, call, args.repeats)
            except Exception as problem:  # noqa: BLE001 - a configuration may not fit on the card
                print(f"{name:20}{label:48} {type(problem).__name__}: {str(problem).splitlines()[0][:60]}", flush=True)
                continue
            speed = flops / found["median"] / 1e12
            record["rows"][name][label] = {"seconds": found, "tflops": speed, "largest_error": error}
            print(f"{name:20}{label:48}{found['median'] * 1e3:8.3f} ms {speed:7.1f} TFLOP/s  {error:.3g}", flush=True)
    if args.out:
        write_record(record, args.out)


def timed(device: Any, call: Callable[[], torch.Tensor], repeats: int) -> dict[str, float]:
    found = []
    for _ in range(repeats + 2):
        stopwatch = Stopwatch(device)
        call()
        found.append(stopwatch.read().wall)
    return summary(found[2:])


if __name__ == "__main__":
    main()
