"""The least time that a device needs for a step, by its matrix FLOP/s and its memory bandwidth.

    python bench/roofline.py --shape qwen2.5-0.5b --batch 256 --context 512

The parts of the formulas are those of `lockstep plan --cluster` (`lockstep/preflight/cluster.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.device.chips import CHIPS
from lockstep.preflight.cluster import ModelCost, attention_flops, cache_seconds, weights_seconds
from shapes import SHAPES

# Measured on one H200 with torch: a large bf16 product, and a copy (read and write counted).
FLOPS, BANDWIDTH = CHIPS["h200"].flops(2), CHIPS["h200"].memory_speed


def decode_seconds(cost: ModelCost, batch: int, context: float, flops: float, bandwidth: float) -> float:
    """Returns the seconds of one decode step for `batch` sequences: max(2 N / BW, 2 N B / F) + B S kv / BW."""
    return weights_seconds(cost, batch, flops, bandwidth) + cache_seconds(cost, batch, context, bandwidth)


def generation_seconds(
    cost: ModelCost, batch: int, prompt: int, response: int, flops: float, bandwidth: float
) -> float:
    """Returns the seconds to decode a response, with the mean context length for every token. Prefill is excluded."""
    return response * decode_seconds(cost, batch, prompt + response / 2, flops, bandwidth)


def training_flops(cost: ModelCost, lengths: Sequence[int], *, frozen: bool = False) -> float:
    """Returns the FLOPs of forward and backward over sequences with these lengths: 6 N S + 6 L Hq d S^2 for each
    sequence. Frozen weights have no gradients of their own, so 6 N is 4 N for them."""
    products = (4 if frozen else 6) * cost.multiplied * sum(lengths)
    return float(products + attention_flops(cost, sum(length**2 for length in lengths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tflops", type=float, default=FLOPS / 1e12)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH / 1e12, help="TB/s")
    args = parser.parse_args()
    cost, peaks = SHAPES[args.shape].cost, (args.tflops * 1e12, args.bandwidth * 1e12)
    step = decode_seconds(cost, args.batch, args.context, *peaks)
    trained = training_flops(cost, [args.context] * args.batch) / peaks[0]
    tokens = args.batch * args.context
    print(f"{args.shape}: {cost.multiplied:,} multiplied weights, {2 * cost.cached:,} bytes of cache a token")
    print(
        f"decode step of {args.batch} at context {args.context}: {step * 1e3:.3f} ms, {args.batch / step:,.0f} tokens/s"
    )
    print(f"update on {args.batch} x {args.context}: {trained * 1e3:.1f} ms, {tokens / trained:,.0f} tokens/s")


if __name__ == "__main__":
    main()
