"""The grouped products of experts with a LoRA adapter: their speed, and what the adapter adds.

    python bench/experts.py --out bench/results/experts_h200.json

Each group of lines is one of the products of a layer: outputs of the first and of the second projection, and the
gradients of their inputs. "copy" writes a tensor of the size of the outputs, which reads and writes as many bytes as
the sum with the adapter (`lockstep/kernels/experts/adapted_experts_triton.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lockstep.device.select import select
from lockstep.kernels.experts.adapted_experts_triton import TILE, Tile, add_products
from lockstep.kernels.experts.grouped_experts import grouped_linear
from report import machine, summary, write_record
from sides import Stopwatch

# The first tile is the one that training uses.
TILES = [
    TILE,
    Tile(32, 128, 4),
    Tile(128, 128, 8),
    Tile(32, 256, 4),
    Tile(64, 256, 8),
    Tile(16, 512, 4),
    Tile(32, 512, 8),
    Tile(64, 64, 4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pairs", type=int, default=131_072, help="tokens times experts of a token")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
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
        narrow = grouped_linear(x, down, ends_E)
        product = partial(grouped_linear, x, weight if inputs_first else weight.transpose(-2, -1), ends_E)
        out = product()
        work: dict[str, Callable[[], object]] = {
            "product": product,
            "product with A": partial(grouped_linear, x, down, ends_E),
            "copy": out.clone,
        }
        for tile in TILES:
            work[f"sum {tuple(tile)}"] = partial(add_products, out, narrow, matrix, ends_E, tile)
        flops, moved = 2.0 * args.pairs * inputs * width, 2.0 * out.nbytes
        record["rows"][name] = {}
        for label, call in work.items():
            found = timed(device, call, args.repeats)
            summed = not label.startswith("product")
            speed = moved / found["median"] / 1e9 if summed else flops / found["median"] / 1e12
            record["rows"][name][label] = {"seconds": found, "gb_per_s" if summed else "tflops": speed}
            unit = "GB/s" if summed else "TFLOP/s"
            shown = "" if label == "product with A" else f"{speed:9.1f} {unit}"
            print(f"{name:20}{label:22}{found['median'] * 1e3:8.3f} ms{shown}", flush=True)
    if args.out:
        write_record(record, args.out)


def timed(device: Any, call: Callable[[], object], repeats: int) -> dict[str, float]:
    found = []
    for _ in range(repeats + 2):
        stopwatch = Stopwatch(device)
        call()
        found.append(stopwatch.read().wall)
    return summary(found[2:])


if __name__ == "__main__":
    main()
