"""The least time that a device needs for a step, by its matrix FLOP/s and its memory bandwidth.

    python bench/roofline.py --shape qwen2.5-0.5b --batch 256 --context 512

The formulas are those of `lockstep plan --cluster` (`lockstep/preflight/cluster.py`).
"""

from __future__ import annotations

import argparse

from lockstep.device.chips import CHIPS
from lockstep.preflight.cluster import decode_seconds, training_flops
from shapes import SHAPES

# Measured on one H200 with torch: a large bf16 product, and a copy (read and write counted).
FLOPS, BANDWIDTH = CHIPS["h200"].flops(2), CHIPS["h200"].memory_speed


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
